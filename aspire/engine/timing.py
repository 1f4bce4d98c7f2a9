"""Times synthetic steps for the profiler: real steps of the real engine, on requests whose state is set directly.

The KV pool is filled with random values, so no prefill is paid for. Every repeat goes through the two halves of
`LLMEngine.step`: scheduling, upload, forward, download and update, as in generation. Steps that start from idle are
real prompts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from aspire.engine.identity import identity_of
from aspire.engine.llm_engine import LLMEngine
from aspire.errors import CapacityError, EngineError, InputError, UsageError
from aspire.sampling_params import SamplingParams
from aspire.scheduler import PAGE_TOKENS, Action, Policy, PolicyView, StepFeatures
from aspire_calibration import Cell, PlanLimits, RowGroup, SamplesHeader

_FOREVER = 1 << 30
_WARM_STEPS = 3
_DRAFTED = 8  # rows that draft hold 0 to 7 drafts: their lists are as old, and read that many tokens more
_SAMPLING = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, max_tokens=1, ignore_eos=True, detokenize=False)
_GOES_ON = replace(_SAMPLING, max_tokens=2)


class _Scripted(Policy):
    """Does what it was told, by slot."""

    kind = "scripted"

    def __init__(self, max_slots: int, d_max: int) -> None:
        super().__init__(None, max_slots, d_max)
        self.actions = np.full(max_slots, Action.VERIFY, dtype=np.int8)

    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        return self.actions[view.slots]


def _context_of(row: int, group: RowGroup, longest: int) -> int:
    """Context of one row of ``group``: rows of real steps end at different places in their last pages, which takes the
    attention kernel longer than rows that are all alike. The mean is the group's, but for contexts near ``longest``."""
    if group.count == 1 or group.kind == "prefill":
        return group.context_tokens
    top = min(group.context_tokens + PAGE_TOKENS // 2 - 1, longest)
    return max(top - 5 * row % PAGE_TOKENS, group.query_tokens)


class StepTimer:
    """Times the cells of a profiling plan on ``engine``, which must be idle and is not usable afterwards."""

    def __init__(self, engine: LLMEngine, *, max_seconds: float = 2.0, repeats: int = 5) -> None:
        if engine.has_unfinished_requests:
            raise UsageError("profiling needs an idle engine; finish or abort its requests first")
        self._engine = engine
        self._max_seconds = max_seconds
        self._repeats = repeats
        engine.pool.fill_random()
        engine.scheduler.reset_prefix_cache()
        self._rng = np.random.default_rng(0)

    def limits(self) -> PlanLimits:
        """What a step of this engine may hold, for the profiling plan."""
        config, spec = self._engine.scheduler_config, self._engine.scheduler.policy_spec
        selector = spec.selector
        list_tokens = (self._engine.runner.lists.lists.shape[2] + selector.recent) * PAGE_TOKENS
        return PlanLimits(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            num_pages=self._engine.scheduler.pages.num_usable,
            max_num_batched_tokens=config.max_num_batched_tokens,
            graph_buckets=config.graph_buckets,
            d_max=spec.num_speculative_tokens,
            sparse_ratio=selector.budget_ratio,
            sparse_min_tokens=selector.min_pages * PAGE_TOKENS,
            select_verify=self._engine.runner.lists.selects,
            max_sparse_tokens=list_tokens,
            async_scheduling=config.async_scheduling,
        )

    def header(self, command: str = "") -> SamplesHeader:
        """What was profiled, for samples.jsonl."""
        engine = self._engine
        config = engine.scheduler_config
        return SamplesHeader.of_this_machine(
            *identity_of(engine),
            num_pages=config.num_pages,
            graph_buckets=config.graph_buckets,
            full_layer_share=engine.scheduler.full_layer_share,
            select_layer_share=engine.scheduler.select_layer_share,
            command=command,
        )

    def time_cell(self, cell: Cell) -> Sequence[float]:
        """Seconds of >= 1 repeats of the step ``cell``, warmed up. Raises `CapacityError` if it does not fit."""
        engine = self._engine
        if cell.rows > engine.scheduler_config.max_num_seqs:
            raise CapacityError(f"{cell.rows} rows are more than max_num_seqs {engine.scheduler_config.max_num_seqs}")
        try:
            return self._time_from_idle(cell) if cell.idle else self._time(self._place(cell))
        except (EngineError, InputError) as error:
            raise CapacityError(f"the step {cell.key} cannot be timed: {error}") from error
        finally:
            self._clear()

    def _time(self, state: dict[str, NDArray[np.int64]]) -> list[float]:
        """Seconds between the ends of steps that follow each other as in generation: with asynchronous scheduling each
        is launched while the one before runs. The first three compile, capture and warm."""
        engine = self._engine
        ahead = engine.scheduler_config.async_scheduling
        seconds: list[float] = []
        ends: list[float] = []
        self._begin(state)
        while len(seconds) < self._repeats and sum(seconds) < self._max_seconds:
            if ahead:
                self._begin(state)
            engine.end_step()
            ends.append(time.perf_counter())
            if len(ends) > _WARM_STEPS:
                seconds.append(ends[-1] - ends[-2])
            if not ahead:
                self._begin(state)
        engine.end_step()
        return seconds

    def _time_from_idle(self, cell: Cell) -> list[float]:
        """Seconds of the step as the first after idleness, from the beginning of its planning to its end, as the engine
        books them. With asynchronous scheduling the next step is launched before this one is waited for. The first
        three repeats compile, capture and warm."""
        engine, seconds = self._engine, list[float]()
        self._script(cell)
        lengths = [group.context_tokens for group in cell.groups for _ in range(group.count)]
        warm = 0
        while len(seconds) < self._repeats and sum(seconds) < self._max_seconds:
            self._clear()
            for row, length in enumerate(lengths):
                prompt = self._rng.integers(engine.loaded.config.vocab_size, size=length).tolist()
                engine.add_request(f"cell-{row}", prompt, _GOES_ON)
            time.sleep(cell.rest_s if warm == _WARM_STEPS else 0.0)
            engine.step()
            ran = StepFeatures.from_matrix(engine.log.features[0])
            if (ran.rows, ran.query_tokens) != (cell.rows, cell.query_tokens):
                raise CapacityError(f"the prompts of {cell.key} do not fit in one step")
            if warm < _WARM_STEPS:
                warm += 1
            else:
                seconds.append(float(engine.log.duration_s[0]))
        return seconds

    def _script(self, cell: Cell) -> _Scripted:
        """The policy in force from now on: every row verifies, and gets a page list where ``cell`` has it."""
        scheduler = self._engine.scheduler
        policy = _Scripted(scheduler.config.max_num_seqs, scheduler.policy_spec.num_speculative_tokens)
        policy.resting = not any(group.select for group in cell.groups)
        scheduler.policy = policy
        return policy

    def _place(self, cell: Cell) -> dict[str, NDArray[np.int64]]:
        """Requests in the state that the cell describes; returns that state by name, and their ``slot``."""
        engine, scheduler = self._engine, self._engine.scheduler
        usable, longest = scheduler.pages.num_usable, engine.scheduler_config.max_model_len
        if cell.pages(PAGE_TOKENS) > usable:
            raise CapacityError(f"{cell.pages(PAGE_TOKENS)} KV pages do not fit in {usable}")
        if cell.pages(PAGE_TOKENS) + cell.rows > usable:  # no room to spread the rows' ends upwards
            longest = max(group.context_tokens for group in cell.groups)
        policy = self._script(cell)
        names = ("slot", "known", "computed", "drafted", "primed")
        columns = {name: np.zeros(cell.rows, dtype=np.int64) for name in names}
        lists = np.zeros((2, engine.scheduler_config.pages_per_slot + 1), dtype=np.int64)
        groups = [group for group in cell.groups for _ in range(group.count)]
        for row in range(cell.rows):
            engine.add_request(f"cell-{row}", [0], _SAMPLING)
        scheduler.admit()
        for row, group in enumerate(groups):
            slot = scheduler.slot_of(f"cell-{row}")
            if slot is None:
                raise CapacityError(f"the step {cell.key} does not fit in the KV pool")
            engine.sequences.occupy(slot, [0], 1, _SAMPLING, slot, (), row)
            query = group.query_tokens
            context = _context_of(row, group, longest)
            drafted, pending = query - 1, 1
            if group.kind == "prefill":
                drafted, pending = 0, query
            elif group.kind == "draft":
                drafted = min(3 * row % _DRAFTED, policy.d_max - 1, context - 1)
            known = context - drafted
            computed = known - pending
            if group.kind == "draft":
                policy.actions[slot] = Action.DRAFT
                lists[:, computed // PAGE_TOKENS] = self._list_for(known, group.sparse_tokens)
            state = (slot, known, computed, drafted, int(group.kind != "prefill"))
            for name, value in zip(names, state, strict=True):
                columns[name][row] = value
        scheduler.slots.set_lists(lists, PAGE_TOKENS)
        self._fill_lists(columns)
        return columns

    def _list_for(self, context: int, sparse_tokens: int) -> tuple[int, int]:
        """(sel_count, tail_page) of a draft row that reads about ``sparse_tokens`` of ``context`` tokens."""
        recent = self._engine.scheduler.policy_spec.selector.recent
        pages = -(-context // PAGE_TOKENS)
        wanted = min(pages, -(-sparse_tokens // PAGE_TOKENS))
        tail = max(0, pages - min(recent, wanted))
        return min(tail, wanted - (pages - tail)), tail

    def _fill_lists(self, columns: dict[str, NDArray[np.int64]]) -> None:
        """Page lists of drafting rows: pages spread over the context, as a selection would be."""
        engine, slots = self._engine, columns["slot"]
        pages, lists, device = engine.scheduler.pages, engine.runner.lists.lists, engine.runner.state
        counts, tails, _ = engine.scheduler.slots.lists_of(columns["computed"])
        at = torch.from_numpy(slots).to(lists.device)
        for values, column in ((counts, device.sel_count), (tails, device.tail_page)):
            column[at] = torch.from_numpy(values).to(lists.device).int()
        pages.grow(slots, -(-columns["known"] // PAGE_TOKENS))
        engine.runner.sync_pages()
        for row in np.flatnonzero(counts).tolist():
            slot, count = int(slots[row]), int(counts[row])
            chosen = np.sort(self._rng.choice(int(tails[row]), size=count, replace=False))
            lists[:, slot, :count] = torch.from_numpy(pages.table[slot, chosen]).to(lists.device)

    def _begin(self, columns: dict[str, NDArray[np.int64]]) -> None:
        """Launch the step once more, every request being where the cell has it."""
        engine, slots = self._engine, self._engine.scheduler.slots
        at = columns["slot"]
        for name, values in columns.items():
            if name != "slot":
                getattr(slots, name)[at] = values
        slots.slack[at] = 0
        slots.primed[at] = columns["primed"] > 0
        slots.generated[at] = 0
        slots.seeded[at] = True
        slots.limit[at] = slots.most[at] = _FOREVER
        engine.sequences.known[at] = columns["known"]
        if not engine.begin_step():
            raise EngineError("a profiled step was not planned: the scheduler has nothing to run")

    def _clear(self) -> None:
        engine = self._engine
        for name in list(engine.scheduler.requests):
            engine.abort(name)
        engine.begin_record()
