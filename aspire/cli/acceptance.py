"""`aspire acceptance`: which drafts are accepted, by selector, budget, draft position and request, on real prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aspire.cli.console import Console
from aspire.cli.engine_options import EngineChoice, engine_choice
from aspire.cli.engine_session import draining, open_engine, progress_of
from aspire.cli.options import Json, Quiet, parse_shares, shared_options
from aspire.cli.prompt_options import PromptChoice, prompt_choice
from aspire.cli.simulate import run_name
from aspire.errors import InputError, UsageError

if TYPE_CHECKING:
    from aspire.rundir import Run

SHOWN_POSITIONS = (1, 2, 4, 8, 16)


def _acceptance(
    engine: EngineChoice,
    source: PromptChoice,
    selectors: Annotated[
        str, typer.Option("--selectors", help="Page selectors to measure, e.g. verify,window.")
    ] = "window,verify,verify-per-layer,refresh,refresh-per-layer",
    budget_ratios: Annotated[
        str, typer.Option("--budget-ratios", help="Page budgets to measure, as shares of the context.")
    ] = "0.07",
    min_pages: Annotated[int, typer.Option("--min-pages", min=1, help="Least pages of a budget.")] = 32,
    draft_length: Annotated[int, typer.Option("--draft-length", min=1, max=16, help="Drafts of a round.")] = 10,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=1,
            help="End every request after so many rounds, so that all weigh the same.",
            show_default="to the end of the text",
        ),
    ] = None,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Run directories and acceptance.json go here.")
    ] = Path("runs/acceptance"),
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw acceptance by draft position.", show_default=False)
    ] = None,
    evidence: Annotated[
        Path | None,
        typer.Option("--evidence", help="Also write an evidence file, e.g. reports/h200/acceptance.json."),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Measure acceptance with fixed drafts; writes acceptance.json, which tune and simulate read.

    The prompts are first decoded autoregressively, and every text is compared with that.
    """
    from dataclasses import replace

    from aspire.acceptance import AcceptanceStudy
    from aspire.fileio import write_json_atomic
    from aspire.rundir import write_run
    from aspire.scheduler import PolicySpec, SelectorSpec
    from aspire_simulator.fitting import fit_acceptance

    console = Console(quiet=quiet, json=json)
    kinds = [part.strip() for part in selectors.split(",") if part.strip()]
    shares = parse_shares("--budget-ratios", budget_ratios)
    if not kinds:
        raise UsageError("--selectors is empty; give at least one, e.g. --selectors verify,window")
    if engine.policy_changes:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in engine.policy_changes)
        raise UsageError(
            f"{given} does not say what acceptance measures; use --selectors, --budget-ratios and --draft-length"
        )
    if source.sampling["stop"]:
        raise UsageError("--stop has no effect on acceptance; leave it out")
    settings = [SelectorSpec(kind, share, min_pages) for kind in kinds for share in shares]
    llm, _ = open_engine(engine, PolicySpec(), console)
    if llm.engine.config.synthetic_acceptance_rates is not None:
        raise UsageError("--synthetic-acceptance-rates draws acceptance; leave it out to measure it")
    seed = engine.settings["seed"]
    tokenizer = llm.engine.tokenizer if llm.engine.loaded.tokenizer_source is not None else None
    prompts = source.prompts(tokenizer, llm.engine.loaded.config.vocab_size, seed, console)
    params = [replace(one, detokenize=False, stop=()) for one in source.params(prompts, seed)]
    rows, models, results = [], {}, []
    runs: list[tuple[str, Run]] = []
    with draining(console) as stop:
        study = AcceptanceStudy(llm.engine, prompts, params, draft_length=draft_length, rounds=rounds, signal=stop)
        with console.progress("autoregressive", len(prompts)) as progress:
            study.plain(progress_of(progress.update))
        for index, selector in enumerate(settings):
            if stop.drain:
                break
            label = f"{selector.kind}@{selector.budget_ratio:g}"
            with console.progress(label, len(prompts)) as progress:
                found = study.measure(selector, progress_of(progress.update))
            name = run_name(index, label)
            write_run(output_dir / name, found.run)
            runs.append((name, found.run))
            result = {**found.to_json(), "selector": label}
            try:
                fit = fit_acceptance(output_dir / name)
                models[label] = fit.model.to_dict()
                result["fit"] = fit.to_dict()
            except InputError as error:
                console.warn(f"{label}: {error}")
            results.append(result)
            rows.append(_row(result, draft_length))
    shown = [position for position in SHOWN_POSITIONS if position <= draft_length]
    columns = ["selector", "rounds", f"accepted of {draft_length}", "least request", "most request", "rate"]
    console.table([*columns, *(f"at {position}" for position in shown), "margin AUC", "equal texts"], rows)
    write_json_atomic(output_dir / "acceptance.json", models)
    console.wrote(output_dir / "acceptance.json", f"{len(models)} acceptance models by selector and budget")
    if figure is not None:
        _draw(figure, runs)
        console.wrote(figure, "acceptance by draft position")
    if evidence is not None:
        _write_evidence(evidence, results)
        console.wrote(evidence, "evidence file")
    console.next(f"aspire tune --acceptance {output_dir / 'acceptance.json'}")
    console.result({"output_dir": output_dir, "results": results})


def _row(result: dict[str, Any], draft_length: int) -> list[Any]:
    by_request, by_position = result["accepted_by_request"], result["acceptance_by_position"]
    shown = [position for position in SHOWN_POSITIONS if position <= draft_length]
    at = [by_position[position - 1] if position <= len(by_position) else None for position in shown]
    ends = [min(by_request), max(by_request)] if by_request else [None, None]
    auc = result.get("fit", {}).get("margin_auc")
    share = result["text_equal_share"]
    rate = result["acceptance_rate"]
    return [result["selector"], result["rounds"], result["accepted_mean"], *ends, rate, *at, auc, share]


def _draw(path: Path, runs: list[tuple[str, Run]]) -> None:
    from aspire_simulator import figures
    from aspire_simulator.comparison import compare

    figures.save(figures.acceptance_curves(compare(runs)), path)


def _write_evidence(path: Path, results: list[dict[str, Any]]) -> None:
    from aspire.cli.console import plain
    from aspire.evidence import write_evidence

    rows = [
        {
            "id": f"acceptance.{result['selector']}",
            "value": result["accepted_mean"],
            "unit": "drafts a round",
            "n": result["rounds"],
            "spread": [min(result["accepted_by_request"]), max(result["accepted_by_request"])],
            "detail": plain(result),
        }
        for result in results
        if result["accepted_by_request"]
    ]
    write_evidence(path, rows)


command = shared_options(
    [engine_choice, prompt_choice], _acceptance, EngineChoice=EngineChoice, PromptChoice=PromptChoice
)
