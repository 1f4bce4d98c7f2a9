"""Plan -> profile -> calibrate -> load -> predict, on the made-up machine."""

from __future__ import annotations

import numpy as np
import pytest

from aspire.errors import MismatchError
from aspire.scheduler.features import StepFeatures
from aspire_calibration import CostModelFile, LoadedCostModel, calibrate, profile_plan, read_samples, run_profile
from tests.calibration.machine import HEADER, LIMITS, timer


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    target = tmp_path_factory.mktemp("profile") / "samples.jsonl"
    run_profile(timer(), profile_plan(LIMITS), target, HEADER)
    return target


@pytest.fixture(scope="module")
def model(path) -> CostModelFile:
    return calibrate(read_samples(path))


def test_held_out_error_is_within_the_goal_in_every_regime(model):
    for regime in ("ar", "draft", "verify", "mixed"):
        row = model.accuracy[regime]
        assert row["mape"] <= 0.03 and row["p90"] <= 0.07 and abs(row["bias"]) <= 0.02, (regime, row)


def test_file_round_trip_predicts_the_same(model, tmp_path):
    loaded = CostModelFile.load(model.save(tmp_path / "cost_model.json"))
    step = StepFeatures.of(rows=10.0, query_tokens=40.0, verify_rows=10.0, full_kv_tokens=np.array([1e4, 2e4]))
    assert np.array_equal(LoadedCostModel(loaded).predict(step), LoadedCostModel(model).predict(step))
    assert loaded.accuracy == model.accuracy and loaded.graph_buckets == HEADER.graph_buckets


def test_marginal_is_the_difference_of_predictions_with_padding_from_the_buckets(model):
    loaded = LoadedCostModel(model)
    base = StepFeatures.of(rows=60, query_tokens=60, padded_tokens=64, verify_rows=60, full_kv_tokens=60 * 4000)
    more = StepFeatures.of(rows=5, query_tokens=5, verify_rows=5, full_kv_tokens=5 * 4000)
    after = StepFeatures.of(rows=65, query_tokens=65, padded_tokens=72, verify_rows=65, full_kv_tokens=65 * 4000)
    assert loaded.marginal(base, more) == pytest.approx(loaded.predict(after) - loaded.predict(base))


def test_another_setup_is_refused_with_the_difference(model):
    with pytest.raises(MismatchError, match="'made-up GPU' is not 'H100'.*--allow-mismatch"):
        model.check_matches({"name": "H100"}, HEADER.model)
    assert model.check_matches({"name": "H100"}, allow_mismatch=True)
    assert not model.check_matches(HEADER.hardware, HEADER.model, HEADER.settings, graph_buckets=HEADER.graph_buckets)
