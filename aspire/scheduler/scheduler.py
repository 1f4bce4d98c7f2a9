"""The scheduler: composes every step. Pure Python and numpy; the engine and the simulator execute what it plans.

One step is ``plan = scheduler.schedule()``, an executor runs it, ``scheduler.update(plan, outcome)``. `schedule` may be
called once more before that `update`: the next step is then planned while this one runs, and allows for what its
verifications may commit (`Slots.slack`).
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from aspire.errors import UsageError
from aspire.scheduler.composition import features_of_rows, prefill_chunks
from aspire.scheduler.config import SchedulerConfig
from aspire.scheduler.features import CostModel, StepFeatures
from aspire.scheduler.in_flight import StepsInFlight
from aspire.scheduler.plan import Mode, StepPlan
from aspire.scheduler.policies import MAX_DRAFT, Action, PolicySpec, PolicyView
from aspire.scheduler.policies.price_tables import has_tables, tables_of
from aspire.scheduler.residents import OnRelease
from aspire.scheduler.slots import SlotRows, index_of

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

# plain numbers: an attribute of an IntEnum costs as much as a small numpy operation
_PREFILL, _DRAFT, _VERIFY = int(Mode.PREFILL), int(Mode.DRAFT), int(Mode.VERIFY)
_ACT_DRAFT, _ACT_VERIFY, _ACT_WAIT = int(Action.DRAFT), int(Action.VERIFY), int(Action.WAIT)
_MODES = np.array([_VERIFY, _DRAFT])  # of a row that does not draft, and of one that does
_NOBODY: Ints = np.empty(0, dtype=np.int64)
_NO_PAGES: Ints = np.empty((0, 3), dtype=np.int64)
_NOTHING = StepFeatures.zeros()


class Scheduler(StepsInFlight):
    """Composes steps for the residents under one policy; what comes of them is applied by `update`."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: PolicySpec,
        cost_model: CostModel | None = None,
        on_release: OnRelease | None = None,
    ) -> None:
        super().__init__(config, on_release)
        self.cost_model = cost_model
        self._step = 0
        self._buckets = sorted(config.graph_buckets)
        self._verifying = np.full(config.max_num_seqs, _VERIFY)  # modes where all verify; nobody writes to them
        self.set_policy(policy)

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
        # a step may put a draft beyond the longest context
        places = np.arange(0, self.config.max_model_len + 2 * MAX_DRAFT + 2, self.config.block_size)
        lists = np.stack(selector.geometry(places)) if built.drafts or self.config.lossy else None
        self.slots.set_lists(lists, self.config.block_size)
        self.slots.seeded[:] = False
        self.policy.reset(np.flatnonzero(self.slots.active))

    def prepare(self) -> None:
        """Fill the tables of prices that the policy reads, so that no step waits for them; plans stay the same."""
        model, policy = self.cost_model, self.policy
        asks = policy.needs_cost_model and policy.params.cost_ratio is None
        if not asks or model is None or not has_tables(model):
            return
        longest = self.config.max_model_len + 2 * MAX_DRAFT
        contexts = np.arange(longest + 1)
        lists = contexts + self.slots.lists_of(contexts)[2]
        tables = tables_of(model, self._view(_NOBODY, self.slots.gather(_NOBODY), _NOBODY), policy.d_max)
        tables.fill(range(1, self.config.max_num_seqs + 1), longest, int(lists.max()))

    # ---- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Compose the next step and move the state past it. None when there is nothing to run; while a step is in
        flight, also when the next one must know its outcome: update first, then ask again."""
        if not self.requests:
            return None
        slots = self.slots
        decoding = (slots.primed & (slots.known < slots.limit)).nonzero()[0]
        at, block = index_of(decoding), self.config.block_size
        state = slots.gather(at)
        # for the KV that a decoding row may write in this step
        short = self.pages.short(at, (state.context + state.slack + (block - 1)) // block)
        growth = int(np.add.reduce(short))
        if self._in_flight and not self.has_free(growth):
            return None  # whom to preempt depends on who is left
        self.admit(growth, self.config.max_num_batched_tokens)
        prefilling = _NOBODY
        if np.count_nonzero(slots.primed) < len(self._slot_of):
            prefilling = (slots.active & ~slots.primed).nonzero()[0]
        preempted: list[str] = []
        modes, query, kept = self._decode_rows(decoding, state, short, growth, prefilling, preempted)
        if preempted:
            prefilling = prefilling[slots.active[prefilling]]
        tokens, chunks = int(np.add.reduce(query)), _NOBODY
        if len(prefilling):
            chunks, chunk_tokens = prefill_chunks(slots, prefilling, self.config.max_num_batched_tokens - tokens)
        if len(chunks):
            rows = np.concatenate([kept, chunks])
            order = np.argsort(rows)
            kept = rows[order]
            modes = np.concatenate([modes, np.full(len(chunks), _PREFILL)])[order]
            query = np.concatenate([query, chunk_tokens])[order]
            tokens += int(np.add.reduce(chunk_tokens))
        if not len(kept):
            return None
        plan = self._compose(
            kept, state if kept is decoding else slots.gather(kept), modes, query, tokens, len(chunks), preempted
        )
        self._advance(plan)
        self._in_flight.append(plan)
        return plan

    # ---- inside --------------------------------------------------------------------------------------------------

    def _entered(self, slot: int) -> None:
        self.policy.reset(np.array([slot]))

    def _decode_rows(
        self,
        decoding: Ints,
        state: SlotRows,
        short: Ints,
        growth: int,
        prefilling: Ints,
        preempted: list[str],
    ) -> tuple[Ints, Ints, Ints]:
        """(modes, query tokens, slots) of the decoding rows that run in this step.

        ``state`` of them, ``short`` [n] pages that each of ``decoding`` lacks, ``growth`` in all.
        """
        slots, config = self.slots, self.config
        if not len(decoding):
            return _NOBODY, _NOBODY, _NOBODY
        kept = decoding
        if self.policy.drafts and not self.policy.rests(len(decoding)):
            view = self._view(decoding, state, prefilling)
            actions = self.policy.plan(view)
            draft = (actions == _ACT_DRAFT) & view.can_draft
            modes = _MODES.take(draft)
            query = state.drafted * ~draft
            query += 1
            running = actions != _ACT_WAIT
            # a batch in which all wait would never move
            if 0 < np.count_nonzero(running) < len(kept):
                modes, kept, query, short = modes[running], kept[running], query[running], short[running]
        else:
            modes, query = self._verifying[: len(kept)], state.drafted + 1
        longest = len(kept) * (MAX_DRAFT + 1)
        if longest > config.max_num_batched_tokens and np.add.reduce(query) > config.max_num_batched_tokens:
            # the longest idle go first; the rest sit this step out
            turn = np.argsort(slots.last_step[kept], kind="stable")
            fits = np.sort(turn[np.cumsum(query[turn]) <= config.max_num_batched_tokens])
            modes, kept, query, short = modes[fits], kept[fits], query[fits], short[fits]
        if len(kept) < len(decoding):
            growth = int(np.add.reduce(short))
        while not self.has_free(growth):
            victim = self._victim()
            preempted.append(self._preempt(victim))
            stays = kept != victim
            modes, kept, query, short = modes[stays], kept[stays], query[stays], short[stays]
            growth = int(np.add.reduce(short))
        if growth:
            self._new_pages.append(self.pages.supply(kept, short))
        return modes, query, kept

    def _view(self, decoding: Ints, state: SlotRows, prefilling: Ints) -> PolicyView:
        slots, drafted = self.slots, state.drafted
        # a verification of d drafts commits up to d + 1 tokens, and its d + 1 query tokens must fit in a step
        room = state.limit - state.known - state.slack - 1
        longest = min(self.policy.d_max, self.config.max_num_batched_tokens - 1)
        can_draft = slots.seeded[index_of(decoding)] & (drafted < np.minimum(longest, room))
        other = _NOTHING
        if len(prefilling):
            wanted = int((slots.known[prefilling] - slots.computed[prefilling]).sum())
            tokens = float(min(self.config.max_num_batched_tokens, wanted))
            other = StepFeatures.of(query_tokens=tokens, prefill_tokens=tokens, rows=float(len(prefilling)))
        return PolicyView(
            slots=decoding,
            drafted=drafted,
            can_draft=can_draft,
            context_tokens=state.context,
            sparse_tokens=state.context + state.lists[2],
            full_layer_share=self.full_layer_share,
            select_layer_share=self.select_layer_share,
            other=other,
            cost_model=self.cost_model,
        )

    def _compose(
        self, rows: Ints, state: SlotRows, modes: Ints, query: Ints, tokens: int, prefills: int, preempted: list[str]
    ) -> StepPlan:
        """The step in which the slots ``rows``, in order, run in ``modes``, ``prefills`` of them with prompt tokens;
        ``tokens``: sum of ``query``."""
        slots, lists = self.slots, state.lists
        draft = modes == _DRAFT
        drafts = int(np.count_nonzero(draft))
        start, pending = state.computed, None
        if drafts:
            pending = state.drafted * draft
            start = start + pending
        samples = self._every[: len(rows)]
        if prefills:
            samples = (modes != _PREFILL) | (start + query == state.known)
        at = index_of(rows)
        slots.last_step[at] = self._step
        new_pages = _NO_PAGES
        if self._new_pages:
            new_pages = self._new_pages[0] if len(self._new_pages) == 1 else np.concatenate(self._new_pages)
            self._new_pages = []
        if preempted:
            new_pages = new_pages[np.isin(new_pages[:, 0], np.flatnonzero(slots.active))]
        plan = StepPlan(
            step=self._step,
            slots=rows,
            modes=modes,
            query_tokens=query,
            start=start,
            drafted=state.drafted,
            slack=state.slack,
            samples=samples,
            sel_count=lists[0],
            tail_page=lists[1],
            new_pages=new_pages,
            requests=self._ids_of(rows),
            tenancy=state.tenancy,
            departures=slots.departures,
            preempted=tuple(preempted),
            features=self._features(
                modes, draft, query, tokens, prefills, start + query if prefills else state.context, lists[2], samples
            ),
            selects=self._selects,
            lossy=self.config.lossy,
        )
        # what is known here already need not be worked out by the plan
        vars(plan).update(at=at, draft=draft, num_drafts=drafts, num_prefills=prefills, num_query_tokens=tokens)
        if pending is not None:
            vars(plan).update(pending=pending)
        self._step += 1
        return plan

    def _features(
        self,
        modes: Ints,
        draft: Mask,
        query: Ints,
        tokens: int,
        prefills: int,
        context: Ints,
        listed: Ints,  # with the context, what a drafting row reads
        samples: Mask,
    ) -> StepFeatures:
        prompts = modes == _PREFILL if prefills else None
        selecting: Mask | bool | None = None
        if self._selects and self.select_layer_share > 0:
            selecting = True if prompts is None else samples & ~draft
        if self.config.lossy:  # such a row costs what a drafting row does, and gets its list while it reads
            selecting = None if prompts is None or selecting is None else selecting & prompts
            draft = np.ones_like(draft) if prompts is None else ~prompts
        return features_of_rows(
            draft,
            prompts,
            query,
            context,
            context + listed,
            selecting,
            tokens=tokens,
            padded_tokens=self.padded(tokens),
            full_layer_share=self.full_layer_share,
            select_layer_share=self.select_layer_share,
        )

    def padded(self, tokens: int) -> int:
        """Query tokens after padding to a CUDA-graph bucket; the same number where there is none that holds them."""
        index = bisect_left(self._buckets, tokens)
        return self._buckets[index] if index < len(self._buckets) else tokens

    @property
    def _selects(self) -> bool:
        """Whether rows that verify now get page lists: not while nobody will draft."""
        return (self.policy.drafts or self.config.lossy) and not self.policy.resting
