"""The margin of every committed token, by request: kept only where a run is to be compared with another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Singles = NDArray[np.float32]


class MarginLog:
    """Margins as steps bring them; `by_request` puts them in order."""

    def __init__(self) -> None:
        self._parts: list[tuple[Ints, Ints, Singles]] = []  # request, output position, margin

    def append(
        self,
        request: Ints,  # [rows] number of each row's request
        first: Ints,  # [rows] output tokens that it had before
        counts: Ints,  # [rows] tokens committed
        sample_start: NDArray[np.int64],  # [rows] place of the row's first sample
        margin: Singles,  # [samples]
    ) -> None:
        """Note the tokens that a step committed."""
        row = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._parts.append((request[row], first[row] + place, margin[sample_start[row] + place]))

    def by_request(self, count: int) -> list[Singles]:
        """Margins [output tokens] of requests 0..count-1."""
        if not self._parts:
            return [np.empty(0, dtype=np.float32)] * count
        request, position, margin = (np.concatenate(each) for each in zip(*self._parts, strict=True))
        order = np.lexsort((position, request))
        ends = np.cumsum(np.bincount(request, minlength=count))
        return np.split(margin[order], ends[:-1])
