"""Options that describe a workload and the limits of a simulated engine, shared by simulate, tune and sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aspire.cli.options import existing_file, parse_rate
from aspire.errors import UsageError

if TYPE_CHECKING:
    from aspire.scheduler import SchedulerConfig
    from aspire_calibration import LoadedCostModel
    from aspire_simulator.workload import Workload

NumPrompts = Annotated[int, typer.Option("--num-prompts", min=1, help="Number of requests.")]
InputLen = Annotated[str, typer.Option("--input-len", help="Prompt tokens: N, uniform:A:B, lognormal:MEAN:CV.")]
OutputLen = Annotated[str, typer.Option("--output-len", help="Output tokens, in the same forms.")]
RequestRate = Annotated[str, typer.Option("--request-rate", help="Requests per second; inf: all at once.")]
Burstiness = Annotated[float, typer.Option("--burstiness", help="Gamma shape of arrival gaps; 1: Poisson.")]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", help="Requests from a trace: Azure, BurstGPT, Vidur, Mooncake, or a run directory."),
]
TimeScale = Annotated[float, typer.Option("--time-scale", help="Multiplies the arrival times of a trace.")]
LengthScale = Annotated[float, typer.Option("--length-scale", help="Multiplies the lengths of a trace.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N requests of a trace.")]
Goodput = Annotated[
    list[str] | None, typer.Option("--goodput", help="Limits in ms: 'ttft:500 tpot:50'; counts requests that meet all.")
]
Acceptance = Annotated[
    str,
    typer.Option(
        "--acceptance",
        help="iid:RATE, position:R,R,.., markov:A,B, beta:A,B, longbench-like, recorded:RUN_DIR, or acceptance.json.",
    ),
]
MaxNumSeqs = Annotated[int | None, typer.Option("--max-num-seqs", min=1, help="Most requests that run at once.")]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", min=1, help="Most query tokens of a step.")
]
MaxModelLen = Annotated[int | None, typer.Option("--max-model-len", min=2, help="Longest context in tokens.")]
NumPages = Annotated[int | None, typer.Option("--num-pages", min=2, help="KV pages of 16 tokens.")]
MaxConcurrency = Annotated[
    int | None, typer.Option("--max-concurrency", min=1, help="Most requests in the system; later ones wait outside.")
]
StrictRange = Annotated[
    bool, typer.Option("--strict-range", help="Predicting outside the profiled ranges is an error, not a warning.")
]
OutputDir = Annotated[Path, typer.Option("--output-dir", "-o", help="A run directory per policy goes here.")]
CostModelPath = Annotated[
    Path, typer.Option("--cost-model", help="cost_model.json, made by aspire calibrate.", show_default=True)
]


def build_workload(
    *,
    num_prompts: int,
    input_len: str,
    output_len: str,
    request_rate: str,
    burstiness: float,
    seed: int,
    trace: Path | None,
    time_scale: float,
    length_scale: float,
    limit: int | None,
) -> Workload:
    """The workload that the options describe: a trace when one is given, drawn lengths and arrivals otherwise."""
    from aspire_simulator.traces import load_trace
    from aspire_simulator.workload import synthetic

    if trace is not None:
        return load_trace(trace, time_scale=time_scale, length_scale=length_scale, limit=limit)
    if (time_scale, length_scale, limit) != (1.0, 1.0, None):
        raise UsageError("--time-scale, --length-scale and --limit belong to --trace; give one, or leave them out")
    return synthetic(
        num_prompts, input_len, output_len, request_rate=parse_rate(request_rate), burstiness=burstiness, seed=seed
    )


def open_cost_model(path: Path, *, strict_range: bool, warn: Any) -> LoadedCostModel:
    """The cost model file ``path``; names the command that makes one when it is missing."""
    from aspire_calibration import load_cost_model

    return load_cost_model(existing_file(path, "cost model", "aspire calibrate"), strict_range=strict_range, warn=warn)


def scheduler_config(
    cost_model: LoadedCostModel,
    workload: Workload,
    *,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    max_model_len: int | None,
    num_pages: int | None,
) -> SchedulerConfig:
    """Limits of the simulated engine: as given, else the cost model's own, else what the work needs."""
    from aspire.scheduler import PAGE_TOKENS, SchedulerConfig

    file = cost_model.file
    settings = file.settings
    longest = int((workload.prompt_tokens + workload.output_tokens).max())
    seqs = max_num_seqs or int(settings.get("max_num_seqs") or 256)
    length = max_model_len or int(settings.get("max_model_len") or longest)
    batched = max_num_batched_tokens or int(settings.get("max_num_batched_tokens") or max(8192, seqs))
    pages = num_pages or file.num_pages or seqs * -(-length // PAGE_TOKENS) + 1
    return SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=max(batched, seqs) if max_num_batched_tokens is None else batched,
        max_model_len=length,
        num_pages=pages,
        num_layers=int(file.model.get("layers") or 1),
        graph_buckets=tuple(file.graph_buckets),
    )
