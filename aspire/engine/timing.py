"""Times synthetic steps for the profiler: real steps of the real engine, on requests whose state is set directly.

The KV pool is filled with random values, so no prefill is paid for. Every repeat goes through `LLMEngine.step`:
scheduling, upload, forward, download and update, as in generation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from aspire.engine.llm_engine import LLMEngine
from aspire.errors import CapacityError, UsageError
from aspire.sampling_params import SamplingParams
from aspire.scheduler import PAGE_TOKENS, Action, Policy, PolicyView
from aspire_calibration import Cell, PlanLimits, SamplesHeader

_FOREVER = 1 << 30
_SAMPLING = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, max_tokens=1, ignore_eos=True, detokenize=False)


class _Scripted(Policy):
    """Does what it was told, by slot."""

    kind = "scripted"

    def __init__(self, max_slots: int, d_max: int) -> None:
        super().__init__(None, max_slots, d_max)
        self.actions = np.full(max_slots, Action.VERIFY, dtype=np.int8)

    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        return self.actions[view.slots]


class StepTimer:
    """Times the cells of a profiling plan on ``engine``, which must be idle and is not usable afterwards."""

    def __init__(self, engine: LLMEngine, *, max_seconds: float = 2.0, repeats: int = 5) -> None:
        if engine.has_unfinished_requests:
            raise UsageError("profiling needs an idle engine; finish or abort its requests first")
        self._engine = engine
        self._max_seconds = max_seconds
        self._repeats = repeats
        engine.pool.fill_random()
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
        )

    def header(self, command: str = "") -> SamplesHeader:
        """What was profiled, for samples.jsonl."""
        engine = self._engine
        config = engine.scheduler_config
        return SamplesHeader.of_this_machine(
            *engine.identity(),
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
            state = self._place(cell)
            self._step(state)  # compiles, captures, warms
            self._step(state)
            seconds: list[float] = []
            while len(seconds) < self._repeats and sum(seconds) < self._max_seconds:
                seconds.append(self._step(state))
            return seconds
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"the step {cell.key} does not fit in GPU memory") from error
        finally:
            self._clear()

    def _place(self, cell: Cell) -> dict[str, NDArray[np.int64]]:
        """Requests in the state that the cell describes; returns that state by name, and their ``slot``."""
        engine, scheduler = self._engine, self._engine.scheduler
        if cell.pages(PAGE_TOKENS) > scheduler.pages.num_usable:
            raise CapacityError(f"{cell.pages(PAGE_TOKENS)} KV pages do not fit in {scheduler.pages.num_usable}")
        policy = _Scripted(engine.scheduler_config.max_num_seqs, scheduler.policy_spec.num_speculative_tokens)
        policy.resting = not any(group.select for group in cell.groups)
        scheduler.policy = policy
        names = ("slot", "known", "computed", "drafted", "sel_count", "tail_page")
        columns = {name: np.zeros(cell.rows, dtype=np.int64) for name in names}
        groups = [group for group in cell.groups for _ in range(group.count)]
        for row in range(cell.rows):
            engine.add_request(f"cell-{row}", [0], _SAMPLING)
        scheduler.admit()
        for row, group in enumerate(groups):
            slot = scheduler.slot_of(f"cell-{row}")
            if slot is None:
                raise CapacityError(f"the step {cell.key} does not fit in the KV pool")
            engine.sequences.occupy(slot, [0], 1, _SAMPLING, slot, (), row)
            context, query = group.context_tokens, group.query_tokens
            drafted = 0 if group.kind == "prefill" else query - 1
            state = (slot, context - drafted, context - query, drafted, 0, 0)
            if group.kind == "draft":
                policy.actions[slot] = Action.DRAFT
                state = (*state[:4], *self._list_for(context, group.sparse_tokens))
            for name, value in zip(names, state, strict=True):
                columns[name][row] = value
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
        engine = self._engine
        pages, lists = engine.scheduler.pages, engine.runner.lists.lists
        pages.grow(columns["slot"], -(-columns["known"] // PAGE_TOKENS))
        engine.runner.sync_pages()
        for row in np.flatnonzero(columns["sel_count"]).tolist():
            slot, count = int(columns["slot"][row]), int(columns["sel_count"][row])
            chosen = np.sort(self._rng.choice(int(columns["tail_page"][row]), size=count, replace=False))
            lists[:, slot, :count] = torch.from_numpy(pages.table[slot, chosen]).to(lists.device)

    def _step(self, columns: dict[str, NDArray[np.int64]]) -> float:
        engine, slots = self._engine, self._engine.scheduler.slots
        at = columns["slot"]
        for name, values in columns.items():
            if name != "slot":
                getattr(slots, name)[at] = values
        slots.generated[at] = 0
        slots.seeded[at] = True
        slots.limit[at] = _FOREVER
        engine.sequences.known[at] = columns["known"]
        engine.forget_steps()
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        engine.step()
        return time.perf_counter() - start

    def _clear(self) -> None:
        engine = self._engine
        for name in list(engine.scheduler.requests):
            engine.abort(name)
        engine.begin_record()
