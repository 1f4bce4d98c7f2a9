"""Figures of calibration: predicted against measured. matplotlib is imported when a figure is drawn."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from aspire.fileio import open_atomic
from aspire.scheduler.features import CostModel, Floats, StepFeatures
from aspire_calibration.cells import REGIMES, regimes_of
from aspire_calibration.samples import Samples

COLORS = {"ar": "#4477aa", "draft": "#ee6677", "verify": "#228833", "mixed": "#ccbb44", "prefill": "#aa3377"}


def predicted_against_measured(
    path: str | Path,
    model: CostModel,
    features: StepFeatures,
    measured_s: Floats,
    *,
    heldout: Any = None,  # bool [steps]: drawn filled, others hollow; None = all filled
    title: str = "",
) -> Path:
    """Two panels: predicted over measured milliseconds (log-log), and the relative error over measured milliseconds.

    The file ending of ``path`` (png, svg, pdf) decides the format. features and measured_s: [steps].
    """
    figure_class: Any = importlib.import_module("matplotlib.figure").Figure
    figure = figure_class(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    predicted = model.predict(features)
    regimes = regimes_of(features)
    filled = np.ones(len(measured_s), dtype=bool) if heldout is None else np.asarray(heldout)
    for regime in REGIMES:
        for face, mask in ((COLORS[regime], filled), ("none", ~filled)):
            mine = (regimes == regime) & mask
            if not mine.any():
                continue
            label = regime if face != "none" or not (filled & (regimes == regime)).any() else None
            style = {"s": 16, "facecolors": face, "edgecolors": COLORS[regime], "linewidths": 0.8, "label": label}
            left.scatter(measured_s[mine] * 1e3, predicted[mine] * 1e3, **style)
            right.scatter(measured_s[mine] * 1e3, (predicted[mine] / measured_s[mine] - 1) * 100, **style)
    ends = np.array([measured_s.min(), measured_s.max()]) * 1e3
    left.plot(ends, ends, color="0.4", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="measured step (ms)", ylabel="predicted step (ms)", title=title)
    right.axhspan(-3, 3, color="0.92", zorder=0)
    right.axhline(0, color="0.4", linewidth=0.8)
    right.set(xscale="log", xlabel="measured step (ms)", ylabel="error (%)", title="grey: within 3 %")
    left.legend(frameon=False, fontsize=8)
    target = Path(path)
    with open_atomic(target, "wb") as stream:
        figure.savefig(stream, format=target.suffix.lstrip(".") or "png", dpi=130)
    return target


def calibration_figure(path: str | Path, model: CostModel, samples: Samples, *, title: str = "") -> Path:
    """The figure of `aspire calibrate`: every measured cell, the held-out ones filled."""
    matrix, seconds = samples.matrix()
    features = StepFeatures.from_matrix(matrix)
    return predicted_against_measured(path, model, features, seconds, heldout=samples.heldout(), title=title)
