"""`aspire fit-acceptance`: acceptance models from an engine run, the best by held-out likelihood."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aspire.cli.console import Console
from aspire.cli.options import Json, Quiet


def command(
    source: Annotated[Path, typer.Argument(help="A run directory of generate or bench, or a recording (.npz).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the best model goes.")] = Path(
        "acceptance.json"
    ),
    workload: Annotated[
        str | None, typer.Option("--workload", help="Which recording of an .npz file to use.", show_default=False)
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Fit acceptance models to what an engine run observed, and keep the one that predicts unseen rounds best."""
    from aspire_simulator.fitting import fit_acceptance

    console = Console(quiet=quiet, json=json)
    fit = fit_acceptance(source, workload)
    fit.model.save(output)
    rows = sorted(([kind, score, kind == fit.best] for kind, score in fit.held_out.items()), key=lambda row: -row[1])
    console.table(["model", "held-out log likelihood", "kept"], rows, title=f"{fit.rounds} rounds")
    console.data(f"margins tell an accepted draft from a rejected one with AUC {fit.margin_auc:.3f}")
    console.wrote(output, f"acceptance model {fit.best}")
    console.next(f"aspire simulate --acceptance {output}")
    console.result({"acceptance": output, **fit.to_dict()})
