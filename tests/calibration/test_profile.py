"""Running a plan: repeats, budget, kill and resume, refinement."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest

from aspire.errors import CapacityError, EngineError, UsageError
from aspire_calibration import (
    LoadedCostModel,
    PlanLimits,
    analytic_model,
    ar,
    plan_info,
    profile_plan,
    read_samples,
    refiner,
    run_profile,
)
from aspire_calibration.profile import summary
from aspire_calibration.refine import neighbour, worst
from tests.calibration.machine import AHEAD, HEADER, LIMITS, timer

SMALL = PlanLimits(8, 2048, 4000, 512, d_max=4)


class FakeClock:
    """Advances when a cell is timed."""

    def __init__(self, per_cell_s: float) -> None:
        self.now, self.per_cell_s, self.cells = 0.0, per_cell_s, []

    def __call__(self) -> float:
        return self.now

    def time_cell(self, cell):
        self.now += self.per_cell_s
        self.cells.append(cell.key)
        return [1e-3] * 5


def test_every_cell_gets_its_repeats_and_progress_counts_down(tmp_path):
    plan, seen = profile_plan(SMALL)[:20], []
    clock = FakeClock(2.0)
    result = run_profile(
        clock.time_cell, plan, tmp_path / "s.jsonl", HEADER, visits=1, progress=seen.append, clock=clock
    )
    assert result.measured == 20 and not result.out_of_budget and result.skipped == 0
    assert [event.done for event in seen] == list(range(1, 21)) and seen[-1].eta_s == 0.0
    assert seen[9].eta_s == pytest.approx(20.0)
    assert clock.cells[0] == clock.cells[1] == plan[0].key, "the first cell is timed once to warm up"
    assert all(len(sample.repeats_s) >= 3 for sample in read_samples(tmp_path / "s.jsonl").measured)


@pytest.mark.parametrize("visits", [1, 3])
@pytest.mark.parametrize("budget_s", [0.0, 7.0, 30.0])
def test_the_budget_is_kept(tmp_path, budget_s, visits):
    clock = FakeClock(1.0)
    plan, path = profile_plan(SMALL), tmp_path / "s.jsonl"
    result = run_profile(clock.time_cell, plan, path, HEADER, budget_s=budget_s, visits=visits, clock=clock)
    assert result.out_of_budget and clock.now <= budget_s + 2.0
    share = 1.0 if visits == 1 else 0.6
    assert result.measured == pytest.approx(share * budget_s - 1, abs=1.5) or budget_s == 0


def test_every_cell_is_visited_again_at_other_times_and_in_another_order(tmp_path):
    plan, clock, path = profile_plan(SMALL)[:10], FakeClock(1.0), tmp_path / "s.jsonl"
    slow = iter([2e-3] * 11 + [1e-3] * 20)  # the host is slow during the first visits

    def time_cell(cell):
        clock.time_cell(cell)
        return [next(slow)] * 5

    result = run_profile(time_cell, plan, path, HEADER, clock=clock)
    rounds = [clock.cells[1:11], clock.cells[11:21], clock.cells[21:]]
    assert rounds[0] == [cell.key for cell in plan]
    assert all(sorted(part) == sorted(rounds[0]) for part in rounds) and rounds[0] != rounds[1] != rounds[2]
    read = read_samples(path).measured
    assert len(path.read_text().splitlines()) == 11, "one line a cell when the profile has ended"
    assert result.measured == 10 and {sample.visits for sample in read} == {3}
    assert [sample.median_s for sample in read] == [1e-3] * 10 and read[0].took_s == pytest.approx(3.0)


def test_a_budget_left_after_the_visits_goes_to_the_rest_of_the_plan(tmp_path):
    plan, clock = profile_plan(SMALL)[:20], FakeClock(1.0)
    result = run_profile(clock.time_cell, plan, tmp_path / "s.jsonl", HEADER, budget_s=28.0, visits=2, clock=clock)
    assert result.out_of_budget and result.measured == 16 and clock.now == 28.0
    clock = FakeClock(1.0)
    result = run_profile(clock.time_cell, plan, tmp_path / "t.jsonl", HEADER, budget_s=33.0, visits=2, clock=clock)
    assert result.measured == 19
    with pytest.raises(UsageError, match="visits = 0"):
        run_profile(clock.time_cell, plan, tmp_path / "u.jsonl", HEADER, visits=0)


def test_noisy_cells_are_timed_longer(tmp_path):
    generator = np.random.default_rng(0)
    cells, path = [ar(1, 100)], tmp_path / "s.jsonl"
    run_profile(lambda cell: [float(generator.uniform(1, 2))], cells, path, HEADER, repeats=3, visits=1)
    assert len(read_samples(tmp_path / "s.jsonl").measured[0].repeats_s) == 6


def test_cells_beyond_capacity_are_skipped_and_remembered(tmp_path):
    def time_cell(cell):
        if cell.rows > 4:
            raise CapacityError("the pool has 4000 pages")
        return [1e-3] * 5

    plan = profile_plan(SMALL)
    result = run_profile(time_cell, plan, tmp_path / "s.jsonl", HEADER)
    assert 0 < result.skipped < len(plan) and result.measured + result.skipped == len(plan)
    again = run_profile(time_cell, plan, tmp_path / "s.jsonl", HEADER)
    assert again.measured == 0 and again.resumed == len(plan)


def test_failures_say_which_step(tmp_path):
    def broken(cell):
        raise RuntimeError("illegal memory access")

    with pytest.raises(EngineError, match="timing the step verify:1x1q100c failed: RuntimeError: illegal"):
        run_profile(broken, [ar(1, 100)], tmp_path / "s.jsonl", HEADER)
    with pytest.raises(EngineError, match="positive seconds are needed"):
        run_profile(lambda cell: [0.0], [ar(1, 100)], tmp_path / "t.jsonl", HEADER)
    with pytest.raises(UsageError, match=">= 3 repeats"):
        run_profile(broken, [ar(1, 100)], tmp_path / "u.jsonl", HEADER, repeats=2)
    with pytest.raises(UsageError, match="plan is empty"):
        run_profile(broken, [], tmp_path / "u.jsonl", HEADER)


KILLED = """
import sys, time
from aspire_calibration import profile_plan, run_profile
from tests.calibration.machine import HEADER, LIMITS
def slow(cell):
    time.sleep(0.02)
    return [1e-3] * 5
