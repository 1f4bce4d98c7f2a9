"""Tuning: finds what is better, states gains truthfully, resumes, and runs the same on many workers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aspire.errors import UsageError
from aspire.scheduler import PolicySpec
from aspire_simulator.breakeven import break_even, verdict
from aspire_simulator.candidates import SearchSpace, candidate
from aspire_simulator.scenario import Scenario
from aspire_simulator.tuning import Gain, TuneSettings, tune

SCENARIO = Scenario(
    cost_model="analytic:h200:llama-3.1-8b",
    acceptance="iid:0.9",
    num_prompts=12,
    input_len=8000,
    output_len=40,
    max_num_seqs=12,
)
KINDS = ("autoregressive", "fixed", "aspire")


def settings(**changes: Any) -> TuneSettings:
    base = TuneSettings(SCENARIO, SearchSpace(KINDS), method="grid", trials=8, repeats=2, map_break_even=False)
    return replace(base, **changes)


def test_grid_finds_a_policy_that_pays(tmp_path: Path) -> None:
    result = tune(settings(map_break_even=True, repeats=4))
    assert result.policy.kind != "autoregressive"
    gain = next(gain for gain in result.gains if gain.over == "autoregressive")
    assert 1.0 < gain.low <= gain.mean <= gain.high
    assert result.trials[0]["value"] >= result.trials[-1]["value"]
    path = result.policy.save(tmp_path / "policy.json")
    again = PolicySpec.parse(str(path))
    assert again.kind == result.policy.kind and again.provenance["cost_model"]["kind"] == "analytic"
    assert "pays" in again.provenance["speculation_pays"]["sentence"]
    assert len(again.provenance["cost_model"]["sha256"]) == 64
    json.dumps(result.to_dict())


def test_autoregressive_wins_where_speculation_does_not_pay() -> None:
    hopeless = replace(SCENARIO, acceptance="iid:0.05", input_len=600)
    result = tune(settings(scenario=hopeless))
    assert result.policy.kind == "autoregressive"
    assert result.gains[0].mean == 1.0 and result.break_even is None


@pytest.mark.parametrize("study", ["study.db", "study.log"])
def test_optuna_study_resumes(tmp_path: Path, study: str) -> None:
    pytest.importorskip("optuna")
    path = str(tmp_path / study)
    counts: list[int] = []
    first = settings(method="optuna", trials=5, study=path)
    tune(first, progress=lambda done, total, name, value: counts.append(done))
    assert counts == [1, 2, 3, 4, 5]
    counts.clear()
    result = tune(replace(first, trials=7), progress=lambda done, total, name, value: counts.append(done))
    assert counts == [6, 7] and len(result.trials) <= 7
    with pytest.raises(UsageError, match="another tuning problem"):
        tune(replace(first, scenario=replace(SCENARIO, output_len=41)))


def test_grid_study_resumes(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    first = settings(study=str(path), space=SearchSpace(("autoregressive", "fixed")))
    best = tune(first)
    path.write_text("\n".join(path.read_text().splitlines()[:3]) + "\n")
    counts: list[int] = []
    again = tune(first, progress=lambda done, total, name, value: counts.append(done))
    assert counts == [3, 4, 5] and again.changes == best.changes and again.value == best.value


def test_processes_find_the_same() -> None:
    alone, together = tune(settings()), tune(settings(num_workers=2))
    assert alone.changes == together.changes and alone.value == together.value


@pytest.mark.slow
def test_ray_finds_the_same() -> None:
    pytest.importorskip("ray")
    alone, cluster = tune(settings()), tune(settings(num_workers=2, ray_address="local"))
    assert alone.changes == cluster.changes and alone.value == cluster.value


def test_batch_limits_are_searched() -> None:
    space = SearchSpace(("autoregressive",), max_num_seqs=(2, 12))
    result = tune(settings(space=space, objective="throughput"))
    assert result.changes["max_num_seqs"] == 12 and len(result.trials) == 2


def test_selectors_with_known_acceptance_are_searched() -> None:
    table = {"window": "iid:0.5", "verify": "iid:0.9"}
    result = tune(settings(scenario=replace(SCENARIO, acceptance=table, selector="verify")))
    assert result.policy.selector.kind == "verify"
    assert {t["candidate"]["policy"]["selector"]["kind"] for t in result.trials} == {"window", "verify"}


def test_gain_interval() -> None:
    gain = Gain.of("x", [1.1, 1.2, 1.3], [1.0, 1.0, 1.0])
    assert gain.mean == pytest.approx(1.2) and gain.high - gain.mean == pytest.approx(0.2484, abs=1e-3)
    with pytest.raises(UsageError):
        Gain.of("x", [1.0, 1.0], [0.0, 1.0])


def test_break_even_sees_short_contexts_lose() -> None:
    changes = candidate("fixed", {"g": 5}, PolicySpec("fixed").selector, 16, 16, 8192)
    shown = break_even(SCENARIO, changes, "fixed", batches=(1, 16), contexts=(1024, 32768))
    gains = {(cell["batch"], cell["context"]): cell["gain"] for cell in shown.cells}
    assert gains[16, 32768] > gains[16, 1024] and gains[16, 32768] > 1.2


def test_verdicts() -> None:
    def cells(*gains: float) -> list[dict[str, Any]]:
        places = [(1, 1024), (1, 4096), (8, 1024), (8, 4096)]
        return [{"batch": b, "context": c, "gain": g} for (b, c), g in zip(places, gains, strict=True)]

    assert "nowhere" in verdict("p", cells(0.9, 0.9, 1.0, 1.0))
    assert "all 4 cells" in verdict("p", cells(1.1, 1.2, 1.3, 2.0))
    mixed = verdict("p", cells(0.9, 1.0, 0.9, 1.5))
    assert "batch 1: nowhere" in mixed and "batch 8: from context 4k" in mixed and "1.50x" in mixed
    assert "batch 8: at 1k" in verdict("p", cells(0.9, 1.0, 1.5, 0.9))
    assert "nothing can be said" in verdict("p", [])


@pytest.mark.parametrize(
    "bad", [{"objective": "speed"}, {"method": "random"}, {"repeats": 1}, {"objective": "goodput"}, {"trials": 0}]
)
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        settings(**bad)


def test_bad_space() -> None:
    for bad in ({"kinds": ("aspyre",)}, {"selectors": ("windo",)}, {"kinds": ()}):
        with pytest.raises(UsageError):
            SearchSpace(**bad)
