"""Least squares in the units that matter: relative error, coefficients >= 0."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from aspire.scheduler.features import Floats


def nonnegative_relative(
    design: Floats,
    seconds: Floats,
    *,
    weights: Floats | None = None,
    ridge: float = 1e-4,
    robust: bool = True,
    penalty: Floats | None = None,
) -> Floats:
    """Coefficients c >= 0 that minimise sum w (design @ c - seconds)^2 / seconds^2, plus a small ridge.

    ``design``: [steps, terms]; ``robust``: soft-L1 loss by reweighting, so that a few disturbed cells do not bend the
    fit. The ridge acts on columns scaled to unit size: it only decides between terms that the data cannot tell apart.
    ``penalty``: [more, terms], further rows that c should take to zero.
    """
    rows = design / seconds[:, None]
    target = np.ones(len(seconds))
    scale = np.sqrt((rows**2).mean(axis=0))
    scale[scale == 0.0] = np.inf  # a term that no sample shows stays at zero
    rows = rows / scale
    base = np.ones(len(seconds)) if weights is None else np.sqrt(weights)
    damping = np.sqrt(ridge * len(seconds)) * np.eye(design.shape[1])
    if penalty is not None:
        damping = np.vstack([damping, penalty / scale])
    zeros = np.zeros(len(damping))
    loss = np.ones(len(seconds))
    solution = np.zeros(design.shape[1])
    for _ in range(6 if robust else 1):
        weight = base * loss
        stacked = np.vstack([rows * weight[:, None], damping])
        solution = nonnegative(stacked, np.concatenate([target * weight, zeros]))
        residual = rows @ solution - target
        spread = max(1.5 * float(np.median(np.abs(residual))), 1e-3)
        loss = (1.0 + (residual / (2.0 * spread)) ** 2) ** -0.25
    return np.asarray(solution / scale)


def nonnegative(matrix: Floats, target: Floats) -> Floats:
    """Coefficients c >= 0 that minimise sum (matrix @ c - target)^2."""
    optimize: Any = importlib.import_module("scipy.optimize")  # at first fit: loading a cost model needs no scipy
    try:
        return np.asarray(optimize.nnls(matrix, target, maxiter=20 * matrix.shape[1])[0])
    except RuntimeError:  # the active set did not settle: the bounded solver always ends
        return np.asarray(optimize.lsq_linear(matrix, target, bounds=(0.0, np.inf)).x)


def ordinary(design: Floats, seconds: Floats) -> Floats:
    """Plain least squares on seconds, signs free: what is compared against."""
    scale = np.sqrt((design**2).mean(axis=0))
    scale[scale == 0.0] = 1.0
    return np.asarray(np.linalg.lstsq(design / scale, seconds, rcond=None)[0] / scale)
