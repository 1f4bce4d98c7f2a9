"""The larger of host work and device work: where the host launches a step while the GPU works, the slower one shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aspire.scheduler.features import Floats
from aspire_calibration.ramps import Ramp, RampModel, design
from aspire_calibration.solve import nonnegative_relative
from aspire_calibration.variables import variable_rows


def host_terms(features: Floats) -> list[Ramp]:
    """What the host may take longer for: launches, rows, tokens to sample and to note."""
    names = ("one", "rows", "query_tokens", "draft_rows", "verify_rows", "prefill_tokens")
    return [Ramp(name) for name in names if name == "one" or np.any(variable_rows(features, [name]))]


def fit_max(
    host: Sequence[Ramp], device: Sequence[Ramp], features: Floats, seconds: Floats, weights: Floats | None
) -> RampModel:
    """max(host, device) by alternation: each branch is fitted to the steps where it is the larger one.

    Starts from several splits by step time (short steps are host bound) and keeps the split that fits best; where the
    host never binds, the result is the device branch alone. features: [len(FEATURES), steps], seconds: [steps].
    """
    matrices = [design(host, features), design(device, features)]
    weight = np.ones(len(seconds)) if weights is None else weights
    alone = nonnegative_relative(matrices[1], seconds, weights=weight)
    best, best_loss = ([np.zeros(matrices[0].shape[1]), alone], _loss(matrices[1] @ alone, seconds, weight))
    for quantile in (0.15, 0.3, 0.5, 0.8):
        bound = seconds <= np.quantile(seconds, quantile)
        for _ in range(8):
            if bound.sum() < 2 * matrices[0].shape[1] or (~bound).sum() < matrices[1].shape[1] // 2:
                break
            slopes = [
                nonnegative_relative(matrix[mine], seconds[mine], weights=weight[mine], robust=False)
                for matrix, mine in zip(matrices, (bound, ~bound), strict=True)
            ]
            host_s, device_s = (matrix @ slope for matrix, slope in zip(matrices, slopes, strict=True))
            loss = _loss(np.maximum(host_s, device_s), seconds, weight)
            if loss < best_loss:
                best, best_loss = slopes, loss
            bound, before = host_s > device_s, bound
            if np.array_equal(bound, before):
                break
    slopes_out = tuple(tuple(float(s) for s in slope) for slope in best)
    return RampModel((tuple(host), tuple(device)), slopes_out, ("host", "device"))


def _loss(predicted_s: Floats, seconds: Floats, weight: Floats) -> float:
    return float(np.average(np.abs(predicted_s / seconds - 1.0), weights=weight))
