"""cost_model.json and the loaded model: validation, prices, ranges, matches."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.errors import InputError, MismatchError, UsageError
from aspire.scheduler.features import FEATURES, StepFeatures, start_latency_of
from aspire_calibration import CostModelFile, LoadedCostModel, OnlineCostModel, calibrate, load_cost_model
from aspire_calibration.cells import bucket_array, padded_tokens
from tests.calibration.machine import BUCKETS, HEADER, measured_samples

FILE = calibrate(measured_samples(most=200), forms=["roofline"], bootstrap=4)
MODEL = LoadedCostModel(FILE, warn=lambda message: None)


def step(**values) -> StepFeatures:
    features = StepFeatures.of(**values)
    padded = padded_tokens(features.query_tokens, bucket_array(BUCKETS))
    return StepFeatures.of(**{**{name: getattr(features, name) for name in FEATURES}, "padded_tokens": padded})


counts = st.integers(0, 40)


@given(counts, counts, counts, counts, st.integers(1, 17), st.integers(17, 30_000))
def test_marginal_is_the_difference_of_predictions(drafting, verifying, more_draft, more_verify, width, context):
    def of(draft, verify):
        return step(
            rows=draft + verify,
            query_tokens=draft + verify * width,
            draft_rows=draft,
            verify_rows=verify,
            sparse_kv_tokens=draft * 500,
            full_kv_tokens=verify * context,
        )

    base, added = of(drafting, verifying), of(more_draft, more_verify)
    expected = MODEL.predict(of(drafting + more_draft, verifying + more_verify)) - MODEL.predict(base)
    assert float(MODEL.marginal(base, added)) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("base", "added", "shape"),
    [((), (5,), (5,)), ((5,), (), (5,)), ((4, 1), (3,), (4, 3)), ((), (), ()), ((2, 3), (2, 3), (2, 3))],
)
def test_shapes_broadcast(base, added, shape):
    first = step(rows=np.full(base, 4.0), query_tokens=np.full(base, 4.0), verify_rows=np.full(base, 4.0))
    second = step(rows=np.full(added, 2.0), query_tokens=np.full(added, 9.0), verify_rows=np.full(added, 2.0))
    price = MODEL.marginal(first, second)
    assert price.shape == shape and MODEL.predict(first).shape == base
    scalar = MODEL.marginal(step(rows=4, query_tokens=4, verify_rows=4), step(rows=2, query_tokens=9, verify_rows=2))
    assert price == pytest.approx(np.full(shape, float(scalar)))


def test_the_staircase_is_paid_by_the_work_that_climbs_it():
    inside, over = (step(rows=64, query_tokens=n, verify_rows=64, full_kv_tokens=6400) for n in (500, 512))
    one = step(rows=1, query_tokens=1, verify_rows=1, full_kv_tokens=100)
    assert float(inside.padded_tokens) == 512 == float(over.padded_tokens)
    assert MODEL.marginal(over, one) > MODEL.marginal(inside, one) * 1.5


def test_prices_are_cheap_to_ask_for():
    """Loose bounds: what matters is that nobody makes this a hundred times slower."""
    import timeit

    base = step(rows=64, query_tokens=100, draft_rows=30, verify_rows=34, sparse_kv_tokens=15e3, full_kv_tokens=14e4)
    k = np.arange(1.0, 257.0)
    many = step(rows=k, query_tokens=9 * k, verify_rows=k, full_kv_tokens=k * 400)
    for added, bound_s in ((step(rows=1, query_tokens=1, verify_rows=1), 300e-6), (many, 1000e-6)):
        best = min(timeit.repeat(lambda added=added: MODEL.marginal(base, added), number=50, repeat=5)) / 50
        assert best < bound_s


def test_extrapolation_warns_once_per_axis_and_is_counted():
    heard: list[str] = []
    model = LoadedCostModel(FILE, warn=heard.append)
    far = step(rows=np.full(3, 1000.0), query_tokens=np.full(3, 1000.0), verify_rows=np.full(3, 1000.0))
    model.predict(far)
    model.predict(far)
    assert sorted(message.split(" = ")[0] for message in heard) == ["cost model: rows", "cost model: verify_rows"]
    assert "1000 is outside the fitted range 1..128" in heard[0]
    assert model.extrapolated == {"rows": 6, "verify_rows": 6} and model.predicted_steps == 6
    assert "extrapolated: rows in 6 of 6" in model.summary_text()
    with pytest.raises(InputError, match="strict-range"):
        LoadedCostModel(FILE, strict_range=True).predict(far)


def test_file_is_readable_json_with_units(tmp_path):
    data = json.loads(FILE.save(tmp_path / "m.json").read_text())
    assert (
        data["kind"] == "measured" and data["schema"] == "aspire-cost-model" and data["num_pages"] == HEADER.num_pages
    )
    terms = data["fitted"]["branches"][0]["terms"]
    assert {"variable", "from", "to", "seconds", "unit"} == set(terms[0])
    assert {term["unit"] for term in terms if term["variable"] == "full_kv_tokens"} == {"s/token"}
    assert data["features"]["full_kv_tokens"] == {
        "unit": "token",
        "is": "context of verifying and prefill rows, summed",
    }
    assert data["ranges"]["rows"] == [1, 128] and data["data"]["cells"] == 200 and len(data["data"]["hash"]) == 16
    assert data["accuracy"]["all"].keys() == {"n", "mape", "p90", "max", "bias"}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"schema": "x"}, InputError, "is not a cost model"),
        ({"version": 2}, InputError, "has version 2, this release reads 1"),
        ({"hardwear": {}}, UsageError, r"no key 'hardwear' \(did you mean 'hardware'\?\)"),
        ({"kind": "guessed"}, UsageError, "kind of cost model 'guessed' is not known"),
        ({"ranges": {"prefill_qkv": [0, 1]}}, InputError, "that steps do not have: prefill_qkv; make it again"),
        ({"ranges": {"rows": 3}}, InputError, "damaged"),
        ({"fitted": 3}, InputError, "fitted must be an object"),
        (
            {"fitted": {"type": "ramps", "combine": "max", "branches": [{"name": "a", "terms": [{}]}]}},
            UsageError,
            "variable",
        ),
        ({"graph_buckets": ["x"]}, InputError, "damaged"),
        ({"start_latency": [[0.1, -1e-3]]}, InputError, r"finite seconds >= 0, by rest, got \(\(0.1, -0.001\),\)"),
        ({"start_latency": [[0.1, 1e-3], [0.01, 1e-3]]}, InputError, "by rest, got"),
        ({"start_latency": [[0, 1e-3]]}, InputError, "a rest > 0"),
        ({"start_latency": [0.1, "1 ms"]}, InputError, "damaged"),
        ({"start_latency_per_request_s": -1e-5}, InputError, "per_request_s must be finite seconds >= 0, got -1e-05"),
        ({"start_latency_per_request_s": float("inf")}, InputError, "must be finite seconds >= 0, got inf"),
        ({"start_latency_per_request_s": "1 ms"}, InputError, "damaged"),
    ],
)
def test_what_is_not_a_cost_model_is_refused(tmp_path, change, error, message):
    path = FILE.save(tmp_path / "m.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(error, match=message):
        load_cost_model(path)


def test_the_start_latency_is_kept_shown_and_one_figure_or_none_in_older_files(tmp_path):
    file = replace(FILE, start_latency=((0.01, 1.25e-3), (0.1, 2e-3)))
    path = file.save(tmp_path / "m.json")
    loaded = load_cost_model(path)
    rests = np.array([0.0, 0.001, 0.01, 0.01 * 10**0.5, 0.1, 5.0, np.inf])
    for model in (loaded, OnlineCostModel(loaded)):
        expected = [1.25e-3] * 3 + [1.625e-3] + [2e-3] * 3
        np.testing.assert_allclose(start_latency_of(model, rests, 1), expected, rtol=1e-9)
        assert float(start_latency_of(model, np.inf, 1)) == 2e-3
    assert "the rest before it: 1.25 ms after 10 ms, 2.00 ms after 100 ms" in loaded.summary_text()
    older = {k: v for k, v in json.loads(path.read_text()).items() if k != "start_latency"}
    path.write_text(json.dumps({**older, "start_latency_s": 1.5e-3}))
    assert start_latency_of(load_cost_model(path), rests, 1).tolist() == [1.5e-3] * 7
    path.write_text(json.dumps(older))
    assert not start_latency_of(load_cost_model(path), rests, 1).any()
    assert "from idle" not in load_cost_model(path).summary_text()


def test_the_start_latency_grows_with_the_requests_that_begin_and_not_by_an_older_file(tmp_path):
    file = replace(FILE, start_latency=((0.01, 1.25e-3), (0.1, 2e-3)), start_latency_per_request_s=5e-5)
    path = file.save(tmp_path / "m.json")
    loaded = load_cost_model(path)
    entering = np.array([0, 1, 2, 17])
    for model in (loaded, OnlineCostModel(loaded)):
        expected = [2e-3, 2e-3, 2.05e-3, 2.8e-3]
        np.testing.assert_allclose(start_latency_of(model, np.inf, entering), expected, rtol=1e-9)
        every = start_latency_of(model, np.array([[0.01], [0.1]]), entering)
        np.testing.assert_allclose(every, np.array([[1.25e-3], [2e-3]]) - 2e-3 + expected, rtol=1e-9)
        assert float(start_latency_of(model, 0.01, 3)) == pytest.approx(1.35e-3)
    line = next(line for line in loaded.summary_text().splitlines() if "from idle" in line)
    assert line.endswith("2.00 ms after 100 ms; 0.050 ms more for each further request that begins in it")
    older = {k: v for k, v in json.loads(path.read_text()).items() if k != "start_latency_per_request_s"}
    path.write_text(json.dumps(older))
    assert start_latency_of(load_cost_model(path), np.inf, entering).tolist() == [2e-3] * 4
    assert "further request" not in load_cost_model(path).summary_text()
    assert start_latency_of(LoadedCostModel(FILE), np.ones((2, 1)), entering).shape == (2, 4)


def test_missing_parts_and_files(tmp_path):
    path = tmp_path / "m.json"
    path.write_text('{"schema": "aspire-cost-model", "version": 1, "kind": "measured"}')
    with pytest.raises(InputError, match="lacks form, fitted, hardware, model, settings, ranges"):
        CostModelFile.load(path)
    path.write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        CostModelFile.load(path)
    with pytest.raises(InputError, match="does not exist"):
        CostModelFile.load(tmp_path / "none.json")


def test_mismatch_spells_out_every_difference():
    hardware, model, settings = {"name": "H100", "driver": "1"}, {**HEADER.model, "layers": 32}, {"selector": "window"}
    with pytest.raises(MismatchError) as caught:
        MODEL.check_matches(hardware, model, settings, graph_buckets=(1, 2), num_pages=10**6)
    text = str(caught.value)
    for part in (
        "hardware.name: 'made-up GPU' is not 'H100'",
        "model.layers: 30 is not 32",
        "settings.selector: 'verify' is not 'window'",
        "graph_buckets: [1, 2, 4, 8",
        "num_pages: calibrated up to 60000, the pool has 1000000",
        "--allow-mismatch",
    ):
        assert part in text
    assert len(MODEL.check_matches(hardware, model, settings, allow_mismatch=True)) == 3
    assert MODEL.check_matches(HEADER.hardware, num_pages=100) == []


def test_summary_names_the_error_and_the_limits():
    text = MODEL.summary_text()
    for part in (
        "measured cost model, form 'roofline', made-up GPU, toy",
        "held-out error",
        "verify",
        "MAPE",
        "known limits",
    ):
        assert part in text


def test_predictions_are_finite_everywhere():
    zero = StepFeatures.zeros((2,))
    assert np.all(MODEL.predict(zero) >= 0) and math.isfinite(
        float(MODEL.marginal(StepFeatures.zeros(), StepFeatures.zeros()))
    )
