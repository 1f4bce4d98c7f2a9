"""From samples to a cost model: compare forms, keep the one that extrapolates best, say how well it does.

Three disjoint questions, three sets of cells: cross-validation on the grid cells chooses the form together with a
test on the extremes (fitted without the largest steps, scored on them); the cells that the plan held out, never seen
by any of this, give the error that is reported; the bootstrap tells how far the coefficients and predictions would
move with other samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import InputError
from aspire.scheduler.features import Floats, StepFeatures
from aspire_calibration.forms import Form, forms_named
from aspire_calibration.launches import LaunchModel
from aspire_calibration.model import CostModelFile, ranges_of, setup_of
from aspire_calibration.ramps import RampModel
from aspire_calibration.samples import UNSTEADY, Samples
from aspire_calibration.score import ErrorReport, by_regime, error_report
from aspire_calibration.starts import start_latency
from aspire_calibration.variables import INDEX

MIN_CELLS = 12
EXTREME_SHARE = 0.12  # of the cells, per axis, are extremes
EXTREME_AXES = ("full_kv_tokens", "sparse_kv_tokens", "query_tokens", "rows")
# Of the error on extremes in the choice of a form. Small: steps beyond the profiled ranges are warned of as well, and
# a form with a part for large steps cannot be asked about them without having seen one.
EXTREME_WEIGHT = 0.1
TIE = 1.05  # a simpler form is kept unless a later one is better by this factor
WARN_MAPE = 0.05

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class FormScore:
    """How one form did."""

    form: str
    title: str
    cv: ErrorReport
    extreme: ErrorReport | None
    heldout: dict[str, ErrorReport]
    selectable: bool
    score: float

    def to_json(self) -> dict[str, Any]:
        return {
            "form": self.form,
            "title": self.title,
            "selectable": self.selectable,
            "score": self.score,
            "cv_mape": self.cv.mape,
            "cv_p90": self.cv.p90,
            "extreme_mape": self.extreme.mape if self.extreme else None,
            "heldout_mape": {regime: report.mape for regime, report in self.heldout.items()},
            "heldout_p90": {regime: report.p90 for regime, report in self.heldout.items()},
            "heldout_bias": {regime: report.bias for regime, report in self.heldout.items()},
        }


def calibrate(
    samples: Samples,
    *,
    forms: Sequence[str] | None = None,
    seed: int = 0,
    folds: int = 5,
    bootstrap: int = 30,
    progress: Callable[[str], None] | None = None,
) -> CostModelFile:
    """Fit, choose and check. ``forms``: names of `aspire_calibration.forms.FORMS` (default: all); one name forces it.

    Raises `InputError` when there are too few cells. Cells the plan held out are only used for the report; if there are
    too few of them, every fifth cell (seeded) is taken. Cells that are not steady (`Samples.steady`) are left out.
    """
    given, samples = samples, samples.steady()
    unsteady = len(given.measured) - len(samples.measured)
    disturbed = sum(each.visits < given.by_key[key].visits for key, each in samples.by_key.items())
    matrix, seconds = samples.matrix()
    if len(seconds) < MIN_CELLS:
        raise InputError(
            f"{len(seconds)} measured cells are too few to calibrate, at least {MIN_CELLS} are needed; "
            "let `aspire profile` run longer"
        )
    generator = np.random.default_rng(seed)
    heldout = heldout_mask(samples.heldout(), generator)
    features, train = matrix.T, ~heldout
    scores = []
    for form in forms_named(forms, samples.header.graph_buckets):
        if progress is not None:
            progress(f"fitting form {form.name}")
        scores.append(
            score_form(form, features[:, train], seconds[train], features[:, heldout], seconds[heldout], folds, seed)
        )
    chosen = choose(scores)
    form = forms_named([chosen.form], samples.header.graph_buckets)[0]
    if progress is not None:
        progress(f"kept form {form.name}; bootstrap of {bootstrap} resamples")
    report = chosen.heldout
    # Coefficients never saw the held-out cells: whoever has file and samples can check the report.
    fitted = form.fit(features[:, train], seconds[train], None)
    after_rest, per_request_s = start_latency(samples, fitted)
    intervals = bootstrap_intervals(form, features[:, train], seconds[train], bootstrap, generator)
    spread = float(np.median([sample.spread for sample in samples.measured]))
    skipped = sum(bool(sample.skipped) for sample in samples.by_key.values())
    return CostModelFile(
        kind="measured",
        form=form.name,
        fitted=fitted,
        ranges=ranges_of(matrix),
        accuracy={regime: row.to_json() for regime, row in report.items()},
        comparison=[score.to_json() for score in scores],
        intervals=intervals,
        data={
            "hash": given.data_hash(),
            "cells": len(seconds),
            "heldout_cells": int(heldout.sum()),
            "idle_cells": len(samples.idle),
            "seed": seed,
            "median_spread": spread,
            "skipped": skipped,
            "unsteady": unsteady,
            "disturbed": disturbed,
        },
        start_latency=after_rest,
        start_latency_per_request_s=per_request_s,
        limits=known_limits(samples, report, spread, unsteady, disturbed),
        **setup_of(samples.header),
    )


def heldout_mask(planned: Mask, generator: np.random.Generator) -> Mask:
    """The cells the plan held out, or every fifth at random when they are fewer than a tenth."""
    if planned.sum() * 10 >= len(planned):
        return planned
    mask = np.zeros(len(planned), dtype=bool)
    mask[generator.permutation(len(planned))[: max(2, len(planned) // 5)]] = True
    return mask


def extreme_masks(features: Floats) -> list[Mask]:
    """For each axis the cells with the largest values, which a fit without them must extrapolate to."""
    masks = []
    for name in EXTREME_AXES:
        values = features[INDEX[name]]
        positive = values[values > 0]
        if len(np.unique(positive)) >= 5:
            mask = values > np.quantile(positive, 1.0 - EXTREME_SHARE)
            if 2 <= mask.sum() <= len(values) // 3:
                masks.append(mask)
    return masks


def score_form(
    form: Form, features: Floats, seconds: Floats, held_features: Floats, held_seconds: Floats, folds: int, seed: int
) -> FormScore:
    """Cross-validated error, error on extremes and held-out error of one form. features: [len(FEATURES), steps]."""
    fold = np.random.default_rng(seed).permutation(len(seconds)) % max(2, min(folds, len(seconds)))
    predicted = np.empty(len(seconds))
    for number in np.unique(fold):
        mine = fold == number
        predicted[mine] = form.fit(features[:, ~mine], seconds[~mine], None).seconds(features[:, mine])
    cv = error_report(predicted, seconds)
    far_predicted, far_measured = [], []
    for mask in extreme_masks(features):
        far_predicted.append(form.fit(features[:, ~mask], seconds[~mask], None).seconds(features[:, mask]))
        far_measured.append(seconds[mask])
    extreme = error_report(np.concatenate(far_predicted), np.concatenate(far_measured)) if far_measured else None
    held_predicted = form.fit(features, seconds, None).seconds(held_features)
    heldout = by_regime(StepFeatures.from_matrix(held_features.T), held_predicted, held_seconds)
    score = cv.mape + EXTREME_WEIGHT * (extreme.mape if extreme else 0.0)
    return FormScore(form.name, form.title, cv, extreme, heldout, form.selectable, score * form.handicap)


def choose(scores: Sequence[FormScore]) -> FormScore:
    """The best score among selectable forms; an earlier (simpler) one within a few percent of it is preferred."""
    candidates = [score for score in scores if score.selectable] or list(scores)
    best = min(score.score for score in candidates)
    return next(score for score in candidates if score.score <= best * TIE)


def bootstrap_intervals(
    form: Form, features: Floats, seconds: Floats, resamples: int, generator: np.random.Generator
) -> dict[str, dict[str, float]]:
    """90 % intervals over resampled cells: of the summed slopes per variable (ramp forms) and of predicted seconds.

    ``prediction``: median over cells of (p95 - p5) / fitted seconds. Single ramps trade off against their neighbours,
    so the interval is given for what they add up to: the mean slope of a variable over its fitted range, in seconds
    per unit.
    """
    if resamples < 2:
        return {}
    slopes: list[dict[str, float]] = []
    predictions = []
    for _ in range(resamples):
        pick = generator.integers(0, len(seconds), len(seconds))
        weights = np.bincount(pick, minlength=len(seconds)).astype(np.float64)
        used = weights > 0
        fitted = form.fit(features[:, used], seconds[used], weights[used])
        predictions.append(fitted.seconds(features))
        if isinstance(fitted, RampModel):
            slopes.append(mean_slopes(fitted, features))
        elif isinstance(fitted, LaunchModel):
            slopes.append(
                {name: slope for part in fitted.prices for name, slope in mean_slopes(part, features).items()}
            )
    low, middle, high = np.percentile(np.stack(predictions), [5, 50, 95], axis=0)
    width = float(np.median((high - low) / np.maximum(middle, 1e-12)))
    out = {"prediction": {"relative_width_p90": width, "resamples": float(resamples)}}
    for name in sorted({key for row in slopes for key in row}):
        values = [row.get(name, 0.0) for row in slopes]
        p5, p50, p95 = np.percentile(values, [5, 50, 95])
        out[name] = {"p5": float(p5), "median": float(p50), "p95": float(p95)}
    return out


def mean_slopes(model: RampModel, features: Floats) -> dict[str, float]:
    """Seconds per unit of each variable of each branch, averaged over its range in ``features``."""
    out: dict[str, float] = {}
    for branch, terms, slopes in zip(model.names, model.branches, model.slopes, strict=True):
        for term, slope in zip(terms, slopes, strict=True):
            name = f"{branch}.{term.variable}"
            if term.variable == "one":
                out[name] = out.get(name, 0.0) + slope
                continue
            top = float(features[INDEX[term.variable]].max()) if term.variable in INDEX else np.inf
            if top == np.inf:
                out[name] = out.get(name, 0.0) + slope
            elif top > term.start:
                out[name] = out.get(name, 0.0) + slope * (min(term.stop, top) - term.start) / top
    return out


def known_limits(
    samples: Samples, report: dict[str, ErrorReport], spread: float, unsteady: int, disturbed: int
) -> list[str]:
    """In words, what this model cannot do; printed with it everywhere."""
    limits = []
    for regime in ("ar", "draft", "verify", "mixed", "prefill"):
        if regime not in report:
            limits.append(f"no held-out step of regime '{regime}': its error is not known")
        elif report[regime].mape > WARN_MAPE:
            limits.append(f"regime '{regime}' is predicted to {report[regime].mape:.1%} only (held out)")
        elif report[regime].n < 8:
            limits.append(f"the error of regime '{regime}' rests on {report[regime].n} held-out steps")
    if spread > WARN_MAPE:
        limits.append(f"noisy machine: the median cell varied by {spread:.1%} between repeats (interquartile range)")
    if unsteady:
        limits.append(f"cells left out because their repeats varied by more than {UNSTEADY:.0%}: {unsteady}")
    if disturbed:
        limits.append(f"cells of which a visit was left out, in which the machine was slow: {disturbed}")
    if not any(float(sample.features.select_rows) > 0 for sample in samples.measured):
        limits.append("no cell computed page mass: selection is priced at zero")
    if samples.header.settings.get("async_scheduling") and not samples.idle:
        limits.append("no step was timed from idle: what it costs more when nothing is in flight is taken as zero")
    limits.append("steps are timed alone and back to back: clocks under another load may differ")
    return limits
