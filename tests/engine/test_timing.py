"""Steps timed as the first after idleness: real prompts, as a user sends them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from aspire.engine.llm_engine import LLMEngine  # noqa: E402
from aspire.engine.timing import StepTimer  # noqa: E402
from aspire.errors import CapacityError  # noqa: E402
from aspire.scheduler import PolicySpec  # noqa: E402
from aspire_calibration import Cell, ar, draft, prefill, profile_plan  # noqa: E402
from tests.invariants.cases import small  # noqa: E402
from tests.invariants.harness import Limits, make_engine  # noqa: E402


def idle(tokens: int, rows: int = 1) -> Cell:
    return replace(prefill(tokens, tokens, rows), rest_s=0.001)


def engine_of(ahead: bool) -> LLMEngine:
    policy = PolicySpec(kind="fixed", params={"g": 3}, selector=small("verify"))
    return make_engine("llama", policy, Limits(4, 64, 160, async_scheduling=ahead))


@pytest.mark.parametrize("ahead", [True, False])
def test_a_step_from_idle_is_timed_from_its_planning_to_its_end(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(ahead)
    timer, calls, found = StepTimer(engine, repeats=3), [], []
    for name in ("begin_step", "end_step"):

        def noted(half: object = getattr(engine, name), name: str = name) -> object:
            calls.append((name, engine.clock()))
            return half()  # type: ignore[operator]

        monkeypatch.setattr(engine, name, noted)
    draw = engine.scheduler.schedule

    def schedule() -> object:
        plan = draw()
        if plan is not None:
            found.append((plan.num_prefills, plan.num_query_tokens))
        return plan

    monkeypatch.setattr(engine.scheduler, "schedule", schedule)
    seconds = timer.time_cell(idle(12, rows=4))
    assert len(seconds) == 3 and min(seconds) > 0
    each = ["begin_step", "begin_step", "end_step", "end_step"] if ahead else ["begin_step", "end_step"]
    assert [name for name, _ in calls] == each * 6, "three to warm up, three repeats; the next step is launched first"
    assert found == [(4, 48), *[(0, 4)] * ahead] * 6, "the whole prompts, nothing of them found in the prefix cache"
    if ahead:  # what was timed holds the launch of the next step
        begun, launched, ended = (np.array([at for _, at in calls[12:]]).reshape(3, 4).T)[:3]
        assert (launched - begun < seconds).all() and (ended - begun < seconds).all()
    assert not engine.has_unfinished_requests and not engine._flight and len(engine.log) == 0


def test_cells_of_both_kinds_are_timed_in_any_order() -> None:
    timer = StepTimer(engine_of(True), repeats=3)
    for cell in (ar(4, 100), idle(16, 4), prefill(16, 16, 4), idle(5), ar(4, 100)):
        assert len(timer.time_cell(cell)) == 3


def test_rows_that_draft_hold_different_numbers_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(True)
    timer, plans = StepTimer(engine, repeats=3), []
    draw = engine.scheduler.schedule
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: plans.append(draw()) or plans[-1])
    assert len(timer.time_cell(draft(4, 100, 40))) == 3
    plan = plans[-1]
    assert plan.drafted.tolist() == [0, 3, 6, 1] and plan.num_drafts == 4
    assert (abs(plan.start + plan.query_tokens - 100) <= 8).all(), "the contexts are those of the cell"
    read = (plan.sel_count - plan.tail_page) * 16 + plan.start + 1
    assert (abs(read - 40) < 16 + 7).all() and len(set(read.tolist())) > 1


def test_every_planned_start_from_idle_can_be_timed() -> None:
    timer = StepTimer(engine_of(True), repeats=3)
    cells = [cell for cell in profile_plan(timer.limits()) if cell.idle]
    assert len(cells) >= 2 and all(len(timer.time_cell(cell)) == 3 for cell in cells)
    assert not any(cell.idle for cell in profile_plan(StepTimer(engine_of(False)).limits()))


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (idle(40, rows=2), "do not fit in one step"),
        (idle(160), "cannot be timed.*no room for output"),
        (idle(8, rows=5), "more than max_num_seqs"),
    ],
)
def test_prompts_that_are_no_single_step_are_skipped(cell: Cell, message: str) -> None:
    engine = engine_of(True)
    with pytest.raises(CapacityError, match=message):
        StepTimer(engine, repeats=3).time_cell(cell)
    assert not engine.has_unfinished_requests and not engine._flight
