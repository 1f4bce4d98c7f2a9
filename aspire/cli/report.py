"""`aspire report`: figures and one self-contained HTML page from run directories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aspire.cli.console import Console
from aspire.cli.options import Json, Quiet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aspire.rundir import Run


def command(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders that hold some.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page.", show_default="report.html in the first folder")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also write each figure as a file here.", show_default=False)
    ] = None,
    figure_format: Annotated[str, typer.Option("--figure-format", help="svg, png or pdf.")] = "svg",
    title: Annotated[str, typer.Option("--title", help="Heading of the page.")] = "ASPIRE run report",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Compare runs: verdict, table, figures, provenance, in one HTML file without links to anything outside."""
    from aspire.errors import check_choice
    from aspire_simulator.comparison import load_runs
    from aspire_simulator.report import save_figures, write_report

    console = Console(quiet=quiet, json=json)
    check_choice("--figure-format", figure_format, ("svg", "png", "pdf"))
    page = output or runs[0] / "report.html"
    document = show_comparison(console, load_runs(runs))
    write_report(runs, page, title=title)
    console.wrote(page, "open it in a browser")
    if figures is not None:
        saved = save_figures(runs, figures, f".{figure_format}")
        console.wrote(figures, f"{len(saved)} figures")
    console.result({"report": page, **document})


def show_comparison(console: Console, runs: Sequence[tuple[str, Run]]) -> dict[str, Any]:
    """Print the table and the verdict of runs side by side; returns them as a JSON object."""
    from aspire_simulator.comparison import COLUMNS, compare, pays

    rows = compare(runs)
    cells = [row.cells() for row in rows]
    used = [index for index in range(len(COLUMNS)) if any(line[index] for line in cells)]
    console.table([COLUMNS[index] for index in used], [[line[index] for index in used] for line in cells])
    verdict = pays(rows)
    console.data(verdict)
    return {
        "verdict": verdict,
        "runs": [
            {"run": row.name, "policy": row.policy, "gain": row.gain, "oracle_gap": row.gap, "summary": row.summary}
            for row in rows
        ],
    }
