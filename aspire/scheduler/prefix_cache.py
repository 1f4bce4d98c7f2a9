"""Which physical KV page holds which prefix, so that equal prefixes are computed once. Numpy and the standard library.

A full page is named by a hash chained over the tokens of its whole prefix, so equal names mean equal KV. Pages that
nobody holds keep their name until they are taken again, the longest unused first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler.selector_spec import PAGE_TOKENS

_HASH_BYTES = 16


def page_hashes(token_ids: Sequence[int] | NDArray[Any], known: Sequence[int] = ()) -> tuple[int, ...]:
    """One hash for each full page of ``token_ids``, chained over what is before it; ``known`` are those of the first
    pages, as made before."""
    full, first = len(token_ids) // PAGE_TOKENS, len(known)
    if full <= first:
        return tuple(known[:full])
    raw = np.asarray(token_ids[first * PAGE_TOKENS : full * PAGE_TOKENS], dtype=np.int32).tobytes()
    page_bytes = 4 * PAGE_TOKENS
    made = list(known)
    state = known[-1].to_bytes(_HASH_BYTES, "little") if first else bytes(_HASH_BYTES)
    for at in range(0, len(raw), page_bytes):
        state = blake2b(state + raw[at : at + page_bytes], digest_size=_HASH_BYTES).digest()
        made.append(int.from_bytes(state, "little"))
    return tuple(made)


class PrefixCache:
    """Names of physical pages. A page is *named* while its content is known, *idle* while it is named and unheld.

    Names that a running request is about to compute are *promised* by its slot: who needs one does better to wait than
    to compute it again.
    """

    def __init__(self, num_pages: int) -> None:
        self.named = np.zeros(num_pages, dtype=bool)  # by physical page
        self._page: dict[int, int] = {}  # name -> physical page
        self._name: dict[int, int] = {}  # physical page -> name
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._promised: dict[int, int] = {}  # name -> slot
        self._promises: dict[int, list[int]] = {}  # slot -> names, in the order of its pages

    @property
    def num_idle(self) -> int:
        """Named pages that nobody holds: free, and reusable until they are taken."""
        return len(self._idle)

    def match(self, names: Sequence[int], most: int) -> list[int]:
        """Physical pages of the longest run of ``names`` from the first that is there, at most ``most`` pages."""
        found: list[int] = []
        for index in range(min(most, len(names))):
            page = self._page.get(names[index])
            if page is None:
                break
            found.append(page)
        return found

    def idle(self, pages: Sequence[int]) -> int:
        """How many of ``pages`` nobody holds."""
        return sum(page in self._idle for page in pages)

    def name(self, pages: Sequence[int], names: Sequence[int]) -> None:
        """``pages`` hold the KV of ``names``. A name that another page has stays with that one."""
        for page, name in zip(pages, names, strict=True):
            self._promised.pop(name, None)
            if name not in self._page and page not in self._name:
                self._page[name], self._name[page] = page, name
                self.named[page] = True

    def promise(self, slot: int, names: Sequence[int]) -> None:
        """``slot`` will compute ``names``; those that another slot has promised stay with that one."""
        mine = [name for name in names if self._promised.setdefault(name, slot) == slot]
        if mine:
            self._promises[slot] = mine

    def promised_by(self, name: int) -> int | None:
        """The slot that is about to compute ``name``."""
        return self._promised.get(name)

    def promised_run(self, names: Sequence[int], enough: int) -> int:
        """How many of ``names``, from the first, one slot is about to compute; counted up to ``enough``."""
        slot = self.promised_by(names[0])
        same = (self.promised_by(name) == slot for name in names[:enough])
        return 0 if slot is None else sum(itertools.takewhile(bool, same))

    def withdraw(self, slot: int) -> None:
        """``slot`` computes nothing any more: what it promised and did not deliver is free to be computed by others."""
        for name in self._promises.pop(slot, ()):
            if self._promised.get(name) == slot:
                del self._promised[name]

    def retire(self, pages: Sequence[int]) -> None:
        """Nobody holds these named ``pages`` any more; the first of them is taken first."""
        self._idle.update(dict.fromkeys(pages))

    def revive(self, pages: Sequence[int]) -> None:
        """``pages`` are held again."""
        for page in pages:
            self._idle.pop(page, None)

    def evict(self, count: int) -> list[int]:
        """Take ``count`` idle pages, the longest unused first; they lose their names."""
        taken = [self._idle.popitem(last=False)[0] for _ in range(count)]
        self._unname(taken)
        return taken

    def forget(self, pages: Sequence[int]) -> None:
        """The content of ``pages``, which are held, is not to be trusted: they lose their names."""
        self._unname(pages)

    def forget_all(self) -> list[int]:
        """All pages lose their names. Returns those that were idle."""
        self._unname(list(self._name))
        idle = list(self._idle)
        self._idle.clear()
        return idle

    def _unname(self, pages: Sequence[int]) -> None:
        for page in pages:
            name = self._name.pop(page, None)
            if name is not None:
                del self._page[name]
                self.named[page] = False