run_profile(slow, profile_plan(LIMITS)[:200], sys.argv[1], HEADER)
"""


def test_a_killed_profile_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "s.jsonl"
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)])
    deadline = time.monotonic() + 30
    while (not path.exists() or path.read_bytes().count(b"\n") < 6) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the kill may or may not tear the last line
        before = read_samples(path)
        assert 5 <= len(before.by_key) < 200
        seen = []
        plan = profile_plan(LIMITS)[:200]
        result = run_profile(timer(), plan, path, HEADER, progress=seen.append)
    seen = [event.sample for event in seen if event.phase == "plan"]
    assert result.resumed == len(before.by_key) and len(result.samples.by_key) == 200
    assert not {sample.cell.key for sample in seen} & set(before.by_key), "no first visit is paid for twice"


def test_refinement_measures_beside_the_worst_cells_until_the_budget_ends(tmp_path):
    plan, clock = profile_plan(LIMITS)[:80], FakeClock(1.0)
    time_cell = timer(noise=0.05)

    def timed(cell):
        clock.now += 1.0
        return time_cell(cell)

    result = run_profile(timed, plan, tmp_path / "s.jsonl", HEADER, budget_s=260, refine=refiner(LIMITS), clock=clock)
    assert result.refined > 0 and result.out_of_budget and clock.now <= 263
    assert all(LIMITS.fits(sample.cell) for sample in result.samples.measured)
    unlimited = run_profile(time_cell, plan, tmp_path / "t.jsonl", HEADER, refine=refiner(LIMITS, rounds=2))
    assert 0 < unlimited.refined <= 24 and not unlimited.out_of_budget


def test_neighbours_are_near_and_fit():
    generator = np.random.default_rng(0)
    for cell in profile_plan(LIMITS)[:100]:
        near = neighbour(cell, LIMITS, generator)
        assert near is None or (LIMITS.fits(near) and 0.3 < near.query_tokens / cell.query_tokens < 2.5)


def test_worst_cells_first(tmp_path):
    run_profile(timer(), [ar(1, 100), ar(2, 100), ar(4, 100)], tmp_path / "s.jsonl", HEADER)
    samples = read_samples(tmp_path / "s.jsonl")
    predicted = [sample.median_s * factor for sample, factor in zip(samples.measured, (1.1, 0.5, 1.0), strict=True)]
    assert worst(samples, predicted, 1) == [(ar(2, 100).key, pytest.approx(-0.5))]


def test_plan_info_tells_cells_memory_and_minutes():
    plan = profile_plan(LIMITS)
    info = plan_info(plan, page_bytes=16 * 23040, cost=LoadedCostModel(analytic_model("h200", "smollm2-135m")))
    assert info.cells == len(plan) and sum(info.by_regime.values()) == len(plan) and info.pool_pages <= LIMITS.num_pages
    assert 0.1 < info.minutes < 5 and info.pool_bytes == info.pool_pages * 16 * 23040
    assert "cells" in info.text() and "GiB" in info.text() and "minutes" in info.text()
    assert "12 idle" in plan_info(profile_plan(AHEAD)).text()


def test_plan_info_tells_how_far_a_budget_goes(tmp_path):
    """As far as the profile then gets, on a machine that takes what the estimate says."""
    plan, prices = profile_plan(LIMITS), LoadedCostModel(analytic_model("h200", "smollm2-135m"))
    alike = {"cost": prices, "setup_s": 0.0, "warmups": 0}
    whole_s = 60 * plan_info(plan, **alike).minutes
    infos = [plan_info(plan, **alike, budget_s=part * whole_s) for part in (0.02, 0.3, 2)]
    few, more, all_of_them = (info.reached for info in infos)
    assert 0 < few < more < all_of_them == len(plan)
    assert f"about {few} of them" in infos[0].text() and "of them" not in infos[2].text()
    assert plan_info(plan, budget_s=60.0).reached is None, "nothing to estimate with"
    now = [0.0]

    def time_cell(cell):
        each = float(prices.predict(cell.features()))
        now[0] += 5 * each
        return [each] * 5

    budget_s = 60 * infos[1].budget_minutes
    done = run_profile(time_cell, plan, tmp_path / "s.jsonl", HEADER, budget_s=budget_s, clock=lambda: now[0])
    assert done.measured == pytest.approx(more, rel=0.1)


def test_steps_from_idle_are_visited_and_counted_and_not_refined(tmp_path):
    plan, slow_start = profile_plan(AHEAD)[:80], timer(noise=0.05, start_s=1.0)
    result = run_profile(slow_start, plan, tmp_path / "s.jsonl", HEADER, refine=refiner(AHEAD, batch=8, rounds=1))
    assert len(result.samples.idle) == 8 and {sample.visits for sample in result.samples.idle} == {3}
    assert result.measured == summary(result)["cells"] == 80 + result.refined and result.refined > 0
    planned = {cell.key for cell in plan}
    near = [sample.cell.regime for sample in result.samples.measured if sample.cell.key not in planned]
    assert len(near) == result.refined and set(near) != {"prefill"}, "a slow start is no badly predicted prompt"
