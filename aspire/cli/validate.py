"""`aspire validate`: simulated against measured, for runs of the engine (or of the simulator itself)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aspire.cli.console import Console
from aspire.cli.options import Json, Quiet, existing_file
from aspire.errors import UsageError


def command(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories of generate, bench or simulate.", show_default=False)
    ] = None,
    run: Annotated[list[Path] | None, typer.Option("--run", help="The same, as an option.", show_default=False)] = None,
    cost_model: Annotated[
        Path | None,
        typer.Option("--cost-model", help="Predict with this model instead of the one in the run.", show_default=False),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 unless everything passes.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the report as JSON.", show_default=False)
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Replay runs in the simulator: same compositions step by step, step times, throughput and latencies."""
    from aspire.fileio import write_json_atomic
    from aspire_simulator.validation import validate_run

    console = Console(quiet=quiet, json=json)
    prices = _open(cost_model, console) if cost_model else None
    paths = [*(runs or ()), *(run or ())]
    if not paths:
        raise UsageError("give at least one run directory, made by: aspire generate, bench or simulate")
    reports: list[dict[str, Any]] = []
    for path in paths:
        console.say(f"replaying {path}")
        check = validate_run(path, prices)
        composition = check.composition
        console.data(f"{path}: {check.policy}")
        console.data(f"composition: {composition.equal_steps} of {composition.steps} steps reproduced")
        if composition.difference:
            console.data(f"first difference: {composition.difference}")
        console.data(f"step times: {check.step_times.text()}")
        rows = [[c.metric, c.measured, c.simulated, f"{c.error:+.1%}", c.verdict] for c in check.comparisons]
        console.table(["metric", "measured", "simulated", "error", "verdict"], rows)
        reports.append(check.to_dict())
    passed = all(report["passed"] for report in reports)
    console.data(f"verdict: {'PASS' if passed else 'WARN'}")
    document = {"passed": passed, "runs": reports}
    if output is not None:
        write_json_atomic(output, document)
        console.wrote(output, "validation report")
    console.next(f"aspire report {' '.join(map(str, paths))}")
    console.result(document)
    if strict and not passed:
        raise typer.Exit(1)


def _open(path: Path, console: Console) -> Any:
    from aspire_calibration import load_cost_model

    return load_cost_model(existing_file(path, "cost model", "aspire calibrate"), warn=console.warn)
