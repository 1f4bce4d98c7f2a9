"""Writes the evidence of calibration: held-out error of a profile, error on recorded runs, noise of equal work.

    python calibration/make_evidence.py SAMPLES MODEL OUTPUT [RUN ...]

SAMPLES and MODEL belong together (`aspire profile`, `aspire calibrate`); RUNs are run directories of the same setup.
The hardware named in the file is that of the samples, wherever this script runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from aspire.evidence import provenance
from aspire.fileio import write_json_atomic
from aspire.rundir import read_run
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


def decode_validation(model: LoadedCostModel, run: Path) -> RunValidation:
    """Predicted against observed seconds of the steps of ``run`` without prefill rows."""
    steps = read_run(run).steps
    decode = steps.features[:, INDEX["prefill_tokens"]] == 0
    return validate_steps(model, StepFeatures.from_matrix(steps.features[decode]), steps.duration_s[decode])


def noise_rows(samples: Samples) -> list[dict[str, Any]]:
    """Spread between cells that do about the same work: what no model of the features can foretell."""
    matrix, seconds = samples.matrix()
    column = {name: matrix[:, index] for name, index in INDEX.items()}
    drafts = (column["draft_rows"] == column["rows"]) & (column["rows"] <= 32)
    eager = (column["prefill_tokens"] > 0) & (column["query_tokens"] <= 1024)
    rows = []
    for name, mine, what in (
        ("graph", drafts, "draft steps of 1 to 32 rows, one graph each"),
        ("eager", eager, "steps with a prefill chunk, at most 1024 query tokens, without a graph"),
    ):
        median = float(np.median(seconds[mine]))
        within = [sample.spread for sample, take in zip(samples.measured, mine, strict=True) if take]
        rows.append(
            {
                "id": f"calib.noise_{name}",
                "value": float(np.mean(np.abs(median / seconds[mine] - 1.0))),
                "unit": "relative",
                "n": int(mine.sum()),
                "spread": float(np.median(within)),
                "detail": {
                    "what": f"mean |median of all / cell - 1| over {what}; spread: median spread of repeats in a cell",
                    "median_s": median,
                    "least_s": float(seconds[mine].min()),
                    "most_s": float(seconds[mine].max()),
                },
            }
        )
    return rows


def main(arguments: list[str]) -> None:
    if len(arguments) < 3:
        sys.exit(f"usage: {__doc__}")
    samples_path, model_path, output = map(Path, arguments[:3])
    samples, model = read_samples(samples_path), load_cost_model(model_path, warn=lambda message: None)
    name = model_path.stem
    results = [*accuracy_rows({name: model.file}), quick_profile_row({name: samples}), *noise_rows(samples)]
    runs = [Path(run) for run in arguments[3:]]
    if runs:
        results.append(run_error_row({f"{run.parent.name}/{run.name}": decode_validation(model, run) for run in runs}))
    named = [samples_path.as_posix(), model_path.as_posix(), output.as_posix()]
    command = " ".join(["calibration/make_evidence.py", *named, *(f"{run.parent.name}/{run.name}" for run in runs)])
    header = samples.header
    here = provenance(command)
    meta = {
        **{key: here[key] for key in ("command", "commit", "date")},
        "hardware": header.hardware.get("name"),
        "driver": header.hardware.get("driver"),
        "clocks": header.clocks,
        **header.versions,
        "measured_by": header.command,
        "measured_commits": sorted({str(read_run(run).meta.get("commit")) for run in runs}),
    }
    write_json_atomic(output, {"meta": meta, "results": results})


if __name__ == "__main__":
    main(sys.argv[1:])
