"""`aspire sweep`: a grid of what-ifs, resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aspire.cli.console import Console
from aspire.cli.options import Json, Quiet


def command(
    file: Annotated[Path, typer.Argument(help='JSON or YAML: {"base": {...}, "grid": {"name": [values]}}.')],
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Cells and tables go here.")] = Path(
        "runs/sweep"
    ),
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes on this machine.")] = 1,
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", help="Run on this Ray cluster; local: start one here.", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the cells that are missing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many cells there are.")] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Simulate every combination of the values in FILE; names are those of the simulate options, with underscores."""
    from aspire_simulator.sweep import TABLE_METRICS, Sweep, run_sweep

    console = Console(quiet=quiet, json=json)
    sweep = Sweep.load(file)
    cells = sweep.cells()
    size = " x ".join(f"{name} ({len(values)})" for name, values in sweep.grid.items())
    if dry_run:
        console.data(f"{len(cells)} cells: {size}")
        console.result({"cells": len(cells), "grid": dict(sweep.grid)})
        return
    console.say(f"{len(cells)} cells: {size}")
    with console.progress("sweep", len(cells)) as progress:
        results = run_sweep(
            sweep,
            output_dir,
            num_workers=workers,
            ray_address=ray_address,
            resume=resume,
            progress=lambda done, total: progress.update(done, total=total),
        )
    failed = [result for result in results if "error" in result]
    metrics = [name for name in TABLE_METRICS if any(name in result.get("summary", {}) for result in results)][:6]
    rows = [
        [str(result["scenario"][name]) for name in sweep.grid]
        + [result.get("summary", {}).get(name) for name in metrics]
        + [result.get("error", "")]
        for result in results
    ]
    columns = [*sweep.grid, *metrics, "error"]
    console.table(columns if failed else columns[:-1], rows if failed else [row[:-1] for row in rows])
    console.wrote(output_dir / "sweep.csv", f"{len(results)} cells, {len(failed)} failed")
    console.result({"output_dir": output_dir, "cells": results})
    if failed:
        raise typer.Exit(1)
