"""`aspire capacity`: the highest request rate that keeps the limits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aspire.cli import workload_options as w
from aspire.cli.console import Console
from aspire.cli.options import Json, Quiet

if TYPE_CHECKING:
    from aspire_simulator.scenario import Scenario


@w.scenario_options
def command(
    scenario: Scenario,
    policy: Annotated[str, typer.Option("--policy", help="policy.json, or kind[:key=value,..][+selector].")] = "aspire",
    attainment: Annotated[
        float, typer.Option("--attainment", help="Share of requests that must meet the limits.")
    ] = 0.95,
    start_rate: Annotated[float, typer.Option("--start-rate", help="First request rate that is tried.")] = 1.0,
    tolerance: Annotated[float, typer.Option("--tolerance", help="Relative width at which bisection stops.")] = 0.05,
    max_probes: Annotated[int, typer.Option("--max-probes", min=2, help="Most simulations.")] = 20,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the result as JSON.", show_default=False)
    ] = None,
    strict_range: w.StrictRange = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Find by bisection the highest request rate at which enough requests meet --goodput."""
    from aspire.fileio import write_json_atomic
    from aspire_simulator.capacity import find_capacity

    console = Console(quiet=quiet, json=json)
    watch = w.RangeWatch(scenario, strict=strict_range)
    found = find_capacity(
        scenario.with_(policy=policy),
        attainment=attainment,
        start_rate=start_rate,
        tolerance=tolerance,
        max_probes=max_probes,
        progress=lambda probe: console.say(
            f"{probe.request_rate:.3g} requests/s: {probe.goodput_share:.1%} meet the limits"
        ),
    )
    rows = [[probe.request_rate, probe.goodput_share, probe.met] for probe in sorted(found.probes, key=_rate)]
    console.table(["requests/s", "share that meets the limits", "met"], rows)
    console.data(
        f"capacity: {found.request_rate:.4g} requests/s ({attainment:.0%} of requests meet {scenario.goodput})"
    )
    if found.note:
        console.data(f"note: {found.note}")
    for line in watch.warnings():
        console.warn(line)
    document = {"policy": policy, "goodput": scenario.goodput, **found.to_dict(), "scenario": scenario.to_dict()}
    if output is not None:
        write_json_atomic(output, document)
        console.wrote(output, "capacity")
    console.next(f"aspire simulate --cost-model {scenario.cost_model} --request-rate {found.request_rate:.4g}")
    console.result(document)


def _rate(probe: object) -> float:
    return float(probe.request_rate)  # type: ignore[attr-defined]
