"""Calibration: the form that is kept, the report, refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aspire.errors import InputError
from aspire.scheduler.features import StepFeatures
from aspire_calibration import LoadedCostModel, PlanLimits, Sample, Samples, calibrate, error_report, profile_plan
from aspire_calibration.fit import FormScore, choose, extreme_masks, heldout_mask
from aspire_calibration.forms import FORMS
from aspire_calibration.plan import IDLE_RESTS_S
from aspire_calibration.variables import INDEX
from tests.calibration.machine import AHEAD, BUCKETS, HEADER, measured_samples, true_seconds

SAMPLES = measured_samples()
FILE = calibrate(SAMPLES)


def test_the_goals_are_met_on_a_machine_with_knees_stairs_and_noise():
    for regime in ("ar", "draft", "verify", "mixed"):
        row = FILE.accuracy[regime]
        assert row["mape"] <= 0.03 and row["p90"] <= 0.07 and abs(row["bias"]) <= 0.02, (regime, row)


def test_it_knows_steps_that_no_cell_resembles():
    """Uneven contexts, verification of mixed widths, beside the truth (without noise)."""
    generator, rows = np.random.default_rng(3), 300
    drafting, verifying = generator.integers(0, 60, rows), generator.integers(1, 60, rows)
    width, context = generator.uniform(1, 12, rows), generator.uniform(500, 9000, rows)
    tokens = drafting + np.round(verifying * width)
    padded = np.array([min(bucket for bucket in BUCKETS if bucket >= count) for count in tokens])
    steps = StepFeatures.of(
        rows=drafting + verifying,
        query_tokens=tokens,
        padded_tokens=padded,
        draft_rows=drafting,
        verify_rows=verifying,
        sparse_kv_tokens=drafting * 600,
        full_kv_tokens=verifying * context,
    )
    report = error_report(LoadedCostModel(FILE).predict(steps), true_seconds(steps))
    assert report.mape <= 0.03 and report.p90 <= 0.07


def test_all_forms_are_compared_and_the_kept_one_is_selectable():
    rows = {row["form"]: row for row in FILE.comparison}
    assert set(rows) == set(FORMS)
    kept = rows[FILE.form]
    assert kept["selectable"] and kept["cv_mape"] < 0.5 * rows["paper"]["cv_mape"] < rows["paper-ols"]["cv_mape"]
    assert kept["extreme_mape"] < rows["paper"]["extreme_mape"]
    assert not rows["paper-ols"]["selectable"]


def test_the_report_can_be_checked_from_file_and_samples():
    matrix, seconds = SAMPLES.matrix()
    held = SAMPLES.heldout()
    predicted = LoadedCostModel(FILE).predict(StepFeatures.from_matrix(matrix[held]))
    assert error_report(predicted, seconds[held]).to_json() == pytest.approx(FILE.accuracy["all"])


def test_the_same_samples_and_seed_give_the_same_file():
    small = measured_samples(most=120)
    assert calibrate(small, bootstrap=3).to_json() == calibrate(small, bootstrap=3).to_json()


@pytest.mark.parametrize("cells", [60, 120])
def test_a_short_profile_is_coarse_but_usable(cells):
    quick = calibrate(measured_samples(most=cells), bootstrap=0)
    matrix, seconds = SAMPLES.matrix()
    keep = matrix[:, INDEX["prefill_tokens"]] == 0
    predicted = LoadedCostModel(quick).predict(StepFeatures.from_matrix(matrix[keep]))
    assert error_report(predicted, seconds[keep]).mape <= (0.08 if cells == 60 else 0.05)


def test_intervals_hold_the_planted_price():
    """A machine of two terms: the interval of the KV price covers it."""
    limits = PlanLimits(64, 8192, 40_000, 2048, d_max=8)
    generator = np.random.default_rng(0)
    samples = {}
    for cell in profile_plan(limits, with_prefill=False):
        features = cell.features()
        seconds = 1e-3 + 6e-9 * float(features.full_kv_tokens + features.sparse_kv_tokens)
        repeats = tuple(seconds * np.exp(generator.normal(0, 0.02, 5)))
        samples[cell.key] = Sample(cell, features, repeats)
    file = calibrate(Samples(HEADER, samples), forms=["paper"])
    interval = file.intervals["step.kv_tokens"]
    assert interval["p5"] <= 6e-9 * 1.002 and interval["p95"] >= 6e-9 * 0.998
    assert interval["p95"] - interval["p5"] < 0.1 * 6e-9
    assert 0 < file.intervals["prediction"]["relative_width_p90"] < 0.05


def test_what_steps_from_idle_take_longer_is_measured_and_changes_no_price():
    started = measured_samples(limits=AHEAD, start_s=1.3e-3, most=200)
    plain = Samples(HEADER, {sample.cell.key: sample for sample in started.measured})
    files = [calibrate(samples, forms=["kriging"], bootstrap=0) for samples in (started, plain)]
    rests, latencies = zip(*files[0].start_latency, strict=True)
    assert rests == tuple(sorted(IDLE_RESTS_S)) and latencies == pytest.approx([1.3e-3] * 3, rel=0.05)
    assert files[0].start_latency_per_request_s < 0.02 * 1.3e-3
    assert files[1].start_latency == () and files[1].start_latency_per_request_s == 0.0
    assert files[0].fitted.to_json() == files[1].fitted.to_json() and files[0].accuracy == files[1].accuracy
    assert files[0].ranges == files[1].ranges
    assert files[0].data["idle_cells"] == 12 and files[0].data["cells"] == 188 and files[0].data["skipped"] == 0
    quicker = calibrate(measured_samples(limits=AHEAD, start_s=-1e-4, most=100), forms=["kriging"], bootstrap=0)
    assert {seconds for _, seconds in quicker.start_latency} == {0.0} and len(quicker.start_latency) == 3, (
        "never less than a step that follows another"
    )


def test_cells_whose_repeats_disagree_are_left_out_and_counted():
    samples = measured_samples(most=150)
    wild = {key: dataclasses.replace(each, repeats_s=(1e-3, 2e-3, 9e-3)) for key, each in samples.by_key.items()}
    keys = [key for key, each in samples.by_key.items() if not each.cell.heldout][:2]
    keys += [key for key, each in samples.by_key.items() if each.cell.heldout][:1]
    mixed_up = Samples(HEADER, {**samples.by_key, **{key: wild[key] for key in keys}})
    without = Samples(HEADER, {key: each for key, each in samples.by_key.items() if key not in keys})
    file, clean = (calibrate(given, forms=["kriging"], bootstrap=0) for given in (mixed_up, without))
    assert file.fitted.to_json() == clean.fitted.to_json() and file.accuracy == clean.accuracy
    assert (file.data["unsteady"], file.data["cells"]) == (3, 147) and clean.data["unsteady"] == 0
    assert any("varied by more than 10%: 3" in limit for limit in file.limits)
    assert not any("left out" in limit for limit in clean.limits)
    noisy = Samples(HEADER, wild)
    assert noisy.steady().by_key == noisy.by_key, "on a machine that is noisy as a whole all of them count"


def test_where_steps_are_planned_ahead_a_profile_without_idle_starts_says_so():
    ahead = dataclasses.replace(HEADER, settings={**HEADER.settings, "async_scheduling": True})
    with_starts = measured_samples(limits=AHEAD, most=100)
    said = [
        any("timed from idle" in limit for limit in calibrate(samples, forms=["linear"], bootstrap=0).limits)
        for samples in (
            Samples(ahead, with_starts.by_key),
            Samples(ahead, measured_samples(most=100).by_key),
            measured_samples(most=100),
        )
    ]
    assert said == [False, True, False]


def test_too_few_cells():
    with pytest.raises(InputError, match="11 measured cells are too few.*at least 12"):
        calibrate(measured_samples(most=11))


def test_known_limits_speak_of_what_was_not_seen():
    def only(regimes):
        plain = {key: sample for key, sample in SAMPLES.by_key.items() if not sample.features.select_rows}
        chosen = {key: sample for key, sample in plain.items() if sample.cell.regime in regimes}
        return calibrate(Samples(HEADER, chosen), forms=["linear"], bootstrap=0)

    text = " ".join(only(("ar", "draft")).limits)
    assert "no held-out step of regime 'verify'" in text and "selection is priced at zero" in text
    noisy = " ".join(calibrate(measured_samples(noise=0.2, most=100), forms=["linear"], bootstrap=0).limits)
    assert "noisy machine" in noisy


def test_held_out_cells_are_the_planned_ones_or_a_fifth():
    generator = np.random.default_rng(0)
    planned = np.arange(50) % 6 == 0
    assert np.array_equal(heldout_mask(planned, generator), planned)
    assert heldout_mask(np.zeros(50, dtype=bool), generator).sum() == 10


def test_extremes_are_the_largest_steps_of_an_axis():
    matrix, _ = SAMPLES.matrix()
    masks = extreme_masks(matrix.T)
    assert len(masks) >= 3
    kv = matrix[:, INDEX["full_kv_tokens"]]
    assert kv[masks[0]].min() >= kv[~masks[0]].max()


def test_simpler_forms_win_ties():
    report = error_report(np.ones(2), np.ones(2))
    scores = [
        FormScore(name, "", report, None, {}, selectable, score)
        for name, selectable, score in (("a-ols", False, 0.01), ("b", True, 0.051), ("c", True, 0.05), ("d", True, 0.2))
    ]
    assert choose(scores).form == "b" and choose(scores[:1]).form == "a-ols" and choose(scores[2:]).form == "c"
