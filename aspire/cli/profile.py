"""`aspire profile`: time real steps of the model on this machine -> samples.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aspire.cli.console import Console
from aspire.cli.engine_options import EngineChoice, engine_choice
from aspire.cli.engine_session import open_engine
from aspire.cli.options import Json, Quiet, shared_options

MAX_CELL_S = 60.0  # timed repeats of a cell go on until this


def _profile(
    engine: EngineChoice,
    output: Annotated[Path, typer.Option("--output", "-o", help="Samples to write, or to go on with.")] = Path(
        "samples.jsonl"
    ),
    budget_minutes: Annotated[
        float | None,
        typer.Option("--budget-minutes", min=0.0, help="Stop after so many minutes.", show_default="the whole plan"),
    ] = None,
    levels: Annotated[int, typer.Option("--levels", min=1, help="Refinement of the grid; 1: coarse.")] = 4,
    repeats: Annotated[int, typer.Option("--repeats", min=3, help="Timed repeats of a cell.")] = 5,
    prefill: Annotated[bool, typer.Option("--prefill/--no-prefill", help="Also time prefill chunks.")] = True,
    refine: Annotated[
        bool, typer.Option("--refine/--no-refine", help="Add cells where the model predicts badly.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be timed, and stop.")] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Time steps over a grid of rows, contexts, draft lengths and prefill chunks; killed, it goes on from there."""
    from aspire_calibration import LoadedCostModel, analytic_for, plan_info, profile_plan, refiner, run_profile
    from aspire_calibration.profile import summary

    console = Console(quiet=quiet, json=json)
    llm, _ = open_engine(engine, engine.policy("fixed"), console)
    from aspire.engine.kv_pool import page_bytes
    from aspire.engine.timing import StepTimer

    timer = StepTimer(llm.engine, repeats=repeats, max_seconds=MAX_CELL_S)
    limits = timer.limits()
    plan = profile_plan(limits, seed=engine.settings["seed"], levels=levels, with_prefill=prefill)
    header = timer.header()
    one_page = page_bytes(llm.engine.loaded.config, llm.engine.loaded.model.dtype)
    known = analytic_for(str(header.hardware.get("name")), header.model)
    cost = LoadedCostModel(known, warn=lambda message: None) if known is not None else None
    budget_s = None if budget_minutes is None else budget_minutes * 60
    info = plan_info(plan, page_bytes=one_page, repeats=repeats, cost=cost, budget_s=budget_s)
    if dry_run:
        console.data(info.text())
        console.result(vars(info))
        return
    console.say(info.text())
    with console.progress("profile", len(plan)) as progress:
        result = run_profile(
            timer.time_cell,
            plan,
            output,
            header,
            budget_s=budget_s,
            repeats=repeats,
            progress=lambda at: progress.update(at.done, _note(at), total=at.total),
            refine=refiner(limits) if refine else None,
        )
    facts = summary(result)
    rest = f", {facts['resumed']} from before" if facts["resumed"] else ""
    stopped = ", budget spent" if result.out_of_budget else ""
    console.data(f"{facts['cells']} cells measured in {result.elapsed_s:.0f} s{rest}{stopped}")
    if facts["skipped"]:
        console.data(f"{facts['skipped']} cells did not fit and were skipped")
    if facts["median_spread"] is not None:
        console.data(f"median spread between repeats: {facts['median_spread']:.1%} (interquartile range)")
    console.wrote(output, f"{facts['cells']} samples")
    console.next(f"aspire calibrate {output}")
    console.result(facts)


def _note(at: Any) -> str:
    sample = at.sample
    time = "skipped" if sample.skipped else f"{sample.median_s * 1e3:.2f} ms"
    phase = "refining " if at.phase == "refine" else ""
    return f"{phase}{sample.cell.key} {time}, about {at.eta_s:.0f} s left"


command = shared_options([engine_choice], _profile, EngineChoice=EngineChoice)
