"""KV pages: which physical page holds which logical page of which slot. Vectorised; knows nothing of tokens.

Slots may hold pages in common: full ones at the same place of equal prefixes, which nobody writes any more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aspire.errors import CapacityError
from aspire.scheduler.prefix_cache import Name, PrefixCache

Ints = NDArray[np.int64]


class PageTable:
    """Physical pages of ``max_slots`` slots. Page 0 is the trash page of padded rows and is never handed out.

    ``table``: int32 [max_slots, max_pages_per_slot], 0 where no page is held. ``held``: int64 [max_slots].
    ``owners``: int32 [num_pages], slots that hold each page. ``prefixes``: pages found again by their content.
    """

    def __init__(self, num_pages: int, max_slots: int, max_pages_per_slot: int) -> None:
        if num_pages < 2:
            raise CapacityError(
                f"a KV pool of {num_pages} pages holds nothing; at least 2 are needed, raise the memory share"
            )
        self.num_pages = num_pages
        self.table = np.zeros((max_slots, max_pages_per_slot), dtype=np.int32)
        self.held = np.zeros(max_slots, dtype=np.int64)
        self.owners = np.zeros(num_pages, dtype=np.int32)
        self.prefixes = PrefixCache(num_pages)
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # a stack: low pages are handed out first
        self._num_free = num_pages - 1

    @property
    def num_usable(self) -> int:
        """Pages that requests can hold in total."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, those with a reusable content among them."""
        return self._num_free + self.prefixes.num_idle

    def short(self, slots: Ints | slice, pages: Ints) -> Ints:
        """[n] pages that each of ``slots`` lacks to hold ``pages`` [n]."""
        return np.asarray(np.maximum(pages - self.held[slots], 0))

    def missing(self, slots: Ints, pages: Ints) -> int:
        """Pages that `grow` would take."""
        return int(np.add.reduce(self.short(slots, pages)))

    def grow(self, slots: Ints, pages: Ints) -> Ints:
        """Let each of ``slots`` hold at least ``pages`` pages; returns new entries [n, 3]: slot, logical, physical.

        Raises `CapacityError`, with nothing changed, when fewer pages are free than are needed.
        """
        return self.supply(slots, self.short(slots, pages))

    def supply(self, slots: Ints, more: Ints) -> Ints:
        """`grow` by ``more`` [n] pages each."""
        short = more.nonzero()[0]
        if not len(short):
            return np.empty((0, 3), dtype=np.int64)
        owner, more = slots[short], more[short]
        total = int(np.add.reduce(more))
        physical, logical = self._take(total), self.held[owner]
        self.held[owner] = logical + more
        if len(owner) < total:  # somebody needs several
            within = np.arange(total) - np.repeat(np.cumsum(more) - more, more)
            owner, logical = np.repeat(owner, more), np.repeat(logical, more) + within
        self.table[owner, logical] = physical
        return _entries(owner, logical, physical)

    def fill(self, slot: int, pages: int) -> Ints:
        """`grow` of the one ``slot``, which holds fewer."""
        return self._append(slot, self._take(pages - int(self.held[slot])))

    def adopt(self, slot: int, pages: Sequence[int]) -> Ints:
        """``pages`` (from `PrefixCache.match`) become the first pages of the empty ``slot``; returns entries [n, 3]."""
        physical = np.array(pages, dtype=np.int32)
        if len(physical):
            self.prefixes.revive(physical)
            self.owners[physical] += 1
        return self._append(slot, physical)

    def held_by(self, slot: int) -> NDArray[np.int32]:
        """Pages of ``slot``, in the order of its tokens; a view."""
        return self.table[slot, : self.held[slot]]

    def publish(self, own: NDArray[np.int32], names: Sequence[Name], pages: int) -> None:
        """The first ``pages`` of the pages ``own`` are full, committed and never written again: ``names`` find them."""
        count = min(pages, len(names), len(own))
        own = own[:count]
        named = self.prefixes.named[own]
        if np.count_nonzero(named) < count:
            first = int(named.argmin())
            self.prefixes.name(own[first:], names[first:count])

    def forget_all(self) -> None:
        """No page shall be found by its content any more."""
        self._push(self.prefixes.forget_all())

    def shrink(self, slots: Ints, pages: Ints) -> None:
        """Free what each of ``slots`` holds beyond ``pages`` pages."""
        if np.count_nonzero(self.held[slots] - pages == 1) == len(slots):
            # one page each, begun by drafts that were rejected: nobody else holds it or could find it
            last = self.table[slots, pages]
            if np.count_nonzero(self.owners[last] == 1) == len(last) and not np.count_nonzero(
                self.prefixes.named[last]
            ):
                self.owners[last] = 0
                self.table[slots, pages] = 0
                self.held[slots] = pages
                self._push(last[::-1])
                return
        for slot, keep in zip(slots.tolist(), pages.tolist(), strict=True):
            self.free(self.detach(slot, keep))

    def detach(self, slot: int, keep: int = 0) -> NDArray[np.int32]:
        """``slot`` holds its first ``keep`` pages from now on. Returns the others, to `free` them."""
        held = int(self.held[slot])
        if held <= keep:
            return self.table[slot, :0]
        pages = self.table[slot, keep:held].copy()
        self.table[slot, keep:held] = 0
        self.held[slot] = keep
        return pages

    def free(self, pages: NDArray[np.int32]) -> None:
        """One holder less of each of the ``pages``, which were detached."""
        if not len(pages):
            return
        self.owners[pages] -= 1
        shared = self.owners[pages]
        if np.count_nonzero(shared):
            pages = pages[shared == 0]
        named = self.prefixes.named[pages]
        if count := np.count_nonzero(named):
            # the last pages of a prefix are taken first: without its first ones the others cannot be found
            self.prefixes.retire((pages if count == len(pages) else pages[named])[::-1])
            pages = pages[~named]
        self._push(pages)

    def _append(self, slot: int, physical: NDArray[np.int32]) -> Ints:
        """``physical`` become the next pages of ``slot``; returns entries [n, 3]."""
        first = int(self.held[slot])
        last = first + len(physical)
        self.table[slot, first:last] = physical
        self.held[slot] = last
        return _entries(slot, np.arange(first, last), physical)

    def _take(self, count: int) -> NDArray[np.int32]:
        if count > self.num_free:
            raise CapacityError(
                f"{count} KV pages are needed and {self.num_free} are free; preempt or lower max-num-seqs"
            )
        if count > self._num_free:
            self._push(self.prefixes.evict(count - self._num_free))
        self._num_free -= count
        taken = self._free[self._num_free : self._num_free + count][::-1]
        self.owners[taken] = 1
        return taken

    def _push(self, physical: NDArray[np.int32]) -> None:
        count = len(physical)
        self._free[self._num_free : self._num_free + count] = physical[::-1]
        self._num_free += count


def _entries(slot: Ints | int, logical: Ints, physical: NDArray[np.int32]) -> Ints:
    """[n, 3] rows for the block tables of executors."""
    entries = np.empty((len(logical), 3), dtype=np.int64)
    entries[:, 0], entries[:, 1], entries[:, 2] = slot, logical, physical
    return entries
