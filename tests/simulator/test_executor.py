"""The executor: conservation, causality, common random numbers, and exact replay of what it recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aspire.errors import InputError, UsageError
from aspire.rundir import Run, read_run, write_run
from aspire.runlog import DRAFT, VERIFY
from aspire.scheduler import CostModel, SchedulerConfig, StepFeatures
from aspire.scheduler.features import start_latency_of
from aspire_simulator import executor
from aspire_simulator.acceptance import BetaEffect, ByPosition, Iid, Markov
from aspire_simulator.executor import Simulation, may_preempt, simulate
from aspire_simulator.metrics import latencies, summarize
from aspire_simulator.oracle import parse_policy
from aspire_simulator.replaying import replay
from aspire_simulator.validation import ExactOutcomes, entering_requests, validate_run
from aspire_simulator.workload import Workload, synthetic
from tests.simulator.helpers import LinearCost

POLICIES = ["autoregressive", "fixed:g=3+window", "staggered:g=4", "fsm", "aspire", "goodput", "oracle"]
ACCEPTANCES = [Iid(0.8), ByPosition((0.9, 0.6)), Markov(0.95, 0.5), BetaEffect(6, 2)]


def config(**changes: Any) -> SchedulerConfig:
    base = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024, num_pages=200, num_layers=4, watermark=0.0
    )
    return replace(base, **changes)


@st.composite
def scenarios(draw: Any) -> dict[str, Any]:
    count = draw(st.integers(1, 14))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    arrival = np.sort(rng.random(count) * draw(st.sampled_from([0.0, 0.05, 5.0])))
    pages = draw(st.integers(40, 200))
    work = Workload("drawn", arrival, rng.integers(1, 400, count), rng.integers(1, 60, count))
    return {
        "workload": work,
        "policy": parse_policy(draw(st.sampled_from(POLICIES))),
        "acceptance": draw(st.sampled_from(ACCEPTANCES)),
        "config": config(num_pages=pages, max_num_seqs=draw(st.integers(1, 8)), async_scheduling=draw(st.booleans())),
        "seed": draw(st.integers(0, 99)),
        "noise": draw(st.sampled_from([0.0, 0.05])),
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios())
def test_conservation_and_causality(scenario: dict[str, Any]) -> None:
    simulation = Simulation(cost_model=LinearCost(), **scenario)
    pages = simulation.scheduler.pages.num_free
    checks = []

    def check(done: int, total: int, now: float) -> None:
        counts = simulation.scheduler.counts
        checks.append(counts.arrived == counts.waiting + counts.running + counts.finished + counts.rejected)

    simulation._progress = check
    run = simulation.run()
    work = scenario["workload"]
    assert all(checks) and simulation.scheduler.pages.num_free == pages
    assert simulation.scheduler.counts.finished == len(work)
    # sum(committed) = output length, and the counts of the table are those asked for
    assert (run.requests.output_tokens == work.output_tokens).all()
    assert set(run.requests.status) == {"length"}
    log, table = run.steps, run.requests
    assert (log.duration_s > 0).all()
    assert (log.start_s[1:] >= (log.start_s + log.duration_s)[:-1] - 1e-12).all()
    assert (table.first_scheduled_s >= table.arrival_s).all()
    assert (table.first_token_s > table.first_scheduled_s).all() and (table.finish_s >= table.first_token_s).all()
    np.testing.assert_allclose(latencies(table, log).ttft_s, table.first_token_s - table.arrival_s)
    verify = log.column("mode") == VERIFY
    assert (log.column("accepted") <= log.column("drafted"))[verify].all()
    assert (log.column("accepted")[~verify] == 0).all()
    assert not np.isnan(log.margin[log.column("mode") == DRAFT]).any()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios())
def test_replay_composes_every_step_again(scenario: dict[str, Any]) -> None:
    if scenario["policy"].kind == "oracle":
        return
    run = Simulation(cost_model=LinearCost(), **scenario).run()
    report = replay(run, LinearCost())
    assert report.difference == "" and report.equal_share == 1.0


def small_run(policy: str = "aspire", **options: Any) -> Run:
    work = synthetic(
        24, "uniform:50:300", "uniform:5:80", request_rate=options.pop("request_rate", float("inf")), seed=1
    )
    return simulate(work, parse_policy(policy), LinearCost(), BetaEffect(6, 2), config(), **options)


def test_preemption_does_not_move_first_tokens() -> None:
    # prompts of 100 tokens grow to 300: six of them outgrow 80 pages
    work = Workload("grow", np.zeros(8), np.full(8, 100), np.full(8, 200))
    run = simulate(work, parse_policy("fixed:g=4"), LinearCost(), Iid(0.8), config(num_pages=80))
    assert run.requests.preemptions.sum() > 0
    assert (run.requests.output_tokens == 200).all()
    log = run.steps
    end_s = (log.start_s + log.duration_s)[log.step_of_row()]
    for request in range(8):
        rows = (log.column("request") == request) & (log.column("committed") > 0)
        assert run.requests.first_token_s[request] == end_s[rows][0]


def test_outcomes_do_not_depend_on_the_policy() -> None:
    """Common random numbers: where two policies drafted the same position from intact prefixes, both saw the same
    fate.
    """
    exact = [ExactOutcomes.of(small_run(policy)) for policy in ("fixed:g=3", "staggered:g=6")]
    runs = [small_run(policy) for policy in ("fixed:g=3", "staggered:g=6")]
    for one, two in zip(runs, [small_run("fixed:g=3"), small_run("staggered:g=6")], strict=True):
        assert (one.steps.start_s == two.steps.start_s).all()
    same = exact[0].accepted == exact[1].accepted
    assert same.mean() > 0.8  # the rest are positions that one of them never drafted


def test_oracle_wastes_nothing_and_bounds_the_others() -> None:
    work = synthetic(16, 3000, 60, seed=1)
    limits = config(max_model_len=4096, num_pages=2000)
    rates = {}
    for policy in POLICIES:
        run = simulate(work, parse_policy(policy), LinearCost(base=1e-4, kv=1e-7), BetaEffect(6, 2), limits)
        summary = summarize(run)
        rates[policy] = summary["decode_only_throughput"]
        if policy == "oracle":
            assert summary["wasted_drafts"] == 0 and summary["acceptance_rate"] == 1.0
    assert rates["oracle"] == max(rates.values()) > 1.3 * rates["autoregressive"]


class DearVerification(LinearCost):
    """A step in which anybody verifies takes other kernels."""

    def predict(self, features: StepFeatures) -> np.ndarray:
        return super().predict(features) + 2e-3 * (features.verify_rows > 0)


def test_oracle_verifies_in_common_where_that_is_faster() -> None:
    work = synthetic(16, 3000, 60, seed=1)
    limits = config(max_model_len=4096, num_pages=2000, max_num_seqs=16)
    cost, rates, verifying = DearVerification(base=1e-4, kv=1e-7), {}, {}
    for policy in ("fixed:g=4", "fixed:g=8", "aspire", "goodput", "oracle"):
        run = simulate(work, parse_policy(policy), cost, BetaEffect(6, 2), limits)
        rates[policy] = summarize(run)["full_batch_throughput"]
        steps = run.steps.step_of_row()[run.steps.column("mode") == VERIFY]
        verifying[policy] = np.unique(steps).size / len(run.steps)
    assert rates["oracle"] == max(rates.values()), rates
    assert verifying["oracle"] < 0.5 * verifying["aspire"]


def test_oracle_does_not_draft_where_drafting_does_not_pay() -> None:
    work = synthetic(8, 64, 20)
    flat = LinearCost(base=1e-3, token=1e-6, kv=0.0)  # a draft step costs as much as a verification
    run = simulate(work, parse_policy("oracle"), flat, Iid(0.95), config())
    assert not (run.steps.column("mode") == DRAFT).any()


def test_arrivals_and_concurrency() -> None:
    run = small_run(request_rate=50.0)
    assert (run.requests.first_scheduled_s >= run.requests.arrival_s).all() and run.requests.arrival_s[-1] > 0.1
    held = small_run(max_concurrency=2)
    rows = np.diff(held.steps.row_end, prepend=0)
    assert rows.max() == 2 and len(held.requests) == (held.requests.output_tokens > 0).sum()
    assert held.requests.arrival_s[-1] > 0


class StartCost(LinearCost):
    """Prices with a latency of steps that begin with nothing in flight: more after a long rest."""

    start_latency = ((0.1, 5e-3), (10.0, 9e-3))


class BurstCost(StartCost):
    """More by each further request that begins, too."""

    start_latency_per_request_s = 1e-4


def starts(
    work: Workload, limits: SchedulerConfig, cost_model: CostModel | None = None, **options: Any
) -> tuple[Run, dict[int, float]]:
    """A run, and how much longer than priced its steps took."""
    run = simulate(work, parse_policy("autoregressive"), cost_model or StartCost(), Iid(0.9), limits, **options)
    over_s = run.steps.duration_s - LinearCost().predict(StepFeatures.from_matrix(run.steps.features))
    return run, {step: round(float(over_s[step]), 9) for step in np.flatnonzero(np.abs(over_s) > 1e-12).tolist()}


def test_a_step_that_begins_when_nothing_is_in_flight_takes_the_start_latency_longer() -> None:
    alone = Workload("alone", np.zeros(1), np.array([100]), np.array([20]))
    run, charged = starts(alone, config(async_scheduling=True))
    first_s = float(LinearCost().predict(StepFeatures.from_matrix(run.steps.features[:1]))[0])
    assert latencies(run.requests, run.steps).ttft_s[0] == pytest.approx(first_s + 9e-3)
    assert charged == {0: 9e-3} and len(run.steps) >= 20
    _, charged = starts(alone, config())
    assert not len(charged), "without planning ahead, what the prices were made from began so, too"


def test_an_engine_pays_it_once_in_every_idle_period() -> None:
    # the second request comes while the first runs, the third when all is quiet, the last two at once
    work = Workload("five", np.array([0.0, 0.01, 5.0, 9.0, 9.0]), np.full(5, 100), np.full(5, 30))
    run, charged = starts(work, config(async_scheduling=True))
    steps = list(charged)
    np.testing.assert_allclose(run.steps.start_s[steps], [0.0, 5.0, 9.0])
    assert (~run.steps.planned_ahead).nonzero()[0].tolist() == steps
    ends_s = run.steps.start_s + run.steps.duration_s
    rests_s = [np.inf, *(run.steps.start_s[steps[1:]] - ends_s[np.array(steps[1:]) - 1])]
    assert list(charged.values()) == pytest.approx(start_latency_of(StartCost(), np.array(rests_s), 1).tolist())
    assert 5e-3 < charged[steps[2]] < charged[steps[1]] < charged[0]


def test_a_step_that_could_not_be_planned_ahead_pays_it_too() -> None:
    # prompts of 100 tokens grow to 300: six of them outgrow 80 pages, and whom to preempt must be known first
    work = Workload("grow", np.zeros(8), np.full(8, 100), np.full(8, 200))
    run, charged = starts(work, config(num_pages=80, async_scheduling=True))
    assert run.requests.preemptions.sum() > 0 and len(charged) > 1
    assert (~run.steps.planned_ahead).nonzero()[0].tolist() == list(charged)
    assert set(charged.values()) == {5e-3, 9e-3} and charged[0] == 9e-3, "only the first had a rest before it"


def test_it_grows_with_the_requests_that_begin_in_the_step() -> None:
    # of the last four, 256 tokens of a step hold one prompt and the first chunk of another
    tokens = np.array([50, 50, 50, 100, *[200] * 4])
    work = Workload("bursts", np.array([0.0, 0.0, 0.0, 5.0, *[20.0] * 4]), tokens, np.full(8, 30))
    run, charged = starts(work, config(async_scheduling=True), BurstCost())
    rests_s = [np.inf, *(run.steps.start_s[step] - run.steps.start_s[step - 1] for step in list(charged)[1:])]
    expected = start_latency_of(BurstCost(), np.array(rests_s), np.array([3, 1, 2]))
    assert list(charged.values()) == pytest.approx(expected.tolist(), rel=1e-3)
    assert charged[0] == pytest.approx(9e-3 + 2e-4) and len(charged) == 3
    assert entering_requests(run.steps)[list(charged)].tolist() == [3, 1, 2]
    assert entering_requests(run.steps).sum() == 8


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios())
def test_a_recording_tells_the_requests_that_began_in_each_step(scenario: dict[str, Any]) -> None:
    simulation, counted = Simulation(cost_model=LinearCost(), **scenario), []
    plan = simulation._plan

    def planned() -> Any:
        step = plan()
        counted.extend([step.entering] if step is not None else [])
        return step

    simulation._plan = planned  # type: ignore[method-assign]
    run = simulation.run()
    told, preempted = entering_requests(run.steps), int(run.requests.preemptions.sum())
    # a prompt that is sent back and finds all that it had computed goes on where it was
    assert (told <= counted).all() and sum(counted) == len(run.requests) + preempted
    assert sum(counted) - told.sum() <= preempted


@pytest.mark.parametrize("rest_s", [0.0, 0.4, np.inf])
def test_the_rest_before_the_clock_began_counts_for_the_first_step(tmp_path: Path, rest_s: float) -> None:
    work = Workload("two", np.array([0.2, 9.0]), np.full(2, 100), np.full(2, 20))
    run, charged = starts(work, config(async_scheduling=True), BurstCost(), rest_s=rest_s)
    assert charged[0] == pytest.approx(float(start_latency_of(StartCost(), rest_s + 0.2, 1)))
    assert run.config["rest_s"] == (rest_s if rest_s < np.inf else None)
    check = validate_run(write_run(tmp_path / "run", run), BurstCost())
    assert check.step_times.regimes["all"].max < 1e-6
    assert max(abs(one.error) for one in check.comparisons) < 1e-6


@pytest.mark.parametrize("rest_s", [-0.1, "long", [1.0]])
def test_a_rest_that_is_none_is_refused(tmp_path: Path, rest_s: Any) -> None:
    run = small_run()
    run.config["rest_s"] = rest_s
    path = write_run(tmp_path / "run", run)
    with pytest.raises(InputError, match="rest_s must be seconds >= 0 or null, got"):
        validate_run(path, LinearCost())


def test_noise_keeps_the_mean() -> None:
    quiet, noisy = small_run("autoregressive"), small_run("autoregressive", noise=0.2)
    assert len(quiet.steps) == len(noisy.steps)
    assert noisy.steps.duration_s.sum() == pytest.approx(quiet.steps.duration_s.sum(), rel=0.08)


def test_requests_that_never_fit_are_rejected_and_the_rest_finish() -> None:
    work = Workload("w", np.zeros(3), np.array([10, 5000, 10]), np.array([5, 5, 5]))
    run = simulate(work, parse_policy("autoregressive"), LinearCost(), Iid(0.9), config())
    assert run.requests.status == ["length", "rejected", "length"]
    summary = summarize(run)
    assert summary["completed"] == 2 and summary["rejected"] == 1


def test_options_are_checked() -> None:
    for bad in ({"noise": -1.0}, {"max_concurrency": 0}, {"rest_s": -1.0}, {"rest_s": float("nan")}):
        with pytest.raises(UsageError):
            small_run(**bad)


def test_replay_sees_a_drift(tmp_path: Path) -> None:
    run = small_run()
    path = write_run(tmp_path / "run", run)
    again = read_run(path)
    assert replay(again, LinearCost()).equal_share == 1.0
    again.config["policy"]["params"] = {"gamma_init": 5}
    report = replay(again, LinearCost())
    assert report.equal_share < 1.0 and "recorded" in report.difference
    again.config["policy"]["kind"] = "oracle"
    with pytest.raises(UsageError, match="hindsight"):
        replay(again, LinearCost())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", ["autoregressive", "fixed:g=4", "aspire"])
def test_validate_a_run_against_itself_and_a_wrong_cost_model(tmp_path: Path, policy: str, ahead: bool) -> None:
    from aspire_calibration import LoadedCostModel, analytic_model

    model = LoadedCostModel(replace(analytic_model("h200", "smollm2-135m"), start_latency=((0.1, 1.2e-3),)))
    work = synthetic(24, "uniform:50:300", "uniform:5:80", request_rate=300.0, seed=1)
    run = simulate(work, parse_policy(policy), model, BetaEffect(6, 2), config(async_scheduling=ahead))
    path = write_run(tmp_path / "run", run)
    check = validate_run(path)
    assert check.step_times.regimes["all"].max < 1e-6
    assert check.composition.equal_share == 1.0 and check.passed, check.to_dict()
    slow = LinearCost(base=1.0)
    assert not validate_run(path, slow).passed


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios())
def test_pages_without_names_change_nothing_where_nobody_is_preempted(scenario: dict[str, Any]) -> None:
    """Names that no other request has serve a preempted request alone: a simulation without preemption omits them."""
    scenario["noise"] = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "may_preempt", lambda workload, limits: True)
        named = simulate(cost_model=LinearCost(), **scenario)
    if named.requests.preemptions.any():
        assert may_preempt(scenario["workload"], scenario["config"])
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "may_preempt", lambda workload, limits: False)
        unnamed = simulate(cost_model=LinearCost(), **scenario)
    np.testing.assert_array_equal(named.steps.start_s, unnamed.steps.start_s)
    for name in ("slot", "request", "mode", "committed"):
        np.testing.assert_array_equal(named.steps.column(name), unnamed.steps.column(name))
