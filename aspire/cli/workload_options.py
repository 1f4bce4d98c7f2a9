"""The options that describe a what-if, shared by simulate, tune and capacity. They become one `Scenario`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aspire.cli.options import existing_file, parse_rate, shared_options
from aspire.errors import UsageError, check_choice
from aspire.fileio import read_json

if TYPE_CHECKING:
    from aspire_simulator.scenario import Scenario

TimeScale = Annotated[float, typer.Option("--time-scale", help="Multiplies arrival times.")]
LengthScale = Annotated[float, typer.Option("--length-scale", help="Multiplies lengths.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N requests.", show_default=False)]
StrictRange = Annotated[
    bool, typer.Option("--strict-range", help="Predicting outside the profiled ranges is an error, not a warning.")
]
OutputDir = Annotated[Path, typer.Option("--output-dir", "-o", help="A run directory per policy goes here.")]


def _options(
    cost_model: Annotated[
        str, typer.Option("--cost-model", help="cost_model.json, or analytic:HARDWARE:MODEL for public figures.")
    ] = "cost_model.json",
    acceptance: Annotated[
        list[str] | None,
        typer.Option(
            "--acceptance",
            help="iid:RATE, position:R,R,.., markov:A,B, beta:A,B, longbench-like, recorded:RUN_DIR, acceptance.json; "
            "repeatable as SELECTOR=MODEL.",
            show_default="iid:0.8",
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Number of requests.")] = 64,
    input_len: Annotated[
        str, typer.Option("--input-len", help="Prompt tokens: N, uniform:A:B, lognormal:MEAN:CV, zipf:E:A:B.")
    ] = "4096",
    output_len: Annotated[str, typer.Option("--output-len", help="Output tokens, in the same forms.")] = "256",
    request_rate: Annotated[str, typer.Option("--request-rate", help="Requests per second; inf: all at once.")] = "inf",
    burstiness: Annotated[
        float, typer.Option("--burstiness", help="Gamma shape of arrival gaps; 1: Poisson, less: bursty.")
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            "--dataset-path",
            help="Requests of a trace (Azure, BurstGPT, Vidur, Mooncake) or of a run directory.",
            show_default=False,
        ),
    ] = None,
    time_scale: TimeScale = 1.0,
    length_scale: LengthScale = 1.0,
    limit: Limit = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option("--max-num-seqs", min=1, help="Most requests that run at once.", show_default="as profiled"),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens", min=1, help="Most query tokens of a step.", show_default="as profiled"
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", min=2, help="Longest context in tokens.", show_default="longest request"),
    ] = None,
    num_pages: Annotated[
        int | None, typer.Option("--num-pages", min=2, help="KV pages of 16 tokens.", show_default="as profiled")
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option("--max-concurrency", min=1, help="Most requests in the system at once.", show_default=False),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Compute equal beginnings of prompts once, where the trace tells of them.",
        ),
    ] = True,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option("--num-speculative-tokens", min=0, help="Cap on the draft length.", show_default="the policy's"),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option("--goodput", help="Limits in ms, 'ttft:500 tpot:50'; counts requests that meet all."),
    ] = None,
    noise: Annotated[float, typer.Option("--noise", min=0.0, help="Spread of step times around the prediction.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")] = 0,
) -> Scenario:
    from aspire_simulator.metrics import parse_goodput
    from aspire_simulator.scenario import Scenario

    ranges = profiled_ranges(cost_model)
    seqs = max_num_seqs or ranges.get("rows") or 128
    batched = max_num_batched_tokens or max(ranges.get("query_tokens") or 8192, seqs)
    if batched < seqs:
        raise UsageError(
            f"--max-num-batched-tokens {batched} is below --max-num-seqs {seqs}: "
            "a decode step could not hold every request; raise the one or lower the other"
        )
    if goodput:
        parse_goodput(goodput)
    return Scenario(
        cost_model=cost_model,
        acceptance=acceptance_by_selector(acceptance or ["iid:0.8"]),
        dataset_path=str(trace) if trace else None,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        request_rate=parse_rate(request_rate),
        burstiness=burstiness,
        time_scale=time_scale,
        length_scale=length_scale,
        limit=limit,
        num_speculative_tokens=num_speculative_tokens,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        max_model_len=max_model_len,
        num_pages=num_pages,
        max_concurrency=max_concurrency,
        enable_prefix_caching=enable_prefix_caching,
        goodput=" ".join(goodput or ()),
        noise=noise,
        seed=seed,
    )


def acceptance_by_selector(given: list[str]) -> str | dict[str, Any]:
    """One model for all selectors, or ``SELECTOR[@BUDGET]=MODEL`` for each, a plain one standing for the others.

    A JSON file of models by selector, as `aspire acceptance` writes it, is such a set.
    """
    from aspire.scheduler import SELECTOR_KINDS
    from aspire_simulator.acceptance import acceptance_from_dict, parse_acceptance

    if len(given) == 1 and given[0].endswith(".json"):
        content = read_json(given[0], "acceptance file")
        if isinstance(content, dict) and content and "kind" not in content:
            for model in content.values():
                acceptance_from_dict(model, f"acceptance file {given[0]}")
            return content
    found: dict[str, Any] = {}
    for text in given:
        selector, equals, model = text.partition("=")
        if not equals or text.startswith("recorded:"):  # names of run directories may hold an equals sign
            selector, model = "*", text
        elif selector.partition("@")[0] != "*":
            check_choice("--acceptance selector", selector.partition("@")[0], SELECTOR_KINDS)
        if selector in found:
            raise UsageError(f"--acceptance is given twice for {'all selectors' if selector == '*' else selector}")
        parse_acceptance(model)
        found[selector] = model
    return found["*"] if list(found) == ["*"] else found


def profiled_ranges(cost_model: str) -> dict[str, int]:
    """Largest value of each feature that a cost model was measured with; {} where it is not bounded.

    Names the command that makes a cost model when the file is missing.
    """
    if cost_model.startswith("analytic:"):
        return {}
    from aspire_calibration import CostModelFile

    file = CostModelFile.load(existing_file(Path(cost_model), "cost model", "aspire calibrate"))
    return {name: int(high) for name, (_, high) in file.ranges.items()}


def scenario_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of a what-if; ``function`` receives them as one `Scenario`, its first argument."""
    return shared_options([_options], function, Scenario=Any)


class RangeWatch:
    """Warns of predictions outside the profiled ranges, once per feature, or makes them an error."""

    def __init__(self, scenario: Scenario, *, strict: bool) -> None:
        self._model = scenario.load_cost_model()
        self._model.strict_range = strict
        self._before = dict(self._model.extrapolated)

    def extrapolated(self) -> dict[str, int]:
        """Feature -> steps predicted beyond its range since the start."""
        counts = {name: count - self._before.get(name, 0) for name, count in self._model.extrapolated.items()}
        return {name: count for name, count in counts.items() if count}

    def warnings(self) -> list[str]:
        """A line per feature that left its range."""
        ranges = self._model.file.ranges
        return [
            f"cost model: {name} left its fitted range {ranges[name][0]:g}..{ranges[name][1]:g} in {count} steps; "
            "profile with larger limits for a figure one can trust"
            for name, count in self.extrapolated().items()
        ]
