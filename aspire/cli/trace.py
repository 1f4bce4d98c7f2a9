"""`aspire trace`: what a request trace looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aspire.cli import workload_options as w
from aspire.cli.console import Console
from aspire.cli.options import Json, Quiet


def command(
    path: Annotated[Path, typer.Argument(help="A trace file (Azure, BurstGPT, Vidur, Mooncake) or a run directory.")],
    time_scale: w.TimeScale = 1.0,
    length_scale: w.LengthScale = 1.0,
    limit: w.Limit = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Statistics of a trace: requests, rate, burstiness, lengths. The format is detected from the content."""
    from aspire_simulator.traces import load_trace
    from aspire_simulator.workload import trace_stats

    console = Console(quiet=quiet, json=json)
    workload = load_trace(path, time_scale=time_scale, length_scale=length_scale, limit=limit)
    stats = trace_stats(workload)
    console.table(["statistic", "value"], [[name, value] for name, value in stats.items()], title=workload.name)
    console.next(f"aspire simulate --trace {path}")
    console.result({"trace": path, "workload": workload.name, "detail": workload.detail, "stats": stats})
