"""The scheduler: composes every step. Pure Python and numpy; the engine and the simulator execute what it plans.

One step is ``plan = scheduler.schedule()``, an executor runs it, ``scheduler.update(plan, outcome)``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aspire.errors import CapacityError, InputError, UsageError
from aspire.scheduler.config import SchedulerConfig
from aspire.scheduler.features import CostModel, StepFeatures
from aspire.scheduler.pages import PageTable
from aspire.scheduler.plan import Mode, StepOutcome, StepPlan
from aspire.scheduler.policies import Action, Feedback, PolicySpec, PolicyView
from aspire.scheduler.request import FinishReason, Request, RequestState
from aspire.scheduler.slots import Slots

Ints = NDArray[np.int64]

# plain numbers: an attribute of an IntEnum costs as much as a small numpy operation
_PREFILL, _DRAFT, _VERIFY = int(Mode.PREFILL), int(Mode.DRAFT), int(Mode.VERIFY)
_ACT_DRAFT, _ACT_VERIFY, _ACT_WAIT = int(Action.DRAFT), int(Action.VERIFY), int(Action.WAIT)
_EVERY = slice(None)
_NONE, _LENGTH = int(FinishReason.NONE), int(FinishReason.LENGTH)


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

    ``on_release(slot, request)`` is called when a request leaves its slot (finished, aborted or preempted).
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
        self._waiting: list[tuple[int, int, Request]] = []  # heap by (priority, submission order)
        self._on_release = on_release
        self._new_pages: list[Ints] = []  # block-table entries not yet handed to an executor
        self._step = 0
        self._arrived = self._finished = self._rejected = 0
        self._buckets = np.array(sorted(config.graph_buckets), dtype=np.int64)
        self.set_policy(policy)

    # ---- requests in and out -------------------------------------------------------------------------------------

    def set_policy(self, policy: PolicySpec) -> None:
        """Use ``policy`` from the next step on. Running requests keep their drafts; page lists are made anew."""
        built = policy.build(self.config.max_num_seqs)
        if built.needs_cost_model and self.cost_model is None and policy.params.get("cost_ratio") is None:
            raise UsageError(
                f"policy '{policy.kind}' needs a cost model; give --cost-model (made by 'aspire calibrate') "
                "or its parameter cost_ratio"
            )
        layers = self.config.num_layers
        selector = policy.selector
        full_layers = selector.selection_layers(layers)
        self.policy_spec = policy
        self.policy = built
        self.full_layer_share = len(full_layers) / layers
        # a verification computes page mass in every layer, in the one that chooses, or in none
        mass_layers = layers if selector.per_layer else len(full_layers) or int(selector.needs_mass)
        self.select_layer_share = mass_layers / layers if built.drafts else 0.0
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
        heapq.heappush(self._waiting, (request.priority, request.order, request))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a waiting or running request now; False if there is no such request (it may just have finished)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        slot = self._slot_of.get(request_id)
        if slot is None:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
            heapq.heapify(self._waiting)
        else:
            self._leave(slot)
        self._finish(request, reason)
        return True

    @property
    def counts(self) -> Counts:
        """Requests by state; what must hold is in `Counts`."""
        running = len(self._slot_of)
        return Counts(self._arrived, len(self._waiting), running, self._finished, self._rejected)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    def slot_of(self, request_id: str) -> int | None:
        """The slot of a running request."""
        return self._slot_of.get(request_id)

    # ---- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Compose the next step; None when there is nothing to run."""
        if not self.requests:
            return None
        self.admit()
        slots = self.slots
        active = np.flatnonzero(slots.active)
        remaining = slots.known[active] - slots.computed[active]
        decoding = active[remaining == 1]
        prefilling = active[remaining > 1]
        preempted: list[str] = []
        modes, query, kept = self._decode_rows(decoding, prefilling, preempted)
        if preempted:
            prefilling = prefilling[slots.active[prefilling]]
        chunks, chunk_tokens = self._prefill_rows(prefilling, int(query.sum()))
        return self._compose(kept, modes, query, chunks, chunk_tokens, tuple(preempted))

    def update(self, plan: StepPlan, outcome: StepOutcome) -> list[Request]:
        """Apply what came of ``plan``; returns the requests that finished in it."""
        slots = self.slots
        rows = slots.tenancy[plan.slots] == plan.tenancy
        if rows.all():
            rows = _EVERY  # nobody left since the step was planned: views, not copies
        rows_slots = plan.slots[rows]
        modes, query = plan.modes[rows], plan.query_tokens[rows]
        committed = outcome.committed[rows]
        draft, verify = modes == _DRAFT, modes == _VERIFY
        slots.drafted[rows_slots[draft]] += 1
        slots.drafted[rows_slots[~draft]] = 0
        slots.known[rows_slots] += committed
        slots.generated[rows_slots] += committed
        slots.computed[rows_slots] += np.where(modes == _PREFILL, query, committed)
        sampled = rows_slots[~draft & plan.samples[rows]]
        if len(sampled):
            self._seed(sampled, plan.selects)
        self._observe(plan, outcome, rows, draft, verify)
        finish = outcome.finish[rows].copy()
        at_limit = (slots.known[rows_slots] >= slots.limit[rows_slots]) & (finish == _NONE) & ~draft
        finish[at_limit] = _LENGTH
        finished = []
        for index in np.flatnonzero(finish):
            request = self._leave(int(rows_slots[index]))
            self._finish(request, FinishReason(int(finish[index])))
            finished.append(request)
        self._roll_back(rows_slots[verify & (finish == _NONE)])
        return finished

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

    def admit(self) -> None:
        """Move waiting requests into free slots while their prompts' pages fit; `schedule` begins with it."""
        watermark = int(self.config.watermark * self.pages.num_usable)
        while self._waiting and self.slots.num_free:
            request = self._waiting[0][2]
            known = request.prompt_tokens + request.generated
            pages = -(-known // self.config.block_size)
            spare = watermark if self._slot_of else 0  # one that fits alone must get in
            if pages + spare > self.pages.num_free:
                return
            heapq.heappop(self._waiting)
            slot = self.slots.occupy(request, self._limit(request))
            self._slot_of[request.request_id] = slot
            request.state = RequestState.RUNNING
            self.policy.reset(np.array([slot]))
            self._new_pages.append(self.pages.grow(np.array([slot]), np.array([pages])))

    def _decode_rows(self, decoding: Ints, prefilling: Ints, preempted: list[str]) -> tuple[Ints, Ints, Ints]:
        """(modes, query tokens, slots) of the decoding rows that run in this step."""
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
            if not running.all() and running.any():
                modes, kept, draft = modes[running], kept[running], draft[running]
            query = np.where(draft, 1, slots.drafted[kept] + 1)
        else:
            modes, query = np.full(len(kept), _VERIFY), slots.drafted[kept] + 1
        if int(query.sum()) > config.max_num_batched_tokens:
            # the longest idle go first; the rest sit this step out
            turn = np.argsort(slots.last_step[kept], kind="stable")
            fits = np.sort(turn[np.cumsum(query[turn]) <= config.max_num_batched_tokens])
            modes, kept, query = modes[fits], kept[fits], query[fits]
        needed = -(-(slots.computed[kept] + slots.drafted[kept] + 1) // config.block_size)
        while self.pages.missing(kept, needed) > self.pages.num_free:
            victim = self._victim()
            preempted.append(self._preempt(victim))
            stays = kept != victim
            modes, kept, query, needed = modes[stays], kept[stays], query[stays], needed[stays]
        self._new_pages.append(self.pages.grow(kept, needed))
        return modes, query, kept

    def _view(self, decoding: Ints, prefilling: Ints) -> PolicyView:
        slots = self.slots
        drafted = slots.drafted[decoding]
        context = slots.computed[decoding] + drafted + 1
        # a verification of d drafts commits up to d + 1 tokens, and its d + 1 query tokens must fit in a step
        room = slots.limit[decoding] - slots.known[decoding] - 1
        longest = min(self.policy.d_max, self.config.max_num_batched_tokens - 1)
        can_draft = slots.seeded[decoding] & (drafted < np.minimum(longest, room))
        tokens = float(min(self.config.max_num_batched_tokens, int((slots.known - slots.computed)[prefilling].sum())))
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

    def _prefill_rows(self, prefilling: Ints, used: int) -> tuple[Ints, Ints]:
        """(slots, chunk lengths): what is left of the token budget goes to prompts, oldest first."""
        budget = self.config.max_num_batched_tokens - used
        if not len(prefilling) or budget <= 0:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        slots = self.slots
        turn = prefilling[np.lexsort((slots.order[prefilling], slots.priority[prefilling]))]
        want = slots.known[turn] - slots.computed[turn]
        before = np.cumsum(want) - want
        chunk = np.clip(budget - before, 0, want)
        chosen = chunk > 0
        return turn[chosen], chunk[chosen]

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
            samples=samples,
            sel_count=slots.sel_count[rows],
            tail_page=slots.tail_page[rows],
            new_pages=new_pages,
            requests=tuple(slots.request_ids[rows].tolist()),
            tenancy=slots.tenancy[rows],
            preempted=preempted,
            features=self._features(rows, row_modes, row_query, start, samples),
            selects=self._selects,
        )
        self._step += 1
        return plan

    def _features(self, rows: Ints, modes: Ints, query: Ints, start: Ints, samples: NDArray[np.bool_]) -> StepFeatures:
        slots = self.slots
        draft, prefill = modes == _DRAFT, modes == _PREFILL
        context = start + query
        drafts, prefills = int(np.count_nonzero(draft)), int(np.count_nonzero(prefill))
        tokens, full = int(query.sum()), int(context.sum())
        sparse, draft_full = 0, 0.0
        if drafts:
            drafting, at = context[draft], rows[draft]
            sparse = int((slots.sel_count[at] - slots.tail_page[at]).sum()) * self.config.block_size + int(
                drafting.sum()
            )
            full -= int(drafting.sum())
            draft_full = self.full_layer_share * float(drafting.sum())
        selecting, selecting_kv = 0, 0
        if self.select_layer_share and self._selects:
            chosen = ~draft & samples
            selecting, selecting_kv = int(np.count_nonzero(chosen)), int(context[chosen].sum())
        return StepFeatures.of(
            rows=float(len(rows)),
            query_tokens=float(tokens),
            padded_tokens=float(self.padded(tokens)),
            draft_rows=float(drafts),
            verify_rows=float(len(rows) - drafts - prefills),
            sparse_kv_tokens=float((1.0 - self.full_layer_share) * sparse),
            full_kv_tokens=float(full + draft_full),
            prefill_tokens=float(query[prefill].sum()) if prefills else 0.0,
            prefill_qkv=float((query * context)[prefill].sum()) if prefills else 0.0,
            select_kv_tokens=self.select_layer_share * selecting_kv + draft_full,
            select_rows=float(selecting + (drafts if self.full_layer_share else 0)),
        )

    def padded(self, tokens: int) -> int:
        """Query tokens after padding to a CUDA-graph bucket; the same number where there is none that holds them."""
        index = int(np.searchsorted(self._buckets, tokens))
        return int(self._buckets[index]) if index < len(self._buckets) else tokens

    @property
    def _selects(self) -> bool:
        """Whether rows that verify now get page lists: not while nobody will draft."""
        return self.policy.drafts and not self.policy.resting

    def _seed(self, sampled: Ints, selects: bool) -> None:
        slots = self.slots
        slots.seeded[sampled] = selects
        slots.sel_count[sampled], slots.tail_page[sampled] = self.policy_spec.selector.geometry(slots.computed[sampled])

    def _observe(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        rows: NDArray[np.bool_],
        draft: NDArray[np.bool_],
        verify: NDArray[np.bool_],
    ) -> None:
        decode = draft | verify
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
        if beyond.any():
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

    def _preempt(self, slot: int) -> str:
        request = self._leave(slot)
        request.preemptions += 1
        request.state = RequestState.WAITING
        heapq.heappush(self._waiting, (request.priority, request.order, request))
        return request.request_id

    def _leave(self, slot: int) -> Request:
        request = self.slots.vacate(slot)
        del self._slot_of[request.request_id]
        self.pages.release(slot)
        if self._on_release is not None:
            self._on_release(slot, request)
        return request

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self._finished += 1
        del self.requests[request.request_id]
