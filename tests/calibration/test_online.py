"""Online corrections: they follow drift, stay bounded, forget, survive a restart; validation of runs; the figure."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.errors import InputError, UsageError
from aspire.scheduler.features import StepFeatures
from aspire_calibration import LoadedCostModel, OnlineCostModel, analytic_model, validate_steps
from aspire_calibration.figures import calibration_figure, predicted_against_measured
from aspire_calibration.online import shares_of
from tests.calibration.machine import measured_samples

BASE = LoadedCostModel(analytic_model("h200", "smollm2-135m"))
AR = StepFeatures.of(rows=32, query_tokens=32, verify_rows=32, full_kv_tokens=32 * 4000)
DRAFT = StepFeatures.of(rows=32, query_tokens=32, draft_rows=32, sparse_kv_tokens=32 * 512)
VERIFY = StepFeatures.of(rows=32, query_tokens=32 * 6, verify_rows=32, full_kv_tokens=32 * 4000)


def run(online, factors, count, noise=0.02, seed=0):
    generator = np.random.default_rng(seed)
    for _ in range(count):
        for features, factor in zip((AR, DRAFT, VERIFY), factors, strict=True):
            online.observe(features, float(BASE.predict(features)) * factor * np.exp(generator.normal(0, noise)))


def test_it_learns_each_kind_by_itself():
    online = OnlineCostModel(BASE)
    assert online.predict(AR) == BASE.predict(AR)
    run(online, (1.1, 0.9, 1.0), 150)
    for features, factor in ((AR, 1.1), (DRAFT, 0.9), (VERIFY, 1.0)):
        assert float(online.predict(features) / BASE.predict(features)) == pytest.approx(factor, rel=0.02)
    price = float(online.marginal(AR, DRAFT) / BASE.marginal(AR, DRAFT))
    assert price == pytest.approx(0.9, rel=0.02)


def test_it_forgets():
    online = OnlineCostModel(BASE, memory_steps=100)
    run(online, (1.2, 1.2, 1.2), 200)
    run(online, (0.9, 0.9, 0.9), 200)
    assert float(online.predict(AR) / BASE.predict(AR)) == pytest.approx(0.9, rel=0.02)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60), st.integers(0, 2))
def test_corrections_are_bounded_whatever_is_observed(seconds, kind):
    online = OnlineCostModel(BASE, bound=0.3)
    for value in seconds:
        online.observe((AR, DRAFT, VERIFY)[kind], value)
        assert all(np.exp(-0.3) - 1e-9 <= factor <= np.exp(0.3) + 1e-9 for factor in online.corrections().values())
    assert np.all(np.isfinite(online.covariance)) and np.all(np.diag(online.covariance) >= 0)


def test_one_stall_moves_little():
    online = OnlineCostModel(BASE)
    run(online, (1.0, 1.0, 1.0), 100)
    online.observe(AR, float(BASE.predict(AR)) * 50)
    assert float(online.predict(AR) / BASE.predict(AR)) == pytest.approx(1.0, abs=0.02) and online.clipped == 1


def test_a_kind_not_seen_for_long_is_neither_lost_nor_wild():
    online = OnlineCostModel(BASE, memory_steps=50)
    run(online, (1.1, 1.1, 1.1), 50)
    for _ in range(2000):
        online.observe(AR, float(BASE.predict(AR)) * 1.1)
    assert float(online.predict(DRAFT) / BASE.predict(DRAFT)) == pytest.approx(1.1, rel=0.03)
    assert np.diag(online.covariance).max() <= 1.0


def test_state_survives_json():
    online, again = OnlineCostModel(BASE), OnlineCostModel(BASE)
    run(online, (1.1, 0.9, 1.0), 20)
    again.restore(json.loads(json.dumps(online.state())))
    assert again.predict(VERIFY) == online.predict(VERIFY) and again.steps == online.steps
    with pytest.raises(InputError, match="corrections, not 4"):
        again.restore({**online.state(), "theta": [0.0]})
    with pytest.raises(UsageError, match="no key 'tetha'"):
        again.restore({"tetha": []})


def test_many_steps_at_once_equal_one_by_one():
    one, many = OnlineCostModel(BASE), OnlineCostModel(BASE)
    rows = np.arange(1.0, 9.0)
    steps = StepFeatures.of(rows=rows, query_tokens=rows, verify_rows=rows, full_kv_tokens=rows * 4000)
    observed = BASE.predict(steps) * np.linspace(1.0, 1.2, 8)
    many.observe(steps, observed)
    for index in range(8):
        one.observe(StepFeatures.from_matrix(steps.matrix()[index]), observed[index])
    assert many.theta == pytest.approx(one.theta)


def test_shares_and_bad_times():
    mixed = StepFeatures.of(
        rows=4, query_tokens=4 + 100, draft_rows=1, verify_rows=2, prefill_tokens=100, prefill_pairs=1e4
    )
    assert shares_of(mixed).sum() == pytest.approx(1.0) and shares_of(StepFeatures.zeros()).sum() == 0.0
    assert shares_of(AR) == pytest.approx([1, 0, 0, 0]) and shares_of(VERIFY) == pytest.approx([0, 0, 1, 0])
    with pytest.raises(InputError, match="positive and finite"):
        OnlineCostModel(BASE).observe(AR, 0.0)
    with pytest.raises(UsageError, match="memory_steps > 1"):
        OnlineCostModel(BASE, memory_steps=1)


def test_validation_of_a_run():
    steps = StepFeatures.from_matrix(np.stack([AR.matrix(), DRAFT.matrix(), VERIFY.matrix()]))
    predicted = BASE.predict(steps)
    result = validate_steps(BASE, steps, predicted / np.array([1.1, 1.0, 0.8]))
    assert result.regimes["ar"].bias == pytest.approx(0.1) and result.regimes["verify"].mape == pytest.approx(0.2)
    expected = predicted.sum() / (predicted / np.array([1.1, 1.0, 0.8])).sum() - 1
    assert result.signed_run_error == pytest.approx(expected) and result.run_error == abs(result.signed_run_error)
    assert sum(result.time_share.values()) == pytest.approx(1.0)
    assert "3 steps: predicted" in result.text() and json.dumps(result.to_json())


def test_validation_adds_what_steps_from_idle_take_longer():
    steps = StepFeatures.from_matrix(np.stack([AR.matrix()] * 3))
    model = LoadedCostModel(replace(BASE.file, start_latency=((0.01, 1e-3), (0.1, 3e-3))))
    observed = BASE.predict(steps) + np.array([3e-3, 0.0, 1e-3])
    rest_s = np.array([np.inf, np.nan, 0.002])
    assert validate_steps(model, steps, observed, rest_s).regimes["all"].max == pytest.approx(0.0, abs=1e-12)
    assert validate_steps(model, steps, observed).signed_run_error < 0
    model = LoadedCostModel(replace(model.file, start_latency_per_request_s=1e-4))
    entering = np.array([5, 7, 0])
    found = validate_steps(model, steps, observed + np.array([4e-4, 0.0, 0.0]), rest_s, entering)
    assert found.regimes["all"].max == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("observed", "message"),
    [([], "at least one step"), ([1.0], "do not match"), ([1.0, -1.0, 1.0], "step 1 has the step time -1.0")],
)
def test_validation_refuses_bad_times(observed, message):
    steps = StepFeatures.from_matrix(np.stack([AR.matrix()] * 3))
    with pytest.raises(InputError, match=message):
        validate_steps(BASE, steps, np.array(observed))


@pytest.mark.parametrize("name", ["figure.png", "figure.svg"])
def test_figures_are_drawn(tmp_path, name):
    samples = measured_samples(most=60)
    path = calibration_figure(tmp_path / name, BASE, samples, title="made-up GPU")
    assert path.stat().st_size > 5000
    steps = StepFeatures.from_matrix(samples.matrix()[0])
    assert predicted_against_measured(tmp_path / f"all-{name}", BASE, steps, samples.matrix()[1]).exists()
