"""KV pages: which physical page holds which logical page of which slot. Vectorised; knows nothing of tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aspire.errors import CapacityError

Ints = NDArray[np.int64]


class PageTable:
    """Physical pages of ``max_slots`` slots. Page 0 is the trash page of padded rows and is never handed out.

    ``table``: int32 [max_slots, max_pages_per_slot], 0 where no page is held. ``held``: int64 [max_slots].
    """

    def __init__(self, num_pages: int, max_slots: int, max_pages_per_slot: int) -> None:
        if num_pages < 2:
            raise CapacityError(
                f"a KV pool of {num_pages} pages holds nothing; at least 2 are needed, raise the memory share"
            )
        self.num_pages = num_pages
        self.table = np.zeros((max_slots, max_pages_per_slot), dtype=np.int32)
        self.held = np.zeros(max_slots, dtype=np.int64)
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # a stack: low pages are handed out first
        self._num_free = num_pages - 1

    @property
    def num_usable(self) -> int:
        """Pages that requests can hold in total."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._num_free

    def missing(self, slots: Ints, pages: Ints) -> int:
        """Pages that `grow` would take."""
        short = pages - self.held[slots]
        return int(short[short > 0].sum())

    def grow(self, slots: Ints, pages: Ints) -> Ints:
        """Let each of ``slots`` hold at least ``pages`` pages; returns new entries [n, 3]: slot, logical, physical.

        Raises `CapacityError`, with nothing changed, when fewer pages are free than are needed.
        """
        missing = np.maximum(pages - self.held[slots], 0)
        total = int(missing.sum())
        if total == 0:
            return np.empty((0, 3), dtype=np.int64)
        if total > self._num_free:
            raise CapacityError(
                f"{total} KV pages are needed and {self._num_free} are free; preempt or lower max-num-seqs"
            )
        owner = np.repeat(slots, missing)
        within = np.arange(total) - np.repeat(np.cumsum(missing) - missing, missing)
        logical = self.held[owner] + within
        physical = self._take(total)
        self.table[owner, logical] = physical
        self.held[slots] += missing
        return np.stack([owner, logical, physical.astype(np.int64)], axis=1)

    def shrink(self, slots: Ints, pages: Ints) -> None:
        """Free what each of ``slots`` holds beyond ``pages`` pages."""
        for slot, keep in zip(slots.tolist(), pages.tolist(), strict=True):
            held = int(self.held[slot])
            if held > keep:
                self._drop(self.table[slot, keep:held])
                self.table[slot, keep:held] = 0
                self.held[slot] = keep

    def release(self, slot: int) -> None:
        """Free all pages of ``slot``."""
        self.shrink(np.array([slot]), np.array([0]))

    def _take(self, count: int) -> NDArray[np.int32]:
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count][::-1].copy()

    def _drop(self, physical: NDArray[np.int32]) -> None:
        self._free[self._num_free : self._num_free + len(physical)] = physical[::-1]
        self._num_free += len(physical)
