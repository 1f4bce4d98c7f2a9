"""Runs a profiling plan: times each cell, keeps medians and spread, writes samples.jsonl as it goes.

The engine supplies ``time_cell(cell) -> seconds of each repeat``: it lays the rows out on random KV, warms the step
up and times it (device synchronised) at least once. This module decides what to time, how often, and when to stop.

A host that is busy with other things is slow for a second or more, so repeats within one visit agree with each other
and are all wrong. Every cell is therefore visited several times, in another order each time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aspire.errors import AspireError, CapacityError, EngineError, UsageError
from aspire.scheduler.features import CostModel
from aspire_calibration.cells import Cell
from aspire_calibration.samples import Sample, Samples, SamplesHeader, SamplesWriter, relative_spread

TimeCell = Callable[[Cell], Sequence[float]]
Refine = Callable[[Samples], list[Cell]]  # what to time next, from all samples so far; empty = enough
NOISY = 0.10  # relative interquartile range above which a cell is timed again
MAX_CALLS = 6  # calls of time_cell for one cell in one visit
VISITS = 3  # visits of every cell, at different times of the profile
FIRST_PASS = 0.6  # share of the budget that the first visits may take


@dataclass(frozen=True)
class ProfileProgress:
    """Handed to the progress callback after every cell."""

    done: int
    total: int
    sample: Sample
    elapsed_s: float
    eta_s: float  # of the plan, within the budget
    phase: str  # "plan", "revisit" or "refine"


@dataclass(frozen=True)
class ProfileResult:
    path: Path
    samples: Samples
    measured: int  # cells timed for the first time, in this call
    resumed: int  # found in the file
    skipped: int
    refined: int
    out_of_budget: bool
    elapsed_s: float


def run_profile(
    time_cell: TimeCell,
    plan: Sequence[Cell],
    path: str | Path,
    header: SamplesHeader,
    *,
    budget_s: float | None = None,
    repeats: int = 5,
    visits: int = VISITS,
    progress: Callable[[ProfileProgress], None] | None = None,
    refine: Refine | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ProfileResult:
    """Time the cells of ``plan`` that ``path`` does not hold, visit all again, then refine while ``budget_s`` lasts.

    At a visit a cell gets >= ``repeats`` (>= 3) repeats; it is visited ``visits`` times (with one visit, a cell whose
    repeats spread widely gets more of them).
    With a budget, first visits end at `FIRST_PASS` of it and go on after the others if time is left. A cell that raises
    `CapacityError` is noted as skipped. Without a budget the plan is measured whole and ``refine`` is asked until it
    has no more. ``refine``: see `aspire_calibration.refine.refiner`. Killed at any time, the next call continues from
    the file.
    """
    if repeats < 3:
        raise UsageError(f"profiling needs >= 3 repeats a cell to tell a median from noise, got {repeats}")
    if visits < 1:
        raise UsageError(f"profiling visits every cell at least once, got visits = {visits}")
    if not plan:
        raise UsageError("the profiling plan is empty: the limits admit no cell; raise max_model_len or the KV pool")
    writer = SamplesWriter(path, header)
    start, deadline = clock(), None if budget_s is None else clock() + budget_s
    state = _Run(time_cell, writer, header, repeats, visits == 1, progress, clock, start, deadline)
    todo = [cell for cell in plan if cell.key not in writer.done]
    resumed = len(writer.done)
    if todo:
        state.warm_up(todo)
    first_pass = None if budget_s is None or visits == 1 else start + FIRST_PASS * budget_s
    finished = state.measure(todo, "plan", len(plan) - len(todo), len(plan), first_pass)
    within_budget = state.revisit(visits)
    if within_budget and not finished:
        left = [cell for cell in todo if cell.key not in writer.done]
        finished = state.measure(left, "plan", len(plan) - len(left), len(plan))
    finished = finished and within_budget
    refined = 0
    while finished and refine is not None:
        wanted = [cell for cell in refine(Samples(header, writer.done)) if cell.key not in writer.done]
        if not wanted:
            break
        before = state.measured
        finished = state.measure(wanted, "refine", 0, len(wanted))
        refined += state.measured - before
    if any(sample.visits > 1 for sample in writer.done.values()):
        writer.compact()
    skipped = sum(bool(sample.skipped) for sample in writer.done.values())
    samples = Samples(header, writer.done)
    return ProfileResult(Path(path), samples, state.measured, resumed, skipped, refined, not finished, clock() - start)


@dataclass
class _Run:
    time_cell: TimeCell
    writer: SamplesWriter
    header: SamplesHeader
    repeats: int
    lengthen: bool  # more repeats where they spread widely; visits of unequal weight would bend the median
    progress: Callable[[ProfileProgress], None] | None
    clock: Callable[[], float]
    start: float
    deadline: float | None
    measured: int = 0

    def warm_up(self, todo: Sequence[Cell]) -> None:
        """Time the first cell that fits and forget it: compilers, allocators and clocks settle."""
        for cell in todo:
            try:
                self._timed(cell)
                return
            except CapacityError:
                continue

    def measure(self, cells: Sequence[Cell], phase: str, done: int, total: int, deadline: float | None = None) -> bool:
        """Time the cells in order; False when ``deadline`` (default: that of the run) passed before them."""
        begun = self.clock()
        deadline = self.deadline if deadline is None else deadline
        for index, cell in enumerate(cells, start=1):
            now = self.clock()
            mean_s = (now - begun) / (index - 1) if index > 1 else 0.0
            if deadline is not None and now + 0.5 * mean_s > deadline:
                return False
            earlier = self.writer.done.get(cell.key)
            sample = self._sample(cell)
            if earlier is not None:
                sample = earlier.joined(sample)
            self.writer.append(sample)
            self.measured += not sample.skipped and earlier is None
            if self.progress is not None:
                now = self.clock()
                eta_s = (now - begun) / index * (len(cells) - index)
                if deadline is not None:
                    eta_s = max(0.0, min(eta_s, deadline - now))
                self.progress(ProfileProgress(done + index, total, sample, now - self.start, eta_s, phase))
        return True

    def revisit(self, visits: int) -> bool:
        """Visit measured cells again until each has ``visits``, those of fewest first; False: out of budget."""
        generator = np.random.default_rng(len(self.writer.done))
        for count in range(1, visits):
            cells = [s.cell for s in self.writer.done.values() if not s.skipped and s.visits == count]
            order = [cells[index] for index in generator.permutation(len(cells))]
            if not self.measure(order, "revisit", 0, len(order)):
                return False
        return True

    def _sample(self, cell: Cell) -> Sample:
        features = self.header.features_of(cell)
        begun = self.clock()
        times: list[float] = []
        try:
            for _ in range(MAX_CALLS):
                times += self._timed(cell)
                noisy = self.lengthen and relative_spread(times) > NOISY
                if len(times) >= (3 if noisy else 1) * self.repeats:
                    break
        except CapacityError as error:
            return Sample(cell, features, (), skipped=str(error), took_s=self.clock() - begun)
        if len(times) < 3:
            raise EngineError(
                f"timing {cell.key} gave {len(times)} repeats in {MAX_CALLS} calls; at least 3 are needed"
            )
        return Sample(cell, features, tuple(times), took_s=self.clock() - begun)

    def _timed(self, cell: Cell) -> list[float]:
        try:
            times = [float(value) for value in self.time_cell(cell)]
        except AspireError:
            raise
        except Exception as error:
            raise EngineError(f"timing the step {cell.key} failed: {type(error).__name__}: {error}") from error
        if not times or not all(np.isfinite(value) and value > 0 for value in times):
            raise EngineError(f"timing the step {cell.key} gave {times}; positive seconds are needed")
        return times


@dataclass(frozen=True)
class PlanInfo:
    """What ``--dry-run`` prints."""

    cells: int
    heldout: int
    by_regime: dict[str, int]  # cells that start from idle count apart
    pool_pages: int  # most KV pages that a cell needs
    pool_bytes: int | None
    query_tokens: int  # most query tokens of a cell
    minutes: float | None  # None without a cost estimate
    budget_minutes: float | None = None
    reached: int | None = None  # cells that the budget lasts for by that estimate, the first of the plan

    def text(self) -> str:
        memory = f", {self.pool_bytes / 2**30:.1f} GiB" if self.pool_bytes is not None else ""
        minutes = f"; about {self.minutes:.1f} minutes" if self.minutes is not None else ""
        regimes = ", ".join(f"{count} {name}" for name, count in sorted(self.by_regime.items()))
        budget = ""
        if self.reached is not None and self.reached < self.cells:
            budget = (
                f"\n{self.budget_minutes:g} minutes last for about {self.reached} of them, a coarse grid first; "
                "smaller max_num_seqs and max_model_len make smaller steps, and --levels fewer cells"
            )
        return (
            f"{self.cells} cells ({regimes}; {self.heldout} held out), up to {self.query_tokens} query tokens and "
            f"{self.pool_pages} KV pages{memory}{minutes}{budget}"
        )


def plan_info(
    plan: Sequence[Cell],
    *,
    page_size: int = 16,
    page_bytes: int | None = None,
    cost: CostModel | None = None,
    repeats: int = 5,
    warmups: int = 2,
    setup_s: float = 0.06,
    visits: int = VISITS,
    budget_s: float | None = None,
) -> PlanInfo:
    """Size of a plan before running it.

    ``cost``: e.g. an analytic model of this hardware; ``page_bytes``: K and V of a page, all layers; ``setup_s``: of a
    cell at its first visit, graph capture included (0.06 s on an H200 with 30 layers, most graphs serve several cells);
    ``budget_s``: what `run_profile` will be given.
    """
    pages = max((cell.pages(page_size) for cell in plan), default=0)
    minutes = reached = None
    if cost is not None:
        visit_s = (repeats + warmups) * np.array([float(cost.predict(cell.features())) for cell in plan])
        # graphs are captured at the first visit and kept
        minutes = (visits * float(visit_s.sum()) + (1 + 0.25 * (visits - 1)) * setup_s * len(plan)) / 60
        if budget_s is not None:
            first_pass = budget_s * (FIRST_PASS if visits > 1 else 1.0)
            whole = 60 * minutes <= budget_s
            reached = len(plan) if whole else int(np.count_nonzero(np.cumsum(visit_s + setup_s) <= first_pass))
    return PlanInfo(
        cells=len(plan),
        heldout=sum(cell.heldout for cell in plan),
        by_regime=dict(Counter("idle" if cell.idle else cell.regime for cell in plan)),
        pool_pages=pages,
        pool_bytes=None if page_bytes is None else pages * page_bytes,
        query_tokens=max((cell.query_tokens for cell in plan), default=0),
        minutes=minutes,
        budget_minutes=None if budget_s is None else budget_s / 60,
        reached=reached,
    )


def summary(result: ProfileResult) -> dict[str, Any]:
    """For ``--json``."""
    spreads = [sample.spread for sample in result.samples.measured]
    return {
        "samples": str(result.path),
        "cells": len(spreads) + len(result.samples.idle),
        "measured": result.measured,
        "resumed": result.resumed,
        "skipped": result.skipped,
        "refined": result.refined,
        "out_of_budget": result.out_of_budget,
        "elapsed_s": round(result.elapsed_s, 3),
        "median_spread": float(np.median(spreads)) if spreads else None,
    }
