"""Writes the evidence of calibration: held-out error of profiles, error on recorded runs, noise of equal work.

    python calibration/make_evidence.py OUTPUT --profile SAMPLES MODEL [--profile SAMPLES MODEL ...] [--run RUN ...]
        [--group NAME]

SAMPLES and MODEL belong together (`aspire profile`, `aspire calibrate`). A RUN is a run directory, or a folder of them
as `aspire bench` writes. It is priced by the profile of its model and hardware, or where there is none by the cost
model it was scheduled with. The hardware named in the file is that of the samples, wherever this script runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aspire.errors import InputError
from aspire.evidence import provenance
from aspire.fileio import write_json_atomic
from aspire.rundir import Run, read_run
from aspire.scheduler.features import StepFeatures
from aspire_calibration import (
    LoadedCostModel,
    RunValidation,
    Samples,
    accuracy_rows,
    load_cost_model,
    quick_profile_row,
    read_samples,
    run_error_row,
    validate_steps,
)
from aspire_calibration.variables import INDEX
from aspire_simulator.fidelity import run_directories
from aspire_simulator.replaying import recorded_cost_model


def decode_validation(run: Run, models: Sequence[LoadedCostModel]) -> RunValidation:
    """Predicted against observed seconds of the steps of ``run`` without prefill rows."""
    here = (run.config.get("model"), run.meta.get("hardware"))
    fitting = [one for one in models if (one.file.model.get("name"), one.file.hardware.get("name")) == here]
    model = fitting[0] if fitting else recorded_cost_model(run)
    if model is None:
        raise InputError(f"no --profile is of {here[0]} on {here[1]}, and the run names no cost model")
    decode = run.steps.features[:, INDEX["prefill_tokens"]] == 0
    features = StepFeatures.from_matrix(run.steps.features[decode])
    return validate_steps(model, features, run.steps.duration_s[decode])


def noise_of(samples: Samples) -> dict[str, dict[str, float]]:
    """Spread between cells that do about the same work: what no model of the features can foretell."""
    matrix, seconds = samples.matrix()
    column = {name: matrix[:, index] for name, index in INDEX.items()}
    alike = {
        "graph": (column["draft_rows"] == column["rows"]) & (column["rows"] <= 32),
        "eager": (column["prefill_tokens"] > 0) & (column["query_tokens"] <= 1024),
    }
    found = {}
    for name, mine in alike.items():
        if not mine.any():
            continue
        median = float(np.median(seconds[mine]))
        within = [sample.spread for sample, take in zip(samples.measured, mine, strict=True) if take]
        found[name] = {
            "value": float(np.mean(np.abs(median / seconds[mine] - 1.0))),
            "cells": int(mine.sum()),
            "spread_of_repeats": float(np.median(within)),
            "median_s": median,
            "least_s": float(seconds[mine].min()),
            "most_s": float(seconds[mine].max()),
        }
    return found


def noise_rows(profiles: Mapping[str, Samples]) -> list[dict[str, Any]]:
    """``calib.noise_graph`` and ``calib.noise_eager``: the worst of the profiles, each in the detail."""
    what = {
        "graph": "draft steps of 1 to 32 rows, one graph each",
        "eager": "steps with a prefill chunk, at most 1024 query tokens, without a graph",
    }
    by_profile = {name: noise_of(samples) for name, samples in profiles.items()}
    rows = []
    for kind, words in what.items():
        found = {name: noise[kind] for name, noise in by_profile.items() if kind in noise}
        if found:
            worst = max(found.values(), key=lambda noise: noise["value"])
            detail = {"what": f"mean |median of all / cell - 1| over {words}", "by_profile": found}
            rows.append(
                {
                    "id": f"calib.noise_{kind}",
                    "value": worst["value"],
                    "unit": "relative",
                    "n": worst["cells"],
                    "spread": worst["spread_of_repeats"],
                    "detail": detail,
                }
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--profile", nargs=2, type=Path, action="append", required=True, metavar=("SAMPLES", "MODEL"))
    parser.add_argument("--run", nargs="+", default=[], help="run directories, or folders of them")
    parser.add_argument("--group", default="calib", help="what the entries' names begin with, e.g. calib_shapes")
    given = parser.parse_args(arguments)
    samples = {model.stem: read_samples(path) for path, model in given.profile}
    models = {model.stem: load_cost_model(model, warn=lambda message: None) for _, model in given.profile}
    results = [
        *accuracy_rows({name: model.file for name, model in models.items()}),
        quick_profile_row(samples),
        *noise_rows(samples),
    ]
    paths = run_directories(given.run) if given.run else []
    runs = {f"{path.parent.name}/{path.name}": read_run(path) for path in paths}
    if runs:
        known = list(models.values())
        results.append(run_error_row({name: decode_validation(run, known) for name, run in runs.items()}))
    for result in results:
        result["id"] = result["id"].replace("calib.", f"{given.group}.", 1)
    pairs = " ".join(f"--profile {path.as_posix()} {model.as_posix()}" for path, model in given.profile)
    command = f"calibration/make_evidence.py {given.output.as_posix()} {pairs}"
    command += f" --run {' '.join(runs)}" if runs else ""
    command += f" --group {given.group}" if given.group != "calib" else ""
    headers = [each.header for each in samples.values()]
    setups = {(header.hardware.get("name"), str(header.versions)) for header in headers}
    if len(setups) > 1:
        raise InputError(f"the profiles come from different setups ({setups}); write a file for each")
    here = provenance(command)
    meta = {
        **{key: here[key] for key in ("command", "commit", "date")},
        "hardware": headers[0].hardware.get("name"),
        "driver": headers[0].hardware.get("driver"),
        "clocks": headers[0].clocks,
        **headers[0].versions,
        "measured_by": sorted({header.command for header in headers}),
        "measured_commits": sorted({str(run.meta.get("commit")) for run in runs.values()}),
    }
    write_json_atomic(given.output, {"meta": meta, "results": results})
    for result in results:
        print(f"{result['id']} {result['value']:.4f}")


if __name__ == "__main__":
    main()
