"""Evidence rows of calibration: the error of every profile, of a short profile, and of whole runs.

The rows go to `aspire.evidence.write_evidence`. Where several models were profiled, the value of a row is the worst of
them and its detail holds each; the forms that were not kept stand beside the kept one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aspire.errors import InputError
from aspire.scheduler.features import StepFeatures
from aspire_calibration.fit import calibrate
from aspire_calibration.model import CostModelFile
from aspire_calibration.predict import LoadedCostModel
from aspire_calibration.samples import Samples
from aspire_calibration.score import by_regime
from aspire_calibration.validate import RunValidation

REGIMES = ("ar", "draft", "verify", "mixed", "prefill")
QUICK_BUDGET_S = 300.0


def accuracy_rows(files: Mapping[str, CostModelFile]) -> list[dict[str, Any]]:
    """Held-out MAPE, P90 and |bias| per regime: ``calib.mape_ar`` ... from cost models by profile name.

    Raises `InputError` for a model without held-out error (analytic, scaled).
    """
    if not files:
        raise InputError("no cost models given; calibrate at least one profile")
    for name, file in files.items():
        if not file.accuracy:
            raise InputError(f"{name} is a cost model of kind {file.kind}, without held-out error; give measured ones")
    rows = []
    for regime in REGIMES:
        found = {name: file.accuracy[regime] for name, file in files.items() if regime in file.accuracy}
        if not found:
            continue
        for figure in ("mape", "p90", "bias"):
            values = {name: row[figure] for name, row in found.items()}
            rows.append(
                {
                    "id": f"calib.{figure}_{regime}",
                    "value": max(abs(value) for value in values.values()),
                    "unit": "relative" if figure != "bias" else "relative, absolute value",
                    "n": int(sum(row["n"] for row in found.values())),
                    "spread": None,
                    "detail": {"by_profile": values, "forms": {name: _forms(files[name], regime) for name in found}},
                }
            )
    return rows


def _forms(file: CostModelFile, regime: str) -> dict[str, Any]:
    """Held-out MAPE of every form that was tried, the kept one named."""
    tried = {row["form"]: row["heldout_mape"].get(regime) for row in file.comparison}
    return {"kept": file.form, "heldout_mape": tried}


def quick_profile_row(profiles: Mapping[str, Samples], budget_s: float = QUICK_BUDGET_S) -> dict[str, Any]:
    """``calib.quick_profile_mape``: calibrated on what ``budget_s`` seconds had measured, scored on all held-out cells.

    The worst of the profiles. The cells that the short profile held out count too: it was not fitted to them.
    """
    detail: dict[str, Any] = {}
    count = 0
    for name, samples in profiles.items():
        short = samples.within(budget_s)
        file = calibrate(short, bootstrap=0)
        steady = samples.steady()
        matrix, seconds = steady.matrix()
        held = steady.heldout()
        if not held.any():
            raise InputError(f"{name}: the profile held no cell out; profile again with the current plan")
        count += int(held.sum())
        steps = StepFeatures.from_matrix(matrix[held])
        predicted = LoadedCostModel(file, warn=lambda message: None).predict(steps)
        reports = by_regime(steps, predicted, seconds[held])
        detail[name] = {
            "cells": len(short.measured),
            "of_cells": len(seconds),
            "took_s": float(sum(sample.took_s for sample in short.by_key.values())),
            "form": file.form,
            "mape": {regime: report.mape for regime, report in reports.items()},
        }
    worst = max(row["mape"]["all"] for row in detail.values())
    return {
        "id": "calib.quick_profile_mape",
        "value": worst,
        "unit": "relative",
        "n": count,
        "spread": None,
        "detail": {"budget_s": budget_s, "profiles": detail},
    }


def run_error_row(runs: Mapping[str, RunValidation]) -> dict[str, Any]:
    """``calib.run_error_max``: |predicted - observed| / observed decode time, the worst of the runs."""
    if not runs:
        raise InputError("no runs given; validate at least one run directory")
    errors = {name: run.signed_run_error for name, run in runs.items()}
    return {
        "id": "calib.run_error_max",
        "value": max(abs(error) for error in errors.values()),
        "unit": "relative",
        "n": len(runs),
        "spread": float(np.ptp(list(errors.values()))),
        "detail": {name: run.to_json() for name, run in runs.items()},
    }


def comparison_table(file: CostModelFile) -> list[list[str]]:
    """Rows for a table: form, kept, cross-validated, extremes, then held-out MAPE per regime (header row first)."""
    regimes = [regime for regime in (*REGIMES, "all") if regime in file.accuracy]
    table = [["form", "kept", "cross-validated", "extremes", *regimes]]
    for row in file.comparison:
        extreme = "-" if row["extreme_mape"] is None else f"{row['extreme_mape']:.1%}"
        held = [f"{row['heldout_mape'][regime]:.1%}" for regime in regimes]
        table.append([row["form"], "yes" if row["form"] == file.form else "", f"{row['cv_mape']:.1%}", extreme, *held])
    return table
