"""Scenarios, sweeps and capacity."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from aspire.errors import InputError, UsageError
from aspire_simulator.acceptance import Iid, Markov
from aspire_simulator.capacity import find_capacity
from aspire_simulator.parallel import Processes, workers
from aspire_simulator.scenario import Scenario
from aspire_simulator.sweep import Sweep, cell_key, run_sweep
from tests.simulator.helpers import real_data

BASE: dict[str, Any] = {
    "cost_model": "analytic:h200:smollm2-135m",
    "num_prompts": 12,
    "input_len": "uniform:500:900",
    "output_len": 24,
    "max_num_seqs": 8,
}


def test_round_trip_and_unknown_names() -> None:
    scenario = Scenario.from_dict({**BASE, "request_rate": "inf", "policy": "fixed:g=3"})
    assert Scenario.from_dict(json.loads(json.dumps(scenario.to_dict()))) == scenario
    with pytest.raises(UsageError, match="did you mean 'num_prompts'"):
        Scenario.from_dict({**BASE, "num_promts": 3})
    with pytest.raises(UsageError):
        scenario.with_(polcy="aspire")


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "fixed:g=3+window"},
        {"acceptance": "iid:0.2", "policy": "fixed:g=3"},
        {"num_prompts": 5},
        {"input_len": 100},
        {"output_len": 9},
        {"request_rate": 3.0},
        {"request_rate": 3.0, "burstiness": 0.3},
        {"length_scale": 0.5},
        {"limit": 4},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 64},
        {"num_pages": 200},
        {"max_concurrency": 3},
        {"noise": 0.1},
        {"max_model_len": 700},
        {"seed": 5},
        {"cost_model": "analytic:OTHER:smollm2-135m"},
        {"goodput": "ttft:1"},
        {"policy": "fixed:g=3", "num_speculative_tokens": 1},
        {"policy": "fixed:g=3", "selector": "refresh"},
    ],
    ids=lambda change: ",".join(change),
)
def test_every_option_changes_something(change: dict[str, Any]) -> None:
    if "cost_model" in change:
        from aspire_calibration import HARDWARE

        other = next(name for name in HARDWARE if name != "h200")
        change = {"cost_model": f"analytic:{other}:smollm2-135m"}
    # with two changes, the second is the one under test
    shared = dict(list(change.items())[:-1])
    base = Scenario.from_dict({**BASE, **shared})
    assert base.run().summary != base.with_(**change).run().summary


def test_budget_changes_what_drafts_read() -> None:
    long = Scenario.from_dict({**BASE, "input_len": 9000, "policy": "fixed:g=3"})
    read = [long.with_(budget_ratio=ratio).run().summary["sparse_kv_tokens"] for ratio in (0.06, 0.2)]
    assert read[1] > 2 * read[0]


def test_acceptance_by_selector() -> None:
    table = {"window": "iid:0.3", "verify@0.1": "iid:0.9", "verify": "markov:0.9,0.5", "*": "iid:0.5"}
    scenario = Scenario.from_dict({**BASE, "acceptance": table, "policy": "fixed:g=3+window"})
    found = [
        scenario.load_acceptance(one.load_policy())
        for one in (scenario, scenario.with_(selector="verify"), scenario.with_(selector="verify", budget_ratio=0.1))
    ]
    assert found == [Iid(0.3), Markov(0.9, 0.5), Iid(0.9)]
    del table["*"]
    with pytest.raises(UsageError, match="no acceptance is known"):
        scenario.with_(selector="refresh", acceptance=table).run()


def test_trace_scenario() -> None:
    path = real_data("azure_code_2023.csv")
    summary = Scenario.from_dict({**BASE, "dataset_path": str(path), "limit": 60}).run().summary
    assert summary["completed"] == 60 and summary["duration"] > 5


def test_sweep_resumes_and_reports_failures(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    grid = {"policy": ["autoregressive", "fixed:g=3"], "num_pages": [None, 2]}
    path.write_text(json.dumps({"base": BASE, "grid": grid}))
    sweep = Sweep.load(path)
    assert len(sweep.cells()) == 4 and len({cell_key(cell) for cell in sweep.cells()}) == 4
    seen: list[int] = []
    results = run_sweep(sweep, tmp_path / "out", progress=lambda done, total: seen.append(done))
    assert seen == [1, 2, 3, 4]
    assert [result["summary"]["rejected"] for result in results] == [0, 12, 0, 12]
    with pytest.raises(UsageError, match="--resume"):
        run_sweep(sweep, tmp_path / "out")
    next((tmp_path / "out" / "cells").glob("*.json")).unlink()
    seen.clear()
    assert run_sweep(sweep, tmp_path / "out", resume=True, progress=lambda d, t: seen.append(d)) == results
    assert seen == [4]
    rows = list(csv.DictReader((tmp_path / "out" / "sweep.csv").open()))
    assert len(rows) == 4 and rows[0]["policy"] == "autoregressive" and float(rows[0]["decode_only_throughput"]) > 0


def test_sweep_in_processes_gives_the_same(tmp_path: Path) -> None:
    sweep = Sweep(BASE, {"policy": ["autoregressive", "fixed:g=3"], "seed": [1, 2]})
    assert run_sweep(sweep, tmp_path / "two", num_workers=2) == run_sweep(sweep, tmp_path / "one")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("{", InputError),
        ('{"base": {}}', InputError),
        ('{"grid": {"policy": []}}', InputError),
        ('{"grid": {"policee": ["aspire"]}, "base": {"cost_model": "x"}}', UsageError),
        ('{"grid": {"policy": ["aspire"]}, "base": {"policy": "fsm"}}', UsageError),
        ('{"grid": {"policy": ["aspire"]}, "bse": {}}', UsageError),
    ],
)
def test_bad_sweeps(tmp_path: Path, data: str, error: type[Exception]) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(data)
    with pytest.raises(error):
        Sweep.load(path)


def test_yaml_sweep(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "sweep.yaml"
    path.write_text("base: {cost_model: 'analytic:h200:smollm2-135m'}\ngrid:\n  policy: [autoregressive, aspire]\n")
    assert [cell.policy for cell in Sweep.load(path).cells()] == ["autoregressive", "aspire"]
    path.write_text("base: {a: [\n")
    with pytest.raises(InputError, match="YAML"):
        Sweep.load(path)


def test_capacity_brackets_the_rate() -> None:
    scenario = Scenario.from_dict({**BASE, "num_prompts": 60, "output_len": 60, "goodput": "ttft:40 tpot:3"})
    found = find_capacity(scenario, start_rate=100.0, tolerance=0.1)
    assert found.request_rate > 0 and found.bound / found.request_rate <= 1.1
    shares = {probe.request_rate: probe.met for probe in found.probes}
    assert shares[found.request_rate] and not shares[found.bound]
    json.dumps(found.to_dict())


def test_capacity_without_a_bound_or_without_hope() -> None:
    scenario = Scenario.from_dict({**BASE, "num_prompts": 20, "goodput": "ttft:1e9"})
    assert "at once" in find_capacity(scenario, start_rate=50.0).note
    hopeless = find_capacity(scenario.with_(goodput="tpot:1e-6"), start_rate=50.0)
    assert hopeless.request_rate == 0.0 and "alone" in hopeless.note
    with pytest.raises(UsageError, match="--goodput"):
        find_capacity(scenario.with_(goodput=""))


def test_workers_are_checked() -> None:
    assert workers(1).size == 1
    with pytest.raises(UsageError):
        Processes(0)
