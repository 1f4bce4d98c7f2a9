"""Predicted against observed step times of a real run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import InputError
from aspire.scheduler.features import CostModel, Floats, StepFeatures, start_latency_of
from aspire_calibration.cells import REGIMES, regimes_of
from aspire_calibration.score import ErrorReport, by_regime


@dataclass(frozen=True)
class RunValidation:
    """How well a cost model foretold a run."""

    steps: int
    predicted_s: float  # sum over all steps
    observed_s: float
    regimes: dict[str, ErrorReport]
    time_share: dict[str, float]  # of the observed time, per regime

    @property
    def run_error(self) -> float:
        """|predicted - observed| / observed of the whole run."""
        return abs(self.predicted_s - self.observed_s) / self.observed_s

    @property
    def signed_run_error(self) -> float:
        """(predicted - observed) / observed of the whole run."""
        return (self.predicted_s - self.observed_s) / self.observed_s

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "predicted_s": self.predicted_s,
            "observed_s": self.observed_s,
            "run_error": self.run_error,
            "signed_run_error": self.signed_run_error,
            "regimes": {name: report.to_json() for name, report in self.regimes.items()},
            "time_share": self.time_share,
        }

    def text(self) -> str:
        """For people: the run, then a line per regime."""
        lines = [
            f"{self.steps} steps: predicted {self.predicted_s:.3f} s, observed {self.observed_s:.3f} s "
            f"({self.signed_run_error:+.1%})"
        ]
        for name, report in self.regimes.items():
            share = f", {self.time_share[name]:.0%} of the time" if name in self.time_share else ""
            lines.append(f"  {name:8s} {report.text()}{share}")
        return "\n".join(lines)


def validate_steps(
    model: CostModel,
    features: StepFeatures,
    observed_s: Floats,
    rest_s: Floats | None = None,
    entering: NDArray[np.int64] | None = None,
) -> RunValidation:
    """Compare ``model.predict(features)`` with the observed seconds; both [steps]; `InputError` for bad ones.

    ``rest_s`` [steps]: idleness before those that began with nothing in flight, in a run that plans others ahead,
    infinite where nothing ran before, NaN for steps that follow another; None: none began so. ``entering`` [steps]:
    requests that begin their prompts in each; None: one.
    """
    observed = np.asarray(observed_s, dtype=np.float64)
    if observed.ndim != 1 or not len(observed):
        raise InputError(f"validation needs the step times of at least one step, got shape {observed.shape}")
    if features.rows.shape != observed.shape:
        raise InputError(f"{features.rows.shape} features do not match {observed.shape} observed step times")
    bad = np.flatnonzero(~(np.isfinite(observed) & (observed > 0)))
    if len(bad):
        raise InputError(f"step {bad[0]} has the step time {observed[bad[0]]}; record the run again")
    predicted = model.predict(features)
    if rest_s is not None:
        start_s = start_latency_of(model, rest_s, 1 if entering is None else entering)
        predicted = predicted + np.where(np.isnan(rest_s), 0.0, start_s)
    regimes = regimes_of(features)
    total = float(observed.sum())
    share = {name: float(observed[regimes == name].sum()) / total for name in REGIMES if np.any(regimes == name)}
    reports = by_regime(features, predicted, observed)
    return RunValidation(len(observed), float(predicted.sum()), total, reports, share)
