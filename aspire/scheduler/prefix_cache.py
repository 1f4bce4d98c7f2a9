"""Which physical KV page holds which prefix, so that equal prefixes are computed once. Numpy and the standard library.

A full page is named by a hash chained over the tokens of its whole prefix, so equal names mean equal KV. Pages that
nobody holds keep their name until they are taken again, the longest unused first.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler.idle_pages import IdlePages, Pages
from aspire.scheduler.selector_spec import PAGE_TOKENS

Name = Hashable
"""Of a full page: 16 bytes where it stands for tokens (`page_hashes`), a number where it stands for a recorded one."""

_HASH_BYTES = 16
_PAGE_BYTES = 4 * PAGE_TOKENS


def page_hashes(token_ids: Sequence[int] | NDArray[Any], known: Sequence[bytes] = ()) -> tuple[bytes, ...]:
    """One hash for each full page of ``token_ids``, chained over what is before it; ``known`` are those of the first
    pages, as made before."""
    full, first = len(token_ids) // PAGE_TOKENS, len(known)
    if full <= first:
        return tuple(known[:full])
    raw = np.asarray(token_ids[first * PAGE_TOKENS : full * PAGE_TOKENS], dtype=np.int32).tobytes()
    state = known[-1] if first else bytes(_HASH_BYTES)
    made: list[bytes] = []
    for at in range(0, len(raw), _PAGE_BYTES):
        state = blake2b(state + raw[at : at + _PAGE_BYTES], digest_size=_HASH_BYTES).digest()
        made.append(state)
    return (*known, *made)


class PrefixCache:
    """Names of physical pages. A page is *named* while its content is known, *idle* while it is named and unheld.

    Names that a running request is about to compute are *promised* by its slot: who needs one does better to wait than
    to compute it again.
    """

    def __init__(self, num_pages: int) -> None:
        self.named = np.zeros(num_pages, dtype=bool)  # by physical page
        self._page: dict[Name, int] = {}  # name -> physical page
        self._name = np.full(num_pages, None, dtype=object)  # by physical page
        self._idle = IdlePages(num_pages)
        self._promised: dict[Name, int] = {}  # name -> slot
        self._promises: dict[int, Sequence[Name]] = {}  # slot -> names, in the order of its pages

    @property
    def num_idle(self) -> int:
        """Named pages that nobody holds: free, and reusable until they are taken."""
        return len(self._idle)

    def match(self, names: Sequence[Name], most: int) -> list[int]:
        """Physical pages of the longest run of ``names`` from the first that is there, at most ``most`` pages."""
        found: list[int] = []
        page_of = self._page.get
        for name in names[:most]:
            page = page_of(name)
            if page is None:
                break
            found.append(page)
        return found

    def idle(self, pages: Sequence[int]) -> int:
        """How many of ``pages`` nobody holds."""
        return self._idle.count_of(np.array(pages, dtype=np.int32)) if pages else 0

    def name(self, pages: Pages, names: Sequence[Name]) -> None:
        """``pages`` hold the KV of ``names``. A name that another page has stays with that one."""
        if self._promised:
            deque(map(self._promised.pop, names, itertools.repeat(None)), maxlen=0)
        named = self.named[pages]
        if np.count_nonzero(named):
            pages, names = pages[~named], list(itertools.compress(names, ~named))
        given = pages.tolist()
        holders = list(map(self._page.setdefault, names, given))
        if holders != given:
            mine = np.array(holders) == pages
            pages, names = pages[mine], list(itertools.compress(names, mine))
        self._name[pages] = np.fromiter(names, dtype=object, count=len(names))
        self.named[pages] = True

    def promise(self, slot: int, names: Sequence[Name]) -> None:
        """``slot`` will compute ``names``; those that another slot has promised stay with that one."""
        holders = list(map(self._promised.setdefault, names, itertools.repeat(slot)))
        if holders.count(slot) < len(names):
            names = [name for name, holder in zip(names, holders, strict=True) if holder == slot]
        if names:
            self._promises[slot] = names

    def promised_by(self, name: Name) -> int | None:
        """The slot that is about to compute ``name``."""
        return self._promised.get(name)

    def promised_run(self, names: Sequence[Name], enough: int) -> int:
        """How many of ``names``, from the first, one slot is about to compute; counted up to ``enough``."""
        slot = self.promised_by(names[0])
        same = (self.promised_by(name) == slot for name in names[:enough])
        return 0 if slot is None else sum(itertools.takewhile(bool, same))

    def withdraw(self, slot: int) -> None:
        """``slot`` computes nothing any more: what it promised and did not deliver is free to be computed by others."""
        names = self._promises.pop(slot, ())
        if self._promised:
            for name in names:
                if self._promised.get(name) == slot:
                    del self._promised[name]

    def retire(self, pages: Pages) -> None:
        """Nobody holds these named ``pages`` any more; the first of them is taken first."""
        self._idle.push(pages)

    def revive(self, pages: Pages) -> None:
        """``pages`` are held again."""
        self._idle.remove(pages)

    def evict(self, count: int) -> Pages:
        """Take ``count`` idle pages, the longest unused first; they lose their names."""
        taken = self._idle.pop(count)
        self.forget(taken)
        return taken

    def forget(self, pages: Pages) -> None:
        """``pages`` lose their names: they are taken, or their content, while they are held, is not to be trusted."""
        named = pages[self.named[pages]]
        deque(map(self._page.pop, self._name[named]), maxlen=0)
        self._name[named] = None
        self.named[named] = False

    def forget_all(self) -> Pages:
        """All pages lose their names. Returns those that were idle, the longest unused first."""
        self._page.clear()
        self._name[:] = None
        self.named[:] = False
        return self._idle.pop(len(self._idle))
