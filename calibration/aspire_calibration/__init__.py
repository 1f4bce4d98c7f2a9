"""ASPIRE's calibrator: a latency model of engine steps that one can trust. Pure numpy and scipy, no torch.

What to time and how
    Cell, RowGroup, ar, draft, verify, prefill, mixed, ragged    one synthetic step, described by its rows
    PlanLimits, profile_plan                                     the cells for this machine and model, coarse first
    run_profile, plan_info, refiner                              time them, resumable, within a budget; dry-run figures
    SamplesHeader, Sample, Samples, read_samples                 samples.jsonl

From samples to a cost model
    calibrate                                                    compare forms, keep the best, report held-out error
    CostModelFile, LoadedCostModel, load_cost_model              cost_model.json; predict, marginal, check_matches
    analytic_model, analytic_for, scale_from, HARDWARE           what-if models from public figures; scaling
    OnlineCostModel                                              corrections learned from the step timings of a run

Is it true?
    validate_steps, ErrorReport, error_report, by_regime         predicted against observed
    accuracy_rows, quick_profile_row, run_error_row              rows for evidence files (module reporting)
    figures (module)                                             drawn with matplotlib, imported only when used
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aspire_calibration.analytic import (
        HARDWARE,
        MODELS,
        Hardware,
        ModelShape,
        analytic_for,
        analytic_model,
        scale_from,
    )
    from aspire_calibration.cells import Cell, RowGroup, ar, draft, mixed, padded_tokens, prefill, ragged, verify
    from aspire_calibration.fit import calibrate
    from aspire_calibration.model import CostModelFile
    from aspire_calibration.online import OnlineCostModel
    from aspire_calibration.plan import PlanLimits, profile_plan
    from aspire_calibration.predict import LoadedCostModel, load_cost_model
    from aspire_calibration.profile import ProfileProgress, ProfileResult, plan_info, run_profile
    from aspire_calibration.refine import refiner
    from aspire_calibration.reporting import accuracy_rows, comparison_table, quick_profile_row, run_error_row
    from aspire_calibration.samples import Sample, Samples, SamplesHeader, merge_samples, read_samples
    from aspire_calibration.score import ErrorReport, by_regime, error_report
    from aspire_calibration.validate import RunValidation, validate_steps

# name -> module; imported at first use, so that reading a cost model does not load scipy
_WHERE = {
    **dict.fromkeys(
        ("Cell", "RowGroup", "ar", "draft", "verify", "prefill", "mixed", "ragged", "padded_tokens"), "cells"
    ),
    **dict.fromkeys(("PlanLimits", "profile_plan"), "plan"),
    **dict.fromkeys(("run_profile", "plan_info", "ProfileProgress", "ProfileResult"), "profile"),
    "refiner": "refine",
    **dict.fromkeys(("SamplesHeader", "Sample", "Samples", "read_samples", "merge_samples"), "samples"),
    "calibrate": "fit",
    "CostModelFile": "model",
    **dict.fromkeys(("LoadedCostModel", "load_cost_model"), "predict"),
    **dict.fromkeys(
        ("analytic_for", "analytic_model", "scale_from", "HARDWARE", "MODELS", "Hardware", "ModelShape"), "analytic"
    ),
    "OnlineCostModel": "online",
    **dict.fromkeys(("accuracy_rows", "quick_profile_row", "run_error_row", "comparison_table"), "reporting"),
    **dict.fromkeys(("validate_steps", "RunValidation"), "validate"),
    **dict.fromkeys(("ErrorReport", "error_report", "by_regime"), "score"),
}

__all__ = [
    "HARDWARE",
    "MODELS",
    "Cell",
    "CostModelFile",
    "ErrorReport",
    "Hardware",
    "LoadedCostModel",
    "ModelShape",
    "OnlineCostModel",
    "PlanLimits",
    "ProfileProgress",
    "ProfileResult",
    "RowGroup",
    "RunValidation",
    "Sample",
    "Samples",
    "SamplesHeader",
    "accuracy_rows",
    "analytic_for",
    "analytic_model",
    "ar",
    "by_regime",
    "calibrate",
    "comparison_table",
    "draft",
    "error_report",
    "load_cost_model",
    "merge_samples",
    "mixed",
    "padded_tokens",
    "plan_info",
    "prefill",
    "profile_plan",
    "quick_profile_row",
    "ragged",
    "read_samples",
    "refiner",
    "run_error_row",
    "run_profile",
    "scale_from",
    "validate_steps",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'aspire_calibration' has no attribute '{name}'")
    return getattr(importlib.import_module(f"aspire_calibration.{_WHERE[name]}"), name)
