"""Do simulations come true? Evidence from recorded runs of the engine, each simulated again and compared.

``python -m aspire_simulator.fidelity RUN_OR_BENCH_DIR... [--cost-model FILE] --out reports/h200/simulation.json``

Every run is simulated with its own requests, limits, policy and drafts (which were right, and their margins), timed by
the cost model it was scheduled with (or ``--cost-model``). The hardware named in the file is that of the runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aspire.errors import InputError, exit_code_of
from aspire.evidence import provenance
from aspire.fileio import read_json, write_json_atomic
from aspire_simulator.validation import LATENCIES, RunCheck, validate_run

THROUGHPUT = "decode_only_throughput"
PERCENTILES = tuple(name for name in LATENCIES if not name.startswith("mean_"))
SETUP = ("hardware", "driver", "torch", "triton")  # of runs that may stand in one file


def run_directories(paths: Sequence[str | Path]) -> list[Path]:
    """Run directories among ``paths``, and those inside the folders among them (`aspire bench` writes one a policy)."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(steps.parent for steps in path.glob("*/steps.jsonl.gz"))
        if not (path / "steps.jsonl.gz").is_file() and not inside:
            raise InputError(f"{path} is no run directory and holds none; make one with: aspire bench")
        found += inside or [path]
    return found


def measured_meta(runs: Sequence[Path], command: str) -> dict[str, Any]:
    """``meta`` of an evidence file about ``runs``: where they were measured, and from which commits.

    Raises `InputError` when they come from different hardware or versions.
    """
    metas = [read_json(run / "meta.json", "run file meta.json") for run in runs]
    for key in SETUP:
        values = sorted({str(meta.get(key)) for meta in metas})
        if len(values) > 1:
            raise InputError(f"the runs were measured with different {key} ({', '.join(values)}); give those of one")
    here = provenance(command)
    return {
        **{key: here[key] for key in ("command", "commit", "date")},
        **{key: metas[0].get(key) for key in (*SETUP, "clocks", "python", "transformers", "numpy")},
        "measured_commits": sorted({str(meta.get("commit")) for meta in metas}),
        "measured_by": sorted({str(meta.get("command")) for meta in metas}),
    }


def results_of(checks: dict[str, RunCheck], group: str = "sim") -> list[dict[str, Any]]:
    """Evidence entries ``group.*`` from the checks of runs by name."""
    if not checks:
        raise InputError("no runs given; record some with: aspire bench --cost-model cost_model.json")
    errors = {name: _errors(check) for name, check in checks.items()}
    throughput = {name: found[THROUGHPUT] for name, found in errors.items() if THROUGHPUT in found}
    latency = {name: {m: found[m] for m in PERCENTILES if m in found} for name, found in errors.items()}
    steps = sum(check.composition.steps for check in checks.values())
    equal = sum(check.composition.equal_steps for check in checks.values())
    sizes = np.abs(list(throughput.values()))
    worst = {name: max(map(abs, found.values())) for name, found in latency.items() if found}
    if not len(sizes) or not worst:
        raise InputError("the runs hold no decode-only step or no latency to compare; record longer outputs")
    return [
        {
            "id": f"{group}.composition_equal",
            "value": equal / steps,
            "unit": "of steps",
            "n": steps,
            "spread": None,
            "detail": {"runs": {name: check.to_dict() for name, check in checks.items()}},
        },
        _entry(f"{group}.throughput_error_mean", float(sizes.mean()), sizes, {"signed": throughput}),
        _entry(f"{group}.throughput_error_max", float(sizes.max()), sizes, {"signed": throughput}),
        _entry(f"{group}.latency_percentile_error_max", max(worst.values()), np.array(list(worst.values())), latency),
    ]


def _entry(name: str, value: float, sizes: Any, detail: dict[str, Any]) -> dict[str, Any]:
    spread = {"min": float(sizes.min()), "max": float(sizes.max())}
    return {"id": name, "value": value, "unit": "relative", "n": len(sizes), "spread": spread, "detail": detail}


def _errors(check: RunCheck) -> dict[str, float]:
    """Metric -> (simulated - measured) / measured."""
    return {one.metric: one.error for one in check.comparisons}


def line_of(name: str, check: RunCheck) -> str:
    """One run in words."""
    found = _errors(check)
    worst = max(
        (metric for metric in PERCENTILES if metric in found), key=lambda metric: abs(found[metric]), default=""
    )
    latency = f", worst percentile {worst} {found[worst]:+.1%}" if worst else ""
    return (
        f"{name}: {check.policy}, {check.rows} rows, context {check.context_tokens:,.0f}: "
        f"{check.composition.equal_steps} of {check.composition.steps} steps, "
        f"throughput {found.get(THROUGHPUT, float('nan')):+.1%}{latency}, "
        f"time of the recorded steps {check.step_times.signed_run_error:+.1%}"
    )


@exit_code_of
def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line per run, write the evidence file."""
    parser = argparse.ArgumentParser(prog="python -m aspire_simulator.fidelity", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="run directories, or folders of them as aspire bench writes")
    parser.add_argument("--cost-model", help="predict with this model instead of the one in each run")
    parser.add_argument("--group", default="sim", help="what the entries' names begin with, e.g. arrivals")
    parser.add_argument("--out", help="evidence file to write, e.g. reports/h200/simulation.json")
    given = parser.parse_args(arguments)
    from aspire_calibration import load_cost_model

    prices = load_cost_model(given.cost_model, warn=lambda message: None) if given.cost_model else None
    runs = run_directories(given.runs)
    checks: dict[str, RunCheck] = {}
    for run in runs:
        name = f"{run.parent.name}/{run.name}"
        checks[name] = validate_run(run, prices)
        print(line_of(name, checks[name]))
    results = results_of(checks, given.group)
    for result in results:
        print(f"{result['id']} {result['value']:.4f}")
    if given.out:
        names = " ".join(checks)
        group = f" --group {given.group}" if given.group != "sim" else ""
        command = f"python -m aspire_simulator.fidelity {names}{group} --out {given.out}"
        meta = measured_meta(runs, command)
        print(f"wrote {write_json_atomic(given.out, {'meta': meta, 'results': results})}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
