"""`aspire tune`: search policies in the simulator -> policy.json with its expected gain and where it pays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aspire.cli import workload_options as w
from aspire.cli.console import Console
from aspire.cli.options import Json, Quiet, parse_ints

if TYPE_CHECKING:
    from aspire_simulator.scenario import Scenario


@w.scenario_options
def command(
    scenario: Scenario,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the best policy goes.")] = Path("policy.json"),
    objective: Annotated[str, typer.Option("--objective", help="decode, throughput or goodput.")] = "decode",
    method: Annotated[str, typer.Option("--method", help="optuna, or grid (needs no optuna).")] = "optuna",
    trials: Annotated[int, typer.Option("--trials", min=1, help="Candidates that optuna tries.")] = 60,
    repeats: Annotated[int, typer.Option("--repeats", min=2, help="Fresh seeds behind the gain's interval.")] = 5,
    kinds: Annotated[
        list[str] | None, typer.Option("--kind", help="Only these policy kinds (repeatable).", show_default="all")
    ] = None,
    selectors: Annotated[
        list[str] | None,
        typer.Option(
            "--selector", help="Page selectors to try (repeatable).", show_default="those with known acceptance"
        ),
    ] = None,
    budget_ratios: Annotated[
        list[float] | None,
        typer.Option("--budget-ratio", help="Page budgets to try, as shares of the context.", show_default="0.07"),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option("--try-max-num-seqs", help="Batch limits to try, e.g. 32,64.", show_default="--max-num-seqs"),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes on this machine.")] = 1,
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", help="Run on this Ray cluster; local: start one here.", show_default=False),
    ] = None,
    study: Annotated[
        Path | None, typer.Option("--study", help="File that makes the search resumable.", show_default=False)
    ] = None,
    break_even: Annotated[
        bool, typer.Option("--break-even/--no-break-even", help="Map where speculation pays.")
    ] = True,
    strict_range: w.StrictRange = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Search policy kind, parameters, selector and budget; autoregressive wins unless another is better."""
    from aspire_simulator.candidates import DEPTHS, SearchSpace
    from aspire_simulator.tuning import TuneSettings, tune

    console = Console(quiet=quiet, json=json)
    cap = scenario.num_speculative_tokens
    space = SearchSpace(
        **({"kinds": tuple(kinds)} if kinds else {}),
        selectors=tuple(selectors or ()),
        budget_ratios=tuple(budget_ratios or ()),
        depths=DEPTHS if cap is None else tuple(sorted({min(depth, cap) for depth in DEPTHS})),
        max_num_seqs=tuple(parse_ints("--try-max-num-seqs", batches)) if batches else (),
    )
    settings = TuneSettings(
        _with_known_selector(scenario),
        space,
        objective=objective,
        method=method,
        trials=trials,
        repeats=repeats,
        seed=scenario.seed,
        num_workers=workers,
        ray_address=ray_address,
        study=str(study) if study else None,
        map_break_even=break_even,
    )
    watch = w.RangeWatch(scenario, strict=strict_range)
    with console.progress("tune", trials) as progress:
        result = tune(
            settings,
            lambda done, total, best, value: progress.update(done, f"best {best} {value:.1f}", total=total),
        )
    result.policy.save(output)
    rows = [[trial["label"], trial["value"]] for trial in result.trials[:8]]
    console.table(["candidate", settings.metric], rows, title=f"best of {len(result.trials)} candidates (search seed)")
    limits = ", ".join(f"{name} {value}" for name, value in result.changes.items() if name != "policy")
    console.data(f"tuned policy: {result.policy.label} ({limits})")
    console.data(f"expected {settings.metric}: {result.value:.4g} (mean of {repeats} fresh seeds)")
    for gain in result.gains:
        interval = f"95 % interval {gain.low:.3f} to {gain.high:.3f}"
        console.data(f"expected gain over {gain.over}: {gain.mean:.3f}x ({interval})")
    if result.break_even is not None:
        console.data(result.break_even.sentence)
    elif result.policy.kind == "autoregressive":
        console.data("speculation does not pay for this workload on this hardware: decode autoregressively.")
    for line in watch.warnings():
        console.warn(line)
    console.wrote(output, f"policy {result.policy.label}")
    options = f"--policy {output}"
    if ":" not in scenario.cost_model:  # the engine takes measured ones only
        options += f" --cost-model {scenario.cost_model}"
    console.next(f"aspire generate {options}  or  aspire bench {options}")
    console.result(result.to_dict())


def _with_known_selector(scenario: Scenario) -> Scenario:
    """Baselines draft with a selector whose acceptance is known: the first of a set that lacks their own."""
    known = scenario.acceptance
    own = scenario.load_policy().selector
    if isinstance(known, str) or "kind" in known:
        return scenario
    if {"*", own.kind, f"{own.kind}@{own.budget_ratio:g}"} & set(known):
        return scenario
    kind, _, ratio = next(iter(known)).partition("@")
    return scenario.with_(selector=kind, budget_ratio=float(ratio) if ratio else None)
