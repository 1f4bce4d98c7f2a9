"""Pages in the order in which they fell idle: the oldest are taken first, any may be taken out between. Vectorised."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Pages = NDArray[np.int32]  # physical page numbers

_GAP = -1
_WINDOW = 64  # places looked at for the oldest pages before more are


class IdlePages:
    """A queue of distinct physical pages 0..``num_pages`` - 1.

    Places in the queue are handed out in order and closed up when they run out; a page that is taken out leaves a gap.
    """

    def __init__(self, num_pages: int) -> None:
        self._queue: Pages = np.full(2 * num_pages, _GAP, dtype=np.int32)
        self._place = np.full(num_pages, _GAP, dtype=np.int64)  # of each page in the queue
        self._begin = self._end = 0  # nothing but gaps outside
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def count_of(self, pages: Pages) -> int:
        """How many of ``pages`` are here."""
        return int(np.count_nonzero(self._place[pages] != _GAP))

    def push(self, pages: Pages) -> None:
        """Add ``pages``, none of which is here; the first of them is taken before the others."""
        if self._end + len(pages) > len(self._queue):
            self._close_up()
        begin, self._end = self._end, self._end + len(pages)
        self._queue[begin : self._end] = pages
        self._place[pages] = np.arange(begin, self._end)
        self._count += len(pages)

    def remove(self, pages: Pages) -> None:
        """Take out those of ``pages`` that are here."""
        places = self._place[pages]
        self._place[pages] = _GAP
        places = places[places != _GAP]
        self._queue[places] = _GAP
        self._count -= len(places)

    def pop(self, count: int) -> Pages:
        """Take the ``count`` oldest, of at least as many."""
        if not count:
            return np.empty(0, dtype=np.int32)
        width = count + _WINDOW
        while True:
            held = (self._queue[self._begin : min(self._begin + width, self._end)] != _GAP).nonzero()[0][:count]
            if len(held) == count:
                break
            width *= 4
        places = held + self._begin
        pages: Pages = self._queue[places]
        self._queue[places] = _GAP
        self._place[pages] = _GAP
        self._begin = int(places[-1]) + 1
        self._count -= count
        return pages

    def _close_up(self) -> None:
        pages = self._queue[self._begin : self._end]
        pages = pages[pages != _GAP]
        self._queue[:] = _GAP
        self._queue[: len(pages)] = pages
        self._place[pages] = np.arange(len(pages))
        self._begin, self._end = 0, len(pages)
