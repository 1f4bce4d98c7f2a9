"""What a step that starts from idle takes longer than one that follows another.

    extra = latency(rest before it) + per_request * (requests that begin their prompts in it - 1)

Clocks and caches cool down while nothing runs, the more the longer the rest; and before such a step is launched the
host admits, places and hashes every request that begins, while the device has nothing to do.
"""

from __future__ import annotations

import numpy as np

from aspire_calibration.forms import Fitted
from aspire_calibration.samples import Samples
from aspire_calibration.solve import nonnegative

RIDGE = 1e-3  # on the price of a request, relative: only where the cells cannot tell it from the rest is it zero

StartLatency = tuple[tuple[float, float], ...]  # (rest, seconds), by rest


def start_latency(samples: Samples, fitted: Fitted) -> tuple[StartLatency, float]:
    """``start_latency`` and ``start_latency_per_request_s`` of a cost model whose steps cost ``fitted``, from the cells
    of ``samples`` that start from idle; ((), 0.0) without any.

    Least squares of errors relative to the measured time of the step, neither part negative, the latency never less
    after a longer rest. In absolute errors long steps would decide, whose clocks are higher after a rest than in the
    steady state that their price is of. A cell that was disturbed takes long, and so counts little. Every row of
    such a cell is a request that begins.
    """
    idle = samples.idle
    if not idle:
        return (), 0.0
    rest_s = np.array([sample.cell.rest_s for sample in idle])
    further = np.array([sample.cell.rows - 1.0 for sample in idle])
    observed = np.array([sample.median_s for sample in idle])
    extra = observed - fitted.seconds(np.stack([sample.features.matrix() for sample in idle], axis=1))
    rests = np.unique(rest_s)
    design = np.column_stack([rest_s[:, None] >= rests, further]) / observed[:, None]
    damping = np.zeros(len(rests) + 1)
    damping[-1] = RIDGE * np.linalg.norm(design[:, -1])
    *rises, per_request = nonnegative(np.vstack([design, damping]), np.append(extra / observed, 0.0)).tolist()
    return tuple(zip(rests.tolist(), np.cumsum(rises).tolist(), strict=True)), per_request
