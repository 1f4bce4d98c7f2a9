"""Pages that are found again by their content: against a plain model of owners and contents, and in the scheduler."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aspire.scheduler.pages import PageTable
from aspire.scheduler.prefix_cache import PrefixCache, page_hashes

SLOTS, WIDTH = 4, 5
TOKENS = st.lists(st.integers(0, 3), max_size=70)


@given(TOKENS, TOKENS)
def test_hashes_are_equal_exactly_as_far_as_the_prefixes_are(left: list[int], right: list[int]) -> None:
    one, other = page_hashes(left), page_hashes(right)
    assert len(one) == len(left) // 16
    for page in range(min(len(one), len(other))):
        end = 16 * (page + 1)
        assert (one[page] == other[page]) is (left[:end] == right[:end])


@given(TOKENS, st.integers(0, 5))
def test_hashes_go_on_from_those_known(tokens: list[int], known: int) -> None:
    whole = page_hashes(tokens)
    assert page_hashes(np.array(tokens), whole[:known]) == whole
    assert page_hashes(tokens[:20], whole[:3]) == page_hashes(tokens[:20])


class PrefixMachine(RuleBasedStateMachine):
    """Slots fill pages with prefixes of a few families, publish them, leave, and adopt what is there."""

    @initialize(num_pages=st.integers(3, 16))
    def start(self, num_pages: int) -> None:
        self.table = PageTable(num_pages, SLOTS, WIDTH)
        self.held: list[list[int]] = [[] for _ in range(SLOTS)]
        self.family = [0] * SLOTS
        self.content: dict[int, int] = {}  # physical page -> the name of what was written last

    @staticmethod
    def names(family: int) -> list[int]:
        return [100 * family + page for page in range(WIDTH)]

    @rule(slot=st.integers(0, SLOTS - 1), family=st.integers(1, 3), pages=st.integers(1, WIDTH))
    def enter(self, slot: int, family: int, pages: int) -> None:
        """An empty slot adopts the pages that are there and computes the others."""
        if self.held[slot]:
            return
        found = self.table.prefixes.match(self.names(family), pages - 1)
        for place, page in enumerate(found):
            assert self.content[page] == self.names(family)[place], "a page of other content was found"
        if pages - len(found) + self.table.prefixes.idle(found) > self.table.num_free:
            return
        adopted = self.table.adopt(slot, found)
        assert adopted[:, 1].tolist() == list(range(len(found))) and adopted[:, 2].tolist() == found
        grown = self.table.grow(np.array([slot]), np.array([pages]))
        owned = {page for held in self.held for page in held} | set(found)
        for _, logical, physical in grown.tolist():
            assert physical not in owned, "a page that somebody holds would be written"
            self.content[physical] = self.names(family)[logical]
        self.held[slot] = [*found, *grown[:, 2].tolist()]
        self.family[slot] = family

    @rule(slot=st.integers(0, SLOTS - 1), pages=st.integers(0, WIDTH))
    def publish(self, slot: int, pages: int) -> None:
        self.table.publish(self.table.held_by(slot), self.names(self.family[slot]), pages)

    @rule(slot=st.integers(0, SLOTS - 1), keep=st.integers(0, WIDTH))
    def leave(self, slot: int, keep: int) -> None:
        self.table.shrink(np.array([slot]), np.array([keep]))
        self.held[slot] = self.held[slot][:keep]

    @rule(slot=st.integers(0, SLOTS - 1))
    def distrust(self, slot: int) -> None:
        pages = self.held[slot]
        self.table.prefixes.forget(self.table.held_by(slot))
        assert not self.table.prefixes.named[pages].any()

    @precondition(lambda self: self.table.prefixes.named.any())
    @rule()
    def forget(self) -> None:
        self.table.forget_all()
        assert not self.table.prefixes.named.any() and self.table.prefixes.num_idle == 0

    @invariant()
    def counts_add_up(self) -> None:
        owners = np.zeros(self.table.num_pages, dtype=int)
        for slot, pages in enumerate(self.held):
            assert self.table.table[slot].tolist() == pages + [0] * (WIDTH - len(pages))
            owners[pages] += 1
        assert (self.table.owners == owners).all() and owners[0] == 0
        assert self.table.num_free == self.table.num_usable - np.count_nonzero(owners)


TestPrefixes = PrefixMachine.TestCase


def filled(table: PageTable, slot: int, names: list[int]) -> list[int]:
    """``slot`` computes and publishes the pages of ``names``."""
    pages = table.grow(np.array([slot]), np.array([len(names)]))[:, 2].tolist()
    table.publish(table.held_by(slot), names, len(names))
    return pages


def test_the_longest_unused_page_is_taken_first_and_the_end_of_a_prefix_before_its_begin() -> None:
    table = PageTable(7, 3, 6)
    first, second = filled(table, 0, [1, 2, 3]), filled(table, 1, [11, 12, 13])
    table.free(table.detach(1))
    table.free(table.detach(0))
    assert table.num_free == 6 and table.prefixes.num_idle == 6
    taken = table.grow(np.array([2]), np.array([4]))[:, 2].tolist()
    assert sorted(taken) == sorted([*second, first[2]])
    assert table.prefixes.match([1, 2, 3], 3) == first[:2] and table.prefixes.match([11], 1) == []


def test_a_prefix_in_use_is_never_taken() -> None:
    table = PageTable(7, 3, 6)
    pages = filled(table, 0, [1, 2, 3])
    table.adopt(1, table.prefixes.match([1, 2, 9], 3))
    table.free(table.detach(0))
    assert table.owners[pages].tolist() == [1, 1, 0] and table.num_free == 4
    taken = table.grow(np.array([2]), np.array([4]))[:, 2].tolist()
    assert not set(taken) & set(pages[:2])
    table.free(table.detach(1))
    assert table.prefixes.match([1, 2, 3], 3) == pages[:2]


def test_equal_pages_computed_twice_keep_one_name() -> None:
    table = PageTable(7, 2, 6)
    first, second = filled(table, 0, [1, 2]), filled(table, 1, [1, 2])
    assert table.prefixes.match([1, 2], 2) == first
    table.free(table.detach(1))
    assert table.prefixes.num_idle == 0 and not table.prefixes.named[second].any()
    table.free(table.detach(0))
    assert table.prefixes.num_idle == 2 and table.num_free == 6


@pytest.mark.parametrize("delivered", [0, 1, 2])
def test_promises_are_kept_or_withdrawn(delivered: int) -> None:
    table = PageTable(7, 2, 6)
    prefixes = table.prefixes
    prefixes.promise(0, [1, 2])
    prefixes.promise(1, [2, 3])
    assert [prefixes.promised_by(name) for name in (1, 2, 3)] == [0, 0, 1]
    table.grow(np.array([0]), np.array([2]))
    table.publish(table.held_by(0), [1, 2], delivered)
    assert [prefixes.promised_by(name) for name in (1, 2)] == [None] * delivered + [0] * (2 - delivered)
    prefixes.withdraw(0)
    assert [prefixes.promised_by(name) for name in (1, 2, 3)] == [None, None, 1]
    prefixes.withdraw(1)
    assert prefixes.promised_by(3) is None


@given(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6, unique=True), max_size=12))
def test_a_page_and_a_name_belong_to_each_other_whatever_was_named_before(runs: list[list[int]]) -> None:
    """Names and pages one at a time, as a dictionary has them."""
    prefixes = PrefixCache(16)
    page_of: dict[int, int] = {}
    for number, names in enumerate(runs):
        pages = [(name * (number + 1)) % 13 + 1 for name in names]
        pages = [page for place, page in enumerate(pages) if page not in pages[:place]]
        for name, page in zip(names, pages, strict=False):
            if name not in page_of and page not in page_of.values():
                page_of[name] = page
        prefixes.name(np.array(pages, dtype=np.int32), names[: len(pages)])
        assert [prefixes.match([name], 1) for name in range(1, 13)] == [
            [page_of[name]] if name in page_of else [] for name in range(1, 13)
        ]
        assert prefixes.named.nonzero()[0].tolist() == sorted(page_of.values())
        lost = np.array(pages[:1], dtype=np.int32)
        prefixes.forget(lost)
        page_of = {name: page for name, page in page_of.items() if page != lost[0]}
