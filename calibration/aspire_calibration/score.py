"""Error figures of predicted against measured seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from aspire.scheduler.features import Floats, StepFeatures
from aspire_calibration.cells import REGIMES, regimes_of


@dataclass(frozen=True)
class ErrorReport:
    """Relative errors (predicted - measured) / measured of ``n`` steps."""

    n: int
    mape: float  # mean absolute
    p90: float  # 90th percentile of absolute
    max: float
    bias: float  # mean, signed

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    def text(self) -> str:
        return f"n {self.n}, MAPE {self.mape:.1%}, P90 {self.p90:.1%}, max {self.max:.1%}, bias {self.bias:+.1%}"


def error_report(predicted_s: Floats, measured_s: Floats) -> ErrorReport:
    """Errors of arrays of equal shape, at least one step."""
    relative = (np.asarray(predicted_s) - measured_s) / measured_s
    size = np.abs(relative)
    return ErrorReport(
        n=int(size.size),
        mape=float(size.mean()),
        p90=float(np.percentile(size, 90)),
        max=float(size.max()),
        bias=float(relative.mean()),
    )


def by_regime(features: StepFeatures, predicted_s: Floats, measured_s: Floats) -> dict[str, ErrorReport]:
    """One report per regime that occurs, and ``all``."""
    regimes = regimes_of(features)
    reports = {
        regime: error_report(predicted_s[regimes == regime], measured_s[regimes == regime])
        for regime in REGIMES
        if np.any(regimes == regime)
    }
    return {**reports, "all": error_report(predicted_s, measured_s)}
