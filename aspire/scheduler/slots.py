"""Struct-of-arrays state of the running requests: one row per slot."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler.request import Request

Ints = NDArray[np.int64]


def index_of(rows: Ints) -> Ints | slice:
    """The slots ``rows`` [n], ascending, as an index: a slice where they are the first n slots, as in a full batch.

    It makes a view where an array would copy, and an update in place where that would gather and scatter.
    """
    count = len(rows)
    return slice(0, count) if count and rows[-1] == count - 1 else rows


class SlotRows(NamedTuple):
    """Copies [n] of what a step reads of its rows' slots; see `Slots`."""

    computed: Ints
    drafted: Ints
    slack: Ints
    known: Ints
    limit: Ints
    tenancy: Ints
    lists: Ints  # [3, n], see `Slots.lists_of`
    context: Ints  # KV tokens after the next decoding step: committed and drafted ones, and one more


class Slots:
    """State of up to ``max_slots`` running requests. All arrays are [max_slots].

    ``known`` tokens are prompt plus committed output; ``computed`` of them have committed KV. A request that is
    ``primed`` decodes: a step gave its newest token, whose KV is not yet written, so ``computed == known - 1``.

    The state runs ahead of the steps in flight: it is what they leave behind if every verification commits one token,
    its minimum. ``slack`` more may come. ``generated`` alone counts what outcomes have confirmed.
    """

    def __init__(self, max_slots: int) -> None:
        self.requests: list[Request | None] = [None] * max_slots
        self.request_ids = np.full(max_slots, "", dtype=object)
        # one array, so that a step gathers its rows in one go; the names are views
        self._state = np.zeros((6, max_slots), dtype=np.int64)
        self.set_lists(None, page_tokens=1)
        self.computed: Ints
        self.drafted: Ints
        self.slack: Ints  # drafts in the verifications in flight
        self.known: Ints
        self.limit: Ints  # known tokens at which the request ends
        self.tenancy: Ints  # counts stays; negative while the slot is empty
        self.computed, self.drafted, self.slack, self.known, self.limit, self.tenancy = self._state
        self._stays = 0
        self.departures = 0  # stays that ended
        self.active = np.zeros(max_slots, dtype=bool)
        self.primed = np.zeros(max_slots, dtype=bool)  # False while the slot is empty
        self.generated = np.zeros(max_slots, dtype=np.int64)
        self.most = np.zeros(max_slots, dtype=np.int64)  # generated tokens at which the request ends
        self.seeded = np.zeros(max_slots, dtype=bool)  # a page list exists for the committed KV
        self.order = np.zeros(max_slots, dtype=np.int64)  # submission order of the request
        self.priority = np.zeros(max_slots, dtype=np.int64)
        self.last_step = np.zeros(max_slots, dtype=np.int64)  # last step the slot took part in
        self._free = list(range(max_slots))  # a heap: the lowest slot first, so that an idle table is as a new one

    @property
    def num_free(self) -> int:
        """Slots without a request."""
        return len(self._free)

    def gather(self, rows: Ints | slice) -> SlotRows:
        """The state of the slots ``rows`` [n], copied."""
        whole = self._state[:, rows].copy() if isinstance(rows, slice) else self._state.take(rows, axis=1)
        computed, drafted, slack, known, limit, tenancy = whole
        context = computed + drafted
        context += 1
        return SlotRows(computed, drafted, slack, known, limit, tenancy, self.lists_of(computed), context)

    def set_lists(self, lists: Ints | None, page_tokens: int) -> None:
        """``lists`` [2, pages]: how many pages the page list of a request names, and where the tail that it reads
        besides begins, by the pages of committed KV that are full. None: there are no lists."""
        self._page_tokens = page_tokens
        self._lists: Ints | None = None
        if lists is not None:
            self._lists = np.concatenate([lists, page_tokens * (lists[:1] - lists[1:])])

    def lists_of(self, computed: Ints) -> Ints:
        """[3, n]: ``sel_count`` and ``tail_page`` of requests with ``computed`` [n] tokens of committed KV, and the
        tokens of the former less those before the latter: with the context, what a draft step reads. Their lists were
        made when the last of these were committed."""
        if self._lists is None:
            return np.zeros((3, len(computed)), dtype=np.int64)
        return self._lists.take(computed // self._page_tokens, axis=1)

    def occupy(self, request: Request, limit: int) -> int:
        """Move ``request`` into a free slot; all it knows is still to be computed. Returns the slot."""
        slot = heapq.heappop(self._free)
        self.requests[slot] = request
        self.request_ids[slot] = request.request_id
        self._stays += 1
        self.tenancy[slot] = self._stays
        self.active[slot] = True
        self.known[slot] = request.prompt_tokens + request.generated
        self.computed[slot] = 0
        self.drafted[slot] = 0
        self.slack[slot] = 0
        self.primed[slot] = False
        self.generated[slot] = request.generated
        self.limit[slot] = limit
        self.most[slot] = limit - request.prompt_tokens
        self.seeded[slot] = False
        self.order[slot] = request.order
        self.priority[slot] = request.priority
        self.last_step[slot] = -1
        return slot

    def vacate(self, slot: int) -> Request:
        """Take the request out of ``slot``; its ``generated`` is brought up to date."""
        request = self.requests[slot]
        if request is None:
            raise KeyError(f"slot {slot} holds no request")
        request.generated = int(self.generated[slot])
        self.requests[slot] = None
        self.tenancy[slot] = -1
        self.departures += 1
        self.active[slot] = self.primed[slot] = False
        heapq.heappush(self._free, slot)
        return request
