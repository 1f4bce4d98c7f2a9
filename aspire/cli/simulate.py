"""`aspire simulate`: what-if runs of the engine's own scheduler on a simulated clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aspire.cli import workload_options as w
from aspire.cli.console import Console
from aspire.cli.options import Json, Quiet
from aspire.cli.report import show_comparison

if TYPE_CHECKING:
    from aspire.rundir import Run
    from aspire_simulator.scenario import Scenario


@w.scenario_options
def command(
    scenario: Scenario,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="policy.json, or kind[:key=value,..][+selector]; repeatable. oracle: hindsight.",
            show_default="autoregressive, fixed and aspire",
        ),
    ] = None,
    strict_range: w.StrictRange = False,
    output_dir: w.OutputDir = Path("runs/simulate"),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Simulate policies on a workload; writes one run directory per policy and prints a table."""
    from aspire.evidence import provenance
    from aspire.rundir import write_run
    from aspire_simulator.oracle import parse_policy

    console = Console(quiet=quiet, json=json)
    policies = policy or ["autoregressive", "fixed", "aspire"]
    labels = [parse_policy(text).label for text in policies]
    watch = w.RangeWatch(scenario, strict=strict_range)
    workload = scenario.load_workload()
    prices = scenario.load_cost_model().file
    console.say(
        f"{len(workload)} requests of {workload.name}, {prices.kind} cost model, acceptance {scenario.acceptance}"
    )
    runs: list[tuple[str, Run]] = []
    for index, (text, label) in enumerate(zip(policies, labels, strict=True)):
        with console.progress(f"simulate {label}", len(workload)) as progress:
            run = scenario.with_(policy=text).run(
                lambda done, total, now_s, p=progress: p.update(done, f"{now_s:.1f} s simulated", total=total)
            )
        run.config["cost_model"] = prices.to_json()  # a run carries all that its replay needs
        run.meta = provenance()
        name = run_name(index, label)
        write_run(output_dir / name, run)
        runs.append((name, run))
    document = show_comparison(console, runs)
    for line in watch.warnings():
        console.warn(line)
    console.wrote(output_dir, f"{len(runs)} run directories")
    console.next(f"aspire tune --cost-model {scenario.cost_model}  with the same workload options")
    console.result({"output_dir": output_dir, **document, "extrapolated": watch.extrapolated()})


def run_name(index: int, label: str) -> str:
    """A folder name for the policy ``label``."""
    head, _, selector = label.partition("+")
    short = label if len(label) <= 32 else head.partition("(")[0] + (f"+{selector}" if selector else "")
    return f"{index:02d}-" + "".join(letter if letter.isalnum() or letter in "-=.@" else "_" for letter in short)
