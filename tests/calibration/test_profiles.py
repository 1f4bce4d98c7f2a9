"""The committed profiles: samples and cost model belong together, and the stated error can be computed again."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from aspire.scheduler.features import StepFeatures
from aspire_calibration import by_regime, load_cost_model, read_samples

PROFILES = Path(__file__).parents[2] / "calibration" / "profiles"
NAMES = sorted(path.name.removesuffix(".samples.jsonl") for path in PROFILES.glob("*.samples.jsonl"))


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_states_the_error_that_it_has(name):
    samples = read_samples(PROFILES / f"{name}.samples.jsonl")
    model = load_cost_model(PROFILES / f"{name}.json", strict_range=True)
    assert model.file.data["hash"] == samples.data_hash() and model.file.kind == "measured"
    model.check_matches(samples.header.hardware, samples.header.model, samples.header.settings)
    steady = samples.steady()
    assert len(samples.measured) - len(steady.measured) == model.file.data["unsteady"]
    matrix, seconds = steady.matrix()
    held = steady.heldout()
    steps = StepFeatures.from_matrix(matrix[held])
    reports = by_regime(steps, model.predict(steps), seconds[held])
    assert {regime: report.to_json() for regime, report in reports.items()} == {
        regime: pytest.approx(row) for regime, row in model.file.accuracy.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_model_tells_how_many_cells_a_price_takes(name):
    model = load_cost_model(PROFILES / f"{name}.json")
    cells = len(read_samples(PROFILES / f"{name}.samples.jsonl").measured)
    assert 0 < model.cells_per_price <= cells if model.file.form == "kriging" else model.cells_per_price == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_names_no_place_of_the_machine_that_made_it(name):
    with (PROFILES / f"{name}.samples.jsonl").open() as lines:
        command = json.loads(next(lines))["command"]
    assert command.startswith("aspire profile ") and " /" not in command


def test_the_evidence_of_the_profiles_of_a_gpu_is_one_command(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PROFILES.parent))
    make_evidence = importlib.import_module("make_evidence")
    mine = [name for name in NAMES if name.startswith("h200-")]
    pairs = [part for name in mine for part in ("--profile", f"{name}.samples.jsonl", f"{name}.json")]
    monkeypatch.chdir(PROFILES)
    make_evidence.main([str(tmp_path / "calibration.json"), *pairs])
    evidence = json.loads((tmp_path / "calibration.json").read_text())
    found = {result["id"]: result for result in evidence["results"]}
    assert {"calib.mape_ar", "calib.p90_prefill", "calib.quick_profile_mape", "calib.noise_graph"} <= set(found)
    assert set(found["calib.mape_ar"]["detail"]["by_profile"]) == set(mine)
    assert "calib.run_error_max" not in found
    assert evidence["meta"]["hardware"] == "NVIDIA H200"
