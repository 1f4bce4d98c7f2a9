"""Interpolation between measured cells: a base model times a ratio that neighbours decide.

The ratio measured / base of the cells, in the logarithms of the features, is averaged with weights that fall with
distance and fade to 1 away from all cells: near the data it follows the data, far from it the base extrapolates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from aspire.errors import InputError, check_keys
from aspire.scheduler.features import FEATURES, Floats
from aspire_calibration.ramps import RampModel

MOST_CELLS = 400
REACH = 0.35  # distance (in factors of e) at which the pull of a cell has fallen to half


@dataclass(frozen=True)
class TableModel:
    """``base`` times the local mean ratio of the cells at ``places`` [cells, axes] (log1p of the features)."""

    base: RampModel
    places: Floats
    log_ratios: Floats  # [cells]

    @classmethod
    def around(cls, base: RampModel, features: Floats, seconds: Floats) -> TableModel:
        """Ratios of the measured ``seconds`` to ``base`` at the ``features`` [len(FEATURES), steps]."""
        step = max(1, -(-features.shape[1] // MOST_CELLS))
        chosen = slice(None, None, step)
        ratios = np.log(seconds[chosen] / np.maximum(base.seconds(features[:, chosen]), 1e-12))
        return cls(base, np.log1p(features[:, chosen].T), ratios)

    def seconds(self, features: Floats) -> Floats:
        """[steps] from features [len(FEATURES), steps]."""
        base_s = self.base.seconds(features)
        at = np.log1p(np.maximum(features.T, 0.0))
        squared = (at**2).sum(1)[:, None] + (self.places**2).sum(1)[None, :] - 2.0 * at @ self.places.T
        weight = 1.0 / (1.0 + (np.maximum(squared, 0.0) / REACH**2) ** 2)
        pull = weight @ self.log_ratios / (weight.sum(axis=1) + 0.05)
        return np.asarray(base_s * np.exp(pull))

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "table",
            "base": self.base.to_json(),
            "cells": [
                {"log1p_features": [round(float(x), 6) for x in place], "log_ratio": float(ratio)}
                for place, ratio in zip(self.places, self.log_ratios, strict=True)
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TableModel:
        """Inverse of `to_json`; raises `InputError` for cells of the wrong size."""
        check_keys("table model", data, ("type", "base", "cells"))
        places = np.array([cell["log1p_features"] for cell in data["cells"]], dtype=np.float64)
        if places.ndim != 2 or places.shape[1] != len(FEATURES):
            raise InputError(f"the cells of a table model need {len(FEATURES)} features each; calibrate again")
        return cls(RampModel.from_json(data["base"]), places, np.array([cell["log_ratio"] for cell in data["cells"]]))
