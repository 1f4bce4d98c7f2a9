"""Who waits, who runs, and on which KV pages: requests in and out of the slots, under no policy.

Admission by pages with a watermark, pages shared by equal prefixes, and whom to send back when pages run short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aspire.errors import CapacityError, InputError
from aspire.scheduler.config import SchedulerConfig
from aspire.scheduler.pages import PageTable
from aspire.scheduler.prefix_cache import Name
from aspire.scheduler.request import FinishReason, Request, RequestState
from aspire.scheduler.slots import Slots
from aspire.scheduler.waiting import WaitingQueue

Ints = NDArray[np.int64]
OnRelease = Callable[[int, Request], Callable[[], Sequence[Name]] | None]

PAGES_TO_WAIT_FOR = 16
"""Fewer pages are computed again: 256 prompt tokens add less to a step than two steps of waiting take."""


@dataclass(frozen=True)
class Counts:
    """Where the requests are. Invariant: arrived = waiting + running + finished + rejected."""

    arrived: int
    waiting: int
    running: int
    finished: int
    rejected: int


@dataclass(frozen=True)
class _Gone:
    """A request that left its slot, and pages that it holds until `Residents.clear_up`."""

    request: Request
    pages: NDArray[np.int32]
    computed: int  # tokens
    trusted: bool
    names: Callable[[], Sequence[Name]] | None


class Residents:
    """Requests in the queue and in the slots, and the pages that they hold.

    ``on_release(slot, request)`` is called when a request leaves its slot (finished, aborted or preempted). It may
    return what names the pages of all its tokens, generated ones too, when it is called; without, those of its
    ``page_hashes`` are known.
    """

    def __init__(self, config: SchedulerConfig, on_release: OnRelease | None = None) -> None:
        self.config = config
        self.slots = Slots(config.max_num_seqs)
        self.pages = PageTable(config.num_pages, config.max_num_seqs, config.pages_per_slot)
        self.requests: dict[str, Request] = {}  # waiting and running
        self._slot_of: dict[str, int] = {}
        self._waiting = WaitingQueue()
        self._on_release = on_release
        self._gone: list[_Gone] = []
        self._overdue = 0  # of those, that somebody who moves in might miss already
        self._new_pages: list[Ints] = []  # block-table entries not yet handed to an executor
        self._everyone: tuple[str, ...] | None = None  # ids of all who run, in slot order, once asked for
        self._arrived = self._finished = self._rejected = 0

    def add_request(self, request: Request) -> None:
        """Queue ``request``. One that can never run raises `InputError` or `CapacityError` and counts as rejected."""
        self._arrived += 1
        try:
            self._check(request)
        except (InputError, CapacityError):
            self._rejected += 1
            request.state = RequestState.REJECTED
            raise
        request.order = self._arrived
        request.state = RequestState.WAITING
        self.requests[request.request_id] = request
        self._waiting.push(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a waiting or running request now; False if there is no such request (it may just have finished)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        slot = self._slot_of.get(request_id)
        if slot is not None:
            self._leave(slot)
        self._finish(request, reason)
        if slot is None:
            self._waiting.note_ended()
        else:
            self.clear_up()
        return True

    def clear_up(self, most: int | None = None) -> None:
        """Free the pages of requests that left, those that left first and ``most`` of them, and name them for others to
        find. A step need not wait for this: who runs out of pages does it first."""
        some = self._gone[:most]
        del self._gone[:most]
        self._overdue = max(self._overdue - len(some), 0)
        for gone in some:
            if self.config.enable_prefix_caching:
                if gone.names is not None:
                    gone.request.page_hashes = gone.names()
                if not gone.trusted:
                    self.pages.prefixes.forget(gone.pages)
                elif not self.config.lossy:  # what lossy decoding wrote is no KV of full attention
                    self.pages.publish(gone.pages, gone.request.page_hashes, gone.computed // self.config.block_size)
            self.pages.free(gone.pages)

    def has_free(self, pages: int) -> bool:
        """Whether so many pages are free."""
        if pages > self.pages.num_free:
            self.clear_up()
        return pages <= self.pages.num_free

    @property
    def pages_of_gone(self) -> NDArray[np.int32]:
        """Pages of requests that left, until `clear_up`; those of several of them several times."""
        return np.concatenate([np.empty(0, dtype=np.int32), *(gone.pages for gone in self._gone)])

    @property
    def counts(self) -> Counts:
        """Requests by state; what must hold is in `Counts`."""
        running = len(self._slot_of)
        waiting = len(self.requests) - running
        return Counts(self._arrived, waiting, running, self._finished, self._rejected)

    def reset_prefix_cache(self) -> None:
        """No request finds pages that others computed before."""
        self.clear_up()
        self.pages.forget_all()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    def slot_of(self, request_id: str) -> int | None:
        """The slot of a running request."""
        return self._slot_of.get(request_id)

    def admit(self, growth: int = 0, prompt_tokens: int | None = None) -> None:
        """Move waiting requests into free slots while their prompts' pages fit, beside the ``growth`` pages that those
        who run need now, and while fewer than ``prompt_tokens`` tokens of prompts come before theirs: those behind
        could not begin in this step."""
        if not self.slots.num_free:
            return
        watermark = max(growth, int(self.config.watermark * self.pages.num_usable))
        while self.slots.num_free and (request := self._waiting.head()) is not None:
            if prompt_tokens is not None and self._prompts_before(request) >= prompt_tokens:
                return
            if self._overdue:
                self.clear_up(self._overdue)
            known = request.prompt_tokens + request.generated
            pages = -(-known // self.config.block_size)
            spare = watermark if self._slot_of else 0  # one that fits alone must get in
            found = self._prefix_pages(request, known)
            if found is None:
                return
            if pages - len(found) + self.pages.prefixes.idle(found) + spare > self.pages.num_free:
                if not self._gone:
                    return
                self.clear_up()  # more pages may be found then, or have lost their last holder: look again
                continue
            self._waiting.pop()
            slot = self.slots.occupy(request, self._limit(request))
            self._slot_of[request.request_id] = slot
            self._everyone = None
            request.state = RequestState.RUNNING
            self._entered(slot)
            self._new_pages.append(self.pages.adopt(slot, found))
            self._new_pages.append(self.pages.fill(slot, pages))
            self.slots.computed[slot] = len(found) * self.config.block_size
            if request.preemptions == 0:
                request.cached_tokens = len(found) * self.config.block_size
            if self.config.enable_prefix_caching:
                self.pages.prefixes.promise(slot, request.page_hashes[len(found) : known // self.config.block_size])

    # ---- inside --------------------------------------------------------------------------------------------------

    def _entered(self, slot: int) -> None:
        """A request moved into ``slot``; what was known of that slot holds no more."""

    def _check(self, request: Request) -> None:
        config = self.config
        name = f"request '{request.request_id}'"
        if request.request_id in self.requests:
            raise InputError(f"{name} is already queued or running; give every request an id of its own")
        if request.prompt_tokens < 1:
            raise InputError(f"{name} has an empty prompt; give at least one token")
        if request.max_tokens < 1:
            raise InputError(f"{name} has max_tokens {request.max_tokens}; give at least 1")
        if request.prompt_tokens >= config.max_model_len:
            raise InputError(
                f"{name} has a prompt of {request.prompt_tokens} tokens; max-model-len {config.max_model_len} leaves "
                "no room for output, shorten the prompt or raise --max-model-len"
            )
        pages = -(-self._limit(request) // config.block_size)
        if pages > self.pages.num_usable:
            raise CapacityError(
                f"{name} needs {pages} KV pages for prompt and max_tokens, the pool has {self.pages.num_usable}; "
                "lower max_tokens or raise --gpu-memory-utilization"
            )

    def _prompts_before(self, request: Request) -> int:
        """Tokens that running requests no less urgent than the waiting ``request`` have still to compute."""
        slots = self.slots
        before = slots.active & ~slots.primed & (slots.priority <= request.priority)
        return int(np.add.reduce(slots.known[before] - slots.computed[before]))

    def _limit(self, request: Request) -> int:
        return min(request.prompt_tokens + request.max_tokens, self.config.max_model_len)

    def _prefix_pages(self, request: Request, known: int) -> list[int] | None:
        """Pages that hold the first of the ``known`` tokens of ``request``, at least one token being left to compute.

        None: not yet. A running request that is no less urgent is about to compute the next pages: rather than doing it
        twice, wait. That request's prompt comes first anyway. For a few pages, as a chat template has, nobody waits:
        to compute them again takes less time than the steps until they are there.
        """
        if not self.config.enable_prefix_caching:
            return []
        names, most = request.page_hashes, (known - 1) // self.config.block_size
        found = self.pages.prefixes.match(names, most)
        if len(found) < min(most, len(names)):
            slot = self.pages.prefixes.promised_by(names[len(found)])
            if slot is not None and self.slots.priority[slot] <= request.priority:
                missing = names[len(found) : most]
                if self.pages.prefixes.promised_run(missing, PAGES_TO_WAIT_FOR) >= PAGES_TO_WAIT_FOR:
                    return None
        return found

    def _publish(self, rows: Ints, computed: Ints) -> None:
        """Prompts of slots ``rows`` are computed up to ``computed`` tokens: others may use their full pages."""
        for slot, tokens in zip(rows.tolist(), computed.tolist(), strict=True):
            request = self.slots.requests[slot]
            if request is not None:
                self.pages.publish(self.pages.held_by(slot), request.page_hashes, tokens // self.config.block_size)

    def _ids_of(self, rows: Ints) -> tuple[str, ...]:
        if len(rows) < len(self._slot_of):
            return tuple(self.slots.request_ids[rows].tolist())
        if self._everyone is None:
            self._everyone = tuple(self.slots.request_ids[rows].tolist())
        return self._everyone

    def _victim(self) -> int:
        """The slot to preempt: least urgent first; of those, drafting rows before others, then the newest.

        The most urgent oldest request is never chosen, so that it ends and pages come free.
        """
        slots = self.slots
        active = np.flatnonzero(slots.active)
        by_age = active[np.lexsort((slots.order[active], slots.priority[active]))]
        candidates = by_age[1:]
        if not len(candidates):
            raise CapacityError("the only running request outgrew the KV pool; raise --gpu-memory-utilization")
        least = candidates[slots.priority[candidates] == slots.priority[candidates].max()]
        drafting = least[slots.drafted[least] > 0]
        return int((drafting if len(drafting) else least)[-1])

    def _preempt(self, slot: int, *, trusted: bool = True) -> str:
        request = self._leave(slot, trusted=trusted)
        self.clear_up()
        request.preemptions += 1
        request.state = RequestState.WAITING
        self._waiting.push(request)
        return request.request_id

    def _leave(self, slot: int, *, trusted: bool = True) -> Request:
        """Take the request out of ``slot``; once cleared up, what it computed can be found again if it is
        ``trusted``."""
        request = self.slots.vacate(slot)
        del self._slot_of[request.request_id]
        self._everyone = None
        names = None if self._on_release is None else self._on_release(slot, request)
        self.pages.prefixes.withdraw(slot)
        computed = int(self.slots.computed[slot])
        self._gone.append(_Gone(request, self.pages.detach(slot), computed, trusted, names))
        return request

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self._finished += 1
        del self.requests[request.request_id]
        if not self.requests:  # there may be no other step
            self.clear_up()
