"""`aspire simulate`: what-if runs of the engine's own scheduler on a simulated clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aspire.cli import workload_options as w
from aspire.cli.console import Console
from aspire.cli.options import Json, Quiet

if TYPE_CHECKING:
    from aspire_simulator.scenario import Scenario

COLUMNS = ("policy", "tok/s", "vs first", "TTFT ms", "TPOT ms", "tokens/round", "goodput", "run")


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
    rows: list[list[Any]] = []
    results: list[dict[str, Any]] = []
    for index, (text, label) in enumerate(zip(policies, labels, strict=True)):
        with console.progress(f"simulate {label}", len(workload)) as progress:
            run = scenario.with_(policy=text).run(
                lambda done, total, now_s, p=progress: p.update(done, f"{now_s:.1f} s simulated", total=total)
            )
        run.config["cost_model"] = prices.to_json()  # a run carries all that its replay needs
        run.meta = provenance()
        folder = output_dir / run_name(index, label)
        write_run(folder, run)
        results.append({"policy": label, "run": folder, "summary": run.summary})
        rows.append(row_of(label, folder, run.summary, results[0]["summary"]))
    console.table(COLUMNS, rows, title=f"simulated ({prices.kind} cost model)")
    for line in watch.warnings():
        console.warn(line)
    console.wrote(output_dir, f"{len(results)} run directories")
    console.next(f"aspire tune --cost-model {scenario.cost_model}  with the same workload options")
    console.result({"runs": results, "extrapolated": watch.extrapolated()})


def run_name(index: int, label: str) -> str:
    """A folder name for the policy ``label``."""
    return f"{index:02d}-" + "".join(letter if letter.isalnum() or letter in "-=." else "_" for letter in label)


def row_of(label: str, folder: Path, summary: dict[str, Any], first: dict[str, Any]) -> list[Any]:
    """The table row of a run under `COLUMNS`."""
    rate, base = summary.get("decode_only_throughput"), first.get("decode_only_throughput")
    return [
        label,
        rate,
        f"{rate / base:.2f}x" if rate and base else None,
        summary.get("mean_ttft_ms"),
        summary.get("mean_tpot_ms"),
        summary.get("acceptance_length"),
        summary.get("goodput_share"),
        str(folder),
    ]
