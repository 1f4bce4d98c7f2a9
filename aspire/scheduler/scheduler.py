"""The scheduler: composes every step. Pure Python and numpy; the engine and the simulator execute what it plans.

One step is ``plan = scheduler.schedule()``, an executor runs it, ``scheduler.update(plan, outcome)``. `schedule` may be
called once more before that `update`: the next step is then planned while this one runs, and allows for what its
verifications may commit (`Slots.slack`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aspire.errors import CapacityError, InputError, UsageError
from aspire.scheduler.composition import features_of_rows, prefill_chunks
from aspire.scheduler.config import SchedulerConfig
from aspire.scheduler.features import CostModel, StepFeatures
from aspire.scheduler.pages import PageTable
from aspire.scheduler.plan import Mode, StepOutcome, StepPlan
from aspire.scheduler.policies import Action, Feedback, PolicySpec, PolicyView
from aspire.scheduler.request import FinishReason, Request, RequestState
from aspire.scheduler.slots import Slots
from aspire.scheduler.waiting import WaitingQueue

Ints = NDArray[np.int64]

# plain numbers: an attribute of an IntEnum costs as much as a small numpy operation
_PREFILL, _DRAFT, _VERIFY = int(Mode.PREFILL), int(Mode.DRAFT), int(Mode.VERIFY)
_ACT_DRAFT, _ACT_VERIFY, _ACT_WAIT = int(Action.DRAFT), int(Action.VERIFY), int(Action.WAIT)
_EVERY = slice(None)
_NOTHING = StepFeatures.zeros()
_NONE, _LENGTH, _ERROR = int(FinishReason.NONE), int(FinishReason.LENGTH), int(FinishReason.ERROR)


@dataclass(frozen=True)
class Counts:
    """Where the requests are. Invariant: arrived = waiting + running + finished + rejected."""

    arrived: int
    waiting: int
    running: int
    finished: int
    rejected: int


class Scheduler:
    """Admission, page accounting, preemption and step composition under one policy.

    ``on_release(slot, request)`` is called when a request leaves its slot (finished, aborted or preempted); it may add
    to ``request.page_hashes`` those of the pages that the request generated.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: PolicySpec,
        cost_model: CostModel | None = None,
        on_release: Callable[[int, Request], None] | None = None,
    ) -> None:
        self.config = config
        self.cost_model = cost_model
        self.slots = Slots(config.max_num_seqs)
        self.pages = PageTable(config.num_pages, config.max_num_seqs, config.pages_per_slot)
        self.requests: dict[str, Request] = {}  # waiting and running
        self._slot_of: dict[str, int] = {}
        self._waiting = WaitingQueue()
        self._on_release = on_release
        self._new_pages: list[Ints] = []  # block-table entries not yet handed to an executor
        self._in_flight: list[StepPlan] = []  # planned, outcome not known
        self._step = 0
        self._arrived = self._finished = self._rejected = 0
        self._buckets = np.array(sorted(config.graph_buckets), dtype=np.int64)
        self.set_policy(policy)

    # ---- requests in and out -------------------------------------------------------------------------------------

    def set_policy(self, policy: PolicySpec) -> None:
        """Use ``policy`` from the next step on, none being in flight. Requests keep their drafts; page lists are made
        anew."""
        if self._in_flight:
            raise UsageError("set_policy while a step is in flight; finish the step first")
        built = policy.build(self.config.max_num_seqs)
        if built.needs_cost_model and self.cost_model is None and policy.params.get("cost_ratio") is None:
            raise UsageError(
                f"policy '{policy.kind}' needs a cost model; give --cost-model (made by 'aspire calibrate') "
                "or its parameter cost_ratio"
            )
        if self.config.lossy and (built.drafts or policy.selector.kind != "delta"):
            raise UsageError(
                f"policy '{policy.label}' with selector '{policy.selector.kind}' does not go with lossy decoding; "
                "use autoregressive with selector delta"
            )
        layers = self.config.num_layers
        selector = policy.selector
        full_layers = selector.selection_layers(layers)
        self.policy_spec = policy
        self.policy = built
        self.full_layer_share = len(full_layers) / layers
        # a verification computes page mass in every layer, in the one that chooses, or in none
        mass_layers = layers if selector.per_layer else len(full_layers) or int(selector.needs_mass)
        self.select_layer_share = mass_layers / layers if built.drafts or self.config.lossy else 0.0
        self.slots.seeded[:] = False
        running = np.flatnonzero(self.slots.active)
        self.policy.reset(running)

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
        return True

    @property
    def counts(self) -> Counts:
        """Requests by state; what must hold is in `Counts`."""
        running = len(self._slot_of)
        waiting = len(self.requests) - running
        return Counts(self._arrived, waiting, running, self._finished, self._rejected)

    def reset_prefix_cache(self) -> None:
        """No request finds pages that others computed before."""
        self.pages.forget_all()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    def slot_of(self, request_id: str) -> int | None:
        """The slot of a running request."""
        return self._slot_of.get(request_id)

    # ---- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Compose the next step and move the state past it. None when there is nothing to run; while a step is in
        flight, also when the next one must know its outcome: update first, then ask again."""
        if not self.requests:
            return None
        slots = self.slots
        decoding = np.flatnonzero(slots.active & slots.primed & (slots.known < slots.limit))
        needed = self._pages_needed(decoding)
        growth = self.pages.missing(decoding, needed)
        if self._in_flight and growth > self.pages.num_free:
            return None  # whom to preempt depends on who is left
        self.admit(growth)
        prefilling = np.flatnonzero(slots.active & ~slots.primed)
        preempted: list[str] = []
        modes, query, kept = self._decode_rows(decoding, needed, growth, prefilling, preempted)
        if preempted:
            prefilling = prefilling[slots.active[prefilling]]
        budget = self.config.max_num_batched_tokens - int(query.sum())
        chunks, chunk_tokens = prefill_chunks(slots, prefilling, budget)
        plan = self._compose(kept, modes, query, chunks, chunk_tokens, tuple(preempted))
        if plan is not None:
            self._advance(plan)
            self._in_flight.append(plan)
        return plan

    def update(self, plan: StepPlan, outcome: StepOutcome) -> list[Request]:
        """Apply what came of ``plan``, the oldest in flight; returns the requests that finished in it."""
        if not self._in_flight or self._in_flight[0] is not plan:
            raise UsageError("update takes the plans of schedule in their order, each once")
        del self._in_flight[0]
        slots = self.slots
        rows = slots.tenancy[plan.slots] == plan.tenancy
        if rows.all():
            rows = _EVERY  # nobody left since the step was planned: views, not copies
        rows_slots = plan.slots[rows]
        modes, query, drafted = plan.modes[rows], plan.query_tokens[rows], plan.drafted[rows]
        committed = outcome.committed[rows]
        draft, verify = modes == _DRAFT, modes == _VERIFY
        slots.generated[rows_slots] += committed
        judged = (verify & (drafted > 0)).nonzero()[0]
        if len(judged):
            self._settle(rows_slots[judged], drafted[judged], committed[judged] - 1)
        self._observe(plan, outcome, rows, draft, verify)
        finish = outcome.finish[rows].copy()
        if self.config.enable_prefix_caching and (prefilled := (modes == _PREFILL) & (finish != _ERROR)).any():
            self._publish(rows_slots[prefilled], (plan.start[rows] + query)[prefilled])
        known = plan.start[rows] + np.where(verify, 1, query) + committed
        finish[(known >= slots.limit[rows_slots]) & (finish == _NONE) & ~draft] = _LENGTH
        finished = []
        for index in np.flatnonzero(finish):
            request = self._leave(int(rows_slots[index]), trusted=finish[index] != _ERROR)
            self._finish(request, FinishReason(int(finish[index])))
            finished.append(request)
        self._roll_back(rows_slots[verify & (finish == _NONE)])
        return finished

    def discard_in_flight(self) -> None:
        """A step failed: the requests of all steps in flight go back to the queue and are computed again."""
        slots = self.slots
        for plan in self._in_flight:
            for slot in plan.slots[slots.tenancy[plan.slots] == plan.tenancy].tolist():
                self._preempt(slot, trusted=False)
        self._in_flight.clear()
        self.reset_prefix_cache()

    @property
    def in_flight(self) -> tuple[StepPlan, ...]:
        """Steps planned and not yet updated, oldest first."""
        return tuple(self._in_flight)

    # ---- inside --------------------------------------------------------------------------------------------------

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

    def _limit(self, request: Request) -> int:
        return min(request.prompt_tokens + request.max_tokens, self.config.max_model_len)

    def admit(self, growth: int = 0) -> None:
        """Move waiting requests into free slots while their prompts' pages fit, beside the ``growth`` pages that those
        who run need now; `schedule` begins with it."""
        watermark = max(growth, int(self.config.watermark * self.pages.num_usable))
        while self.slots.num_free and (request := self._waiting.head()) is not None:
            known = request.prompt_tokens + request.generated
            pages = -(-known // self.config.block_size)
            spare = watermark if self._slot_of else 0  # one that fits alone must get in
            found = self._prefix_pages(request, known)
            if found is None or pages - len(found) + self.pages.prefixes.idle(found) + spare > self.pages.num_free:
                return
            self._waiting.pop()
            slot = self.slots.occupy(request, self._limit(request))
            self._slot_of[request.request_id] = slot
            request.state = RequestState.RUNNING
            self.policy.reset(np.array([slot]))
            self._new_pages.append(self.pages.adopt(slot, found))
            self._new_pages.append(self.pages.grow(np.array([slot]), np.array([pages])))
            self.slots.computed[slot] = len(found) * self.config.block_size
            if request.preemptions == 0:
                request.cached_tokens = len(found) * self.config.block_size
            if self.config.enable_prefix_caching:
                self.pages.prefixes.promise(slot, request.page_hashes[len(found) : known // self.config.block_size])

    def _prefix_pages(self, request: Request, known: int) -> list[int] | None:
        """Pages that hold the first of the ``known`` tokens of ``request``, at least one token being left to compute.

        None: not yet. A running request that is no less urgent is about to compute the next page: rather than doing it
        twice, wait. That request's prompt comes first anyway.
        """
        if not self.config.enable_prefix_caching:
            return []
        names, most = request.page_hashes, (known - 1) // self.config.block_size
        found = self.pages.prefixes.match(names, most)
        if len(found) < min(most, len(names)):
            slot = self.pages.prefixes.promised_by(names[len(found)])
            if slot is not None and self.slots.priority[slot] <= request.priority:
                return None
        return found

    def _publish(self, rows: Ints, computed: Ints) -> None:
        """Prompts of slots ``rows`` are computed up to ``computed`` tokens: others may use their full pages."""
        for slot, tokens in zip(rows.tolist(), computed.tolist(), strict=True):
            request = self.slots.requests[slot]
            if request is not None:
                self.pages.publish(slot, request.page_hashes, tokens // self.config.block_size)

    def _decode_rows(
        self, decoding: Ints, needed: Ints, growth: int, prefilling: Ints, preempted: list[str]
    ) -> tuple[Ints, Ints, Ints]:
        """(modes, query tokens, slots) of the decoding rows that run in this step.

        ``needed`` [n] pages of each of ``decoding``, ``growth`` of them not held yet.
        """
        slots, config = self.slots, self.config
        if not len(decoding):
            empty = np.empty(0, dtype=np.int64)
            return empty, empty, empty
        kept = decoding
        if self.policy.drafts:
            view = self._view(decoding, prefilling)
            actions = self.policy.plan(view)
            draft = (actions == _ACT_DRAFT) & view.can_draft
            modes = np.where(draft, _DRAFT, _VERIFY)
            running = actions != _ACT_WAIT
            # a batch in which all wait would never move
            if 0 < np.count_nonzero(running) < len(kept):
                modes, kept, draft, needed = modes[running], kept[running], draft[running], needed[running]
            query = np.where(draft, 1, slots.drafted[kept] + 1)
        else:
            modes, query = np.full(len(kept), _VERIFY), slots.drafted[kept] + 1
        if int(query.sum()) > config.max_num_batched_tokens:
            # the longest idle go first; the rest sit this step out
            turn = np.argsort(slots.last_step[kept], kind="stable")
            fits = np.sort(turn[np.cumsum(query[turn]) <= config.max_num_batched_tokens])
            modes, kept, query, needed = modes[fits], kept[fits], query[fits], needed[fits]
        if len(kept) < len(decoding):
            growth = self.pages.missing(kept, needed)
        while growth > self.pages.num_free:
            victim = self._victim()
            preempted.append(self._preempt(victim))
            stays = kept != victim
            modes, kept, query, needed = modes[stays], kept[stays], query[stays], needed[stays]
            growth = self.pages.missing(kept, needed)
        if growth:
            self._new_pages.append(self.pages.grow(kept, needed))
        return modes, query, kept

    def _pages_needed(self, decoding: Ints) -> Ints:
        """Pages [n] for the KV that a decoding row may write in the next step."""
        slots = self.slots
        block = self.config.block_size
        return (slots.computed[decoding] + slots.slack[decoding] + slots.drafted[decoding] + block) // block

    def _view(self, decoding: Ints, prefilling: Ints) -> PolicyView:
        slots = self.slots
        drafted = slots.drafted[decoding]
        context = slots.computed[decoding] + drafted + 1
        # a verification of d drafts commits up to d + 1 tokens, and its d + 1 query tokens must fit in a step
        room = slots.limit[decoding] - slots.known[decoding] - slots.slack[decoding] - 1
        longest = min(self.policy.d_max, self.config.max_num_batched_tokens - 1)
        can_draft = slots.seeded[decoding] & (drafted < np.minimum(longest, room))
        other = _NOTHING
        if len(prefilling):
            wanted = int((slots.known[prefilling] - slots.computed[prefilling]).sum())
            tokens = float(min(self.config.max_num_batched_tokens, wanted))
            other = StepFeatures.of(query_tokens=tokens, prefill_tokens=tokens, rows=float(len(prefilling)))
        page = self.config.block_size
        return PolicyView(
            slots=decoding,
            drafted=drafted,
            can_draft=can_draft,
            context_tokens=context,
            sparse_tokens=(slots.sel_count[decoding] - slots.tail_page[decoding]) * page + context,
            full_layer_share=self.full_layer_share,
            select_layer_share=self.select_layer_share,
            other=other,
            cost_model=self.cost_model,
        )

    def _compose(
        self, decode: Ints, modes: Ints, query: Ints, chunks: Ints, chunk_tokens: Ints, preempted: tuple[str, ...]
    ) -> StepPlan | None:
        slots = self.slots
        rows, row_modes, row_query = decode, modes, query  # decoding rows are in slot order
        if len(chunks):
            rows = np.concatenate([decode, chunks])
            order = np.argsort(rows)
            rows = rows[order]
            row_modes = np.concatenate([modes, np.full(len(chunks), _PREFILL)])[order]
            row_query = np.concatenate([query, chunk_tokens])[order]
        if not len(rows):
            return None
        draft = row_modes == _DRAFT
        drafted = slots.drafted[rows]
        start = slots.computed[rows] + np.where(draft, drafted, 0)
        samples = (row_modes != _PREFILL) | (start + row_query == slots.known[rows])
        slots.last_step[rows] = self._step
        new_pages = np.concatenate(self._new_pages) if self._new_pages else np.empty((0, 3), dtype=np.int64)
        self._new_pages = []
        if preempted:
            new_pages = new_pages[np.isin(new_pages[:, 0], np.flatnonzero(slots.active))]
        plan = StepPlan(
            step=self._step,
            slots=rows,
            modes=row_modes,
            query_tokens=row_query,
            start=start,
            drafted=drafted,
            slack=slots.slack[rows],
            samples=samples,
            sel_count=slots.sel_count[rows],
            tail_page=slots.tail_page[rows],
            new_pages=new_pages,
            requests=tuple(slots.request_ids[rows].tolist()),
            tenancy=slots.tenancy[rows],
            preempted=preempted,
            features=self._features(rows, row_modes, row_query, start, samples & ~draft),
            selects=self._selects,
            lossy=self.config.lossy,
        )
        self._step += 1
        return plan

    def _features(self, rows: Ints, modes: Ints, query: Ints, start: Ints, finds: NDArray[np.bool_]) -> StepFeatures:
        selecting = finds & (self._selects and self.select_layer_share > 0)
        if self.config.lossy:  # such a row costs what a drafting row does, and gets its list while it reads
            selecting &= modes == _PREFILL
            modes = np.where(modes == _VERIFY, _DRAFT, modes)
        return features_of_rows(
            self.slots,
            rows,
            modes,
            query,
            start,
            selecting,
            page_tokens=self.config.block_size,
            padded_tokens=self.padded(int(query.sum())),
            full_layer_share=self.full_layer_share,
            select_layer_share=self.select_layer_share,
        )

    def padded(self, tokens: int) -> int:
        """Query tokens after padding to a CUDA-graph bucket; the same number where there is none that holds them."""
        index = int(np.searchsorted(self._buckets, tokens))
        return int(self._buckets[index]) if index < len(self._buckets) else tokens

    @property
    def _selects(self) -> bool:
        """Whether rows that verify now get page lists: not while nobody will draft."""
        return (self.policy.drafts or self.config.lossy) and not self.policy.resting

    def _advance(self, plan: StepPlan) -> None:
        """Move the state past ``plan``, every verification committing one token."""
        slots, rows = self.slots, plan.slots
        draft, prefill = plan.modes == _DRAFT, plan.modes == _PREFILL
        finds = plan.samples & ~draft
        slots.drafted[rows] = np.where(draft, plan.drafted + 1, 0)
        slots.slack[rows] += np.where(draft | prefill, 0, plan.drafted)
        slots.known[rows] += finds
        slots.computed[rows] += np.where(prefill, plan.query_tokens, finds)
        found = rows[finds]
        slots.primed[found] = True
        slots.seeded[found] = plan.selects
        slots.sel_count[found], slots.tail_page[found] = self.policy_spec.selector.geometry(slots.computed[found])

    def _settle(self, rows: Ints, drafts: Ints, more: Ints) -> None:
        """Verifications of ``drafts`` in slots ``rows`` committed ``more`` tokens than one: put right the state and the
        plan that was made without knowing it."""
        slots = self.slots
        slots.slack[rows] -= drafts
        slots.known[rows] += more
        slots.computed[rows] += more
        longer = rows[more > 0]
        slots.sel_count[longer], slots.tail_page[longer] = self.policy_spec.selector.geometry(slots.computed[longer])
        came, settled = np.zeros((2, len(slots.active)), dtype=np.int64)
        came[rows], settled[rows] = more, drafts
        for plan in self._in_flight:
            plan.start[:] += came[plan.slots]
            plan.slack[:] -= settled[plan.slots]
            plan.sel_count[:], plan.tail_page[:] = slots.sel_count[plan.slots], slots.tail_page[plan.slots]

    def _observe(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        rows: NDArray[np.bool_],
        draft: NDArray[np.bool_],
        verify: NDArray[np.bool_],
    ) -> None:
        either = draft | verify
        decode = _EVERY if np.count_nonzero(either) == len(either) else either
        self.policy.observe(
            Feedback(
                slots=plan.slots[rows][decode],
                verified=verify[decode],
                drafted=plan.drafted[rows][decode],
                accepted=outcome.accepted[rows][decode],
                margin=outcome.margin[rows][decode],
                features=plan.features,
                seconds=outcome.seconds,
            )
        )

    def _roll_back(self, verified: Ints) -> None:
        keep = -(-self.slots.known[verified] // self.config.block_size)
        beyond = self.pages.held[verified] > keep
        if np.count_nonzero(beyond):
            self.pages.shrink(verified[beyond], keep[beyond])

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
        request.preemptions += 1
        request.state = RequestState.WAITING
        self._waiting.push(request)
        return request.request_id

    def _leave(self, slot: int, *, trusted: bool = True) -> Request:
        """Take the request out of ``slot``; what it computed can be found again if it is ``trusted``."""
        request = self.slots.vacate(slot)
        del self._slot_of[request.request_id]
        if self._on_release is not None:
            self._on_release(slot, request)
        if self.config.enable_prefix_caching:
            self.pages.prefixes.withdraw(slot)
            if not trusted:
                self.pages.forget(slot)
            elif not self.config.lossy:  # what lossy decoding wrote is no KV of full attention
                computed = int(self.slots.computed[slot])
                self.pages.publish(slot, request.page_hashes, computed // self.config.block_size)
        self.pages.release(slot)
        return request

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self._finished += 1
        del self.requests[request.request_id]
