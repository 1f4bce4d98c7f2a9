"""Evidence rows, and a short profile cut out of a long one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aspire.errors import InputError
from aspire.scheduler.features import StepFeatures
from aspire_calibration import LoadedCostModel, Samples, SamplesHeader, analytic_model, calibrate, validate_steps
from aspire_calibration.reporting import accuracy_rows, comparison_table, quick_profile_row, run_error_row
from tests.calibration.machine import HEADER, measured_samples

SAMPLES = measured_samples()
TIMED = Samples(HEADER, {key: dataclasses.replace(s, took_s=1.0) for key, s in SAMPLES.by_key.items()})
FILES = {
    "toy": calibrate(SAMPLES, bootstrap=0),
    "noisy": calibrate(measured_samples(noise=0.05, most=300), bootstrap=0, forms=["paper", "roofline"]),
}


def test_the_value_is_the_worst_profile_and_the_detail_holds_all():
    rows = {row["id"]: row for row in accuracy_rows(FILES)}
    assert {"calib.mape_ar", "calib.p90_draft", "calib.mape_verify", "calib.p90_mixed", "calib.bias_mixed"} <= set(rows)
    row = rows["calib.mape_draft"]
    errors = {name: file.accuracy["draft"]["mape"] for name, file in FILES.items()}
    assert row["value"] == max(errors.values()) and row["detail"]["by_profile"] == errors
    assert row["detail"]["forms"]["toy"]["kept"] == FILES["toy"].form
    assert {"paper", "paper-ols", "linear-ols"} <= set(row["detail"]["forms"]["toy"]["heldout_mape"])
    assert rows["calib.bias_ar"]["value"] >= 0


def test_models_without_held_out_error_are_refused():
    with pytest.raises(InputError, match="what-if is a cost model of kind analytic, without held-out"):
        accuracy_rows({"what-if": analytic_model("h100", "qwen3-8b")})
    with pytest.raises(InputError, match="no cost models"):
        accuracy_rows({})
    with pytest.raises(InputError, match="no runs"):
        run_error_row({})


def test_a_short_profile_is_cut_by_the_time_cells_took():
    assert len(TIMED.within(100.0).by_key) == 100 and TIMED.within(1e9).by_key == TIMED.by_key
    row = quick_profile_row({"toy": TIMED}, budget_s=60)
    assert row["detail"]["profiles"]["toy"]["cells"] == 60 and row["detail"]["profiles"]["toy"]["took_s"] == 60
    assert FILES["toy"].accuracy["all"]["mape"] < row["value"] <= 0.05


def test_whole_runs():
    model = LoadedCostModel(FILES["toy"])
    rows = np.arange(1.0, 41.0)
    steps = StepFeatures.of(rows=rows, query_tokens=rows, verify_rows=rows, full_kv_tokens=rows * 900)
    observed = model.predict(steps)
    runs = {"a": validate_steps(model, steps, observed), "b": validate_steps(model, steps, observed * 1.05)}
    row = run_error_row(runs)
    assert row["value"] == pytest.approx(1 - 1 / 1.05) and row["n"] == 2 and row["detail"]["b"]["signed_run_error"] < 0


def test_table():
    table = comparison_table(FILES["noisy"])
    assert table[0][:4] == ["form", "kept", "cross-validated", "extremes"] and len(table) == 3
    assert sum(row[1] == "yes" for row in table[1:]) == 1


def test_header_of_this_machine():
    header = SamplesHeader.of_this_machine(
        {"name": "toy"}, {"eager": True}, num_pages=7, graph_buckets=[1, 2], command="x"
    )
    assert header.hardware["name"] and "numpy" in header.versions and header.num_pages == 7 and header.command == "x"
    assert SamplesHeader.from_json(header.to_json()) == header
