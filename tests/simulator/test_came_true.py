"""Evidence that simulations come true: recorded runs simulated again, and the gain that tuning promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aspire.errors import InputError
from aspire.rundir import Run, write_run
from aspire.scheduler import PolicySpec, SchedulerConfig
from aspire_calibration import LoadedCostModel, analytic_model
from aspire_simulator import fidelity, observed_gain
from aspire_simulator.acceptance import BetaEffect
from aspire_simulator.executor import simulate
from aspire_simulator.validation import validate_run
from aspire_simulator.workload import Workload

MODEL = analytic_model("h200", "smollm2-135m")
CONFIG = SchedulerConfig(
    max_num_seqs=8, max_num_batched_tokens=512, max_model_len=2048, num_pages=1500, num_layers=30, graph_buckets=()
)
META = {"hardware": "made-up GPU", "driver": "1", "torch": "2", "triton": "3", "commit": "abc", "command": "bench"}


def recorded(policy: str, *, slower: float = 1.0, submit_s: float = 0.0) -> Run:
    """A run as the engine would record it: ``slower`` than the cost model says, requests queued one by one, taking
    ``submit_s`` each, before the first step."""
    work = Workload("w", np.zeros(12), np.linspace(300, 900, 12).astype(np.int64), np.full(12, 40))
    run = simulate(work, PolicySpec.parse(policy), LoadedCostModel(MODEL), BetaEffect(12.0, 2.0), CONFIG)
    steps = run.steps
    steps.duration_s[:] *= slower
    now_s = submit_s * len(work)
    for step, duration_s in enumerate(steps.duration_s.tolist()):  # to the last bit what the next step begins at
        steps.start_s[step] = now_s
        now_s += duration_s
    steps.planned_s[:] = steps.start_s
    run.requests.arrival_s[:] = submit_s * np.arange(len(work))
    end_s = steps.start_s + steps.duration_s
    owner, ended = steps.column("request"), steps.column("finished") > 0
    run.requests.finish_s[owner[ended]] = end_s[steps.step_of_row()[ended]]
    run.meta = dict(META)
    return run


@pytest.mark.parametrize("policy", ["autoregressive", "fixed:g=4", "aspire"])
def test_a_machine_as_fast_as_its_model_is_foretold_exactly(tmp_path: Path, policy: str) -> None:
    """Requests wait for the first step while the others are queued; that is part of their latency, not an error."""
    check = validate_run(write_run(tmp_path / "run", recorded(policy, submit_s=0.003)))
    assert check.composition.equal_share == 1.0
    assert check.step_times.run_error < 1e-9
    assert max(abs(one.error) for one in check.comparisons) < 1e-9
    assert check.rows == 8 and 300 < check.context_tokens < 1000


def test_a_slower_machine_shows_as_that_error(tmp_path: Path) -> None:
    for index, policy in enumerate(("autoregressive", "fixed:g=4")):
        write_run(tmp_path / "bench" / f"0{index}-{policy.split(':')[0]}", recorded(policy, slower=1.25))
    out = tmp_path / "simulation.json"
    assert fidelity.main([str(tmp_path / "bench"), "--out", str(out)]) == 0
    evidence = json.loads(out.read_text())
    found = {result["id"]: result for result in evidence["results"]}
    assert found["sim.composition_equal"]["value"] == 1.0
    assert found["sim.throughput_error_mean"]["value"] == pytest.approx(0.25)
    assert found["sim.throughput_error_max"]["value"] == pytest.approx(0.25)
    assert found["sim.latency_percentile_error_max"]["value"] == pytest.approx(0.2)
    assert set(found["sim.composition_equal"]["detail"]["runs"]) == {"bench/00-autoregressive", "bench/01-fixed"}
    assert evidence["meta"]["hardware"] == "made-up GPU" and evidence["meta"]["measured_commits"] == ["abc"]


def test_runs_of_two_machines_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = recorded("autoregressive"), recorded("autoregressive")
    two.meta["hardware"] = "another GPU"
    paths = [str(write_run(tmp_path / name, run)) for name, run in (("one", one), ("two", two))]
    assert fidelity.main([*paths, "--out", str(tmp_path / "x.json")]) == 1
    assert "different hardware" in capsys.readouterr().err and not (tmp_path / "x.json").exists()
    with pytest.raises(InputError, match="aspire bench"):
        fidelity.run_directories([tmp_path / "absent"])


def bench_of(**rates: list[float]) -> dict[str, Any]:
    specs = {"ar": PolicySpec(), "aspire": PolicySpec("aspire"), "tuned": PolicySpec("goodput", {"hysteresis": 0.1})}
    entries = [
        {"policy": specs[name].to_dict(), "label": specs[name].label, "decode_only_throughput": values}
        for name, values in rates.items()
    ]
    return {"policies": entries}


PROMISE = {"over": "aspire", "mean": 1.2, "low": 1.15, "high": 1.25, "seeds": 5}
TUNED = PolicySpec("goodput", {"hysteresis": 0.1}, provenance={"gains": [PROMISE]})


def test_the_observed_gain_stands_beside_the_promise() -> None:
    bench = bench_of(ar=[100.0, 90.0, 110.0], aspire=[200.0, 180.0, 210.0], tuned=[236.0, 216.0, 240.0])
    over_aspire, over_ar = observed_gain.observed_gains(TUNED, bench)
    assert over_aspire["id"] == "tune.observed_gain_over_aspire_default"
    assert over_aspire["value"] == pytest.approx(236 / 200) and over_aspire["n"] == 3
    assert over_aspire["detail"]["within_interval"] and over_aspire["detail"]["predicted"] == PROMISE
    assert over_ar["value"] == pytest.approx(2.36) and over_ar["detail"]["predicted"] is None
    slower = bench_of(ar=[100.0], aspire=[200.0], tuned=[190.0])
    assert not observed_gain.observed_gains(TUNED, slower)[0]["detail"]["within_interval"]


def test_a_bench_without_the_policies_is_refused() -> None:
    for bench in (bench_of(ar=[1.0], tuned=[2.0]), bench_of(ar=[1.0], aspire=[2.0]), {}):
        with pytest.raises(InputError, match="aspire bench|--policy"):
            observed_gain.observed_gains(TUNED, bench)


def test_tuned_to_the_baseline_itself_gains_nothing() -> None:
    bench = bench_of(ar=[100.0], aspire=[200.0])
    assert observed_gain.observed_gains(PolicySpec("aspire"), bench)[0]["value"] == 1.0


def test_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = tmp_path / "bench"
    write_run(bench / "00-autoregressive", recorded("autoregressive"))
    (bench / "bench.json").write_text(json.dumps(bench_of(ar=[100.0], aspire=[200.0], tuned=[240.0])))
    policy, out = TUNED.save(tmp_path / "policy.json"), tmp_path / "tuning.json"
    assert observed_gain.main([str(policy), str(bench), "--out", str(out)]) == 0
    assert "observed 1.200x predicted 1.200" in capsys.readouterr().out
    assert {result["id"] for result in json.loads(out.read_text())["results"]} == set(observed_gain.BASELINES.values())
    assert observed_gain.main([str(policy), str(tmp_path)]) == 1
