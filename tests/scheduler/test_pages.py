"""The page table against a plain model of it: a set of free pages and a list of pages for each slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from aspire.errors import CapacityError
from aspire.scheduler.pages import PageTable

SLOTS, WIDTH = 4, 6


class PageMachine(RuleBasedStateMachine):
    """Random grows, shrinks and releases."""

    @initialize(num_pages=st.integers(2, 20))
    def start(self, num_pages: int) -> None:
        self.table = PageTable(num_pages, SLOTS, WIDTH)
        self.model: list[list[int]] = [[] for _ in range(SLOTS)]

    @rule(slots=st.lists(st.integers(0, SLOTS - 1), unique=True, min_size=1), data=st.data())
    def grow(self, slots: list[int], data: st.DataObject) -> None:
        pages = np.array([data.draw(st.integers(0, WIDTH)) for _ in slots])
        where = np.array(slots)
        missing = sum(max(0, int(want) - len(self.model[slot])) for slot, want in zip(slots, pages, strict=True))
        assert self.table.missing(where, pages) == missing
        before = self.table.table.copy()
        if missing > self.table.num_free:
            with pytest.raises(CapacityError):
                self.table.grow(where, pages)
            assert (self.table.table == before).all(), "a refused request changed something"
            return
        entries = self.table.grow(where, pages)
        assert len(entries) == missing
        for slot, logical, physical in entries.tolist():
            assert logical == len(self.model[slot]), "pages are not added in order"
            self.model[slot].append(physical)

    @rule(slot=st.integers(0, SLOTS - 1), keep=st.integers(0, WIDTH))
    def shrink(self, slot: int, keep: int) -> None:
        self.table.shrink(np.array([slot]), np.array([keep]))
        self.model[slot] = self.model[slot][:keep]

    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot: int) -> None:
        self.table.free(self.table.detach(slot))
        self.model[slot] = []

    @invariant()
    def same_as_the_model(self) -> None:
        owned = [page for pages in self.model for page in pages]
        assert len(set(owned)) == len(owned) and 0 not in owned and max(owned, default=0) < self.table.num_pages
        assert self.table.num_free == self.table.num_usable - len(owned)
        for slot, pages in enumerate(self.model):
            assert self.table.held[slot] == len(pages)
            assert self.table.table[slot].tolist() == pages + [0] * (WIDTH - len(pages))


TestPageTable = PageMachine.TestCase


def test_every_page_can_be_handed_out_again() -> None:
    table = PageTable(9, 2, 8)
    for _ in range(3):
        first = table.grow(np.array([0]), np.array([8]))
        assert sorted(first[:, 2].tolist()) == list(range(1, 9)) and table.num_free == 0
        table.free(table.detach(0))
    assert table.num_free == table.num_usable == 8


def test_a_pool_without_pages_is_an_error() -> None:
    with pytest.raises(CapacityError, match="at least 2"):
        PageTable(1, 1, 1)
