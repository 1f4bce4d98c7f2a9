"""`aspire simulate`: what-if runs of the engine's own scheduler on a simulated clock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aspire.cli import workload_options as w
from aspire.cli.console import Console
from aspire.cli.options import Json, Quiet, Seed

COLUMNS = ("policy", "tok/s", "over first", "TTFT ms", "TPOT ms", "tokens/round", "goodput", "run")


def command(
    cost_model: w.CostModelPath = Path("cost_model.json"),
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="policy.json, or kind[:key=value,..][+selector]; repeatable. oracle: hindsight.",
            show_default="autoregressive, fixed and aspire",
        ),
    ] = None,
    acceptance: w.Acceptance = "iid:0.8",
    num_prompts: w.NumPrompts = 32,
    input_len: w.InputLen = "4096",
    output_len: w.OutputLen = "256",
    request_rate: w.RequestRate = "inf",
    burstiness: w.Burstiness = 1.0,
    trace: w.Trace = None,
    time_scale: w.TimeScale = 1.0,
    length_scale: w.LengthScale = 1.0,
    limit: w.Limit = None,
    max_num_seqs: w.MaxNumSeqs = None,
    max_num_batched_tokens: w.MaxNumBatchedTokens = None,
    max_model_len: w.MaxModelLen = None,
    num_pages: w.NumPages = None,
    max_concurrency: w.MaxConcurrency = None,
    goodput: w.Goodput = None,
    noise: Annotated[float, typer.Option("--noise", min=0.0, help="Spread of step times around the prediction.")] = 0.0,
    strict_range: w.StrictRange = False,
    output_dir: w.OutputDir = Path("runs/simulate"),
    seed: Seed = 0,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Simulate policies on a workload; writes one run directory per policy and prints a table."""
    from aspire.evidence import provenance
    from aspire.rundir import write_run
    from aspire_simulator.acceptance import parse_acceptance
    from aspire_simulator.executor import simulate
    from aspire_simulator.metrics import parse_goodput, summarize
    from aspire_simulator.oracle import parse_policy

    console = Console(quiet=quiet, json=json)
    specs = [parse_policy(text) for text in policy or ("autoregressive", "fixed", "aspire")]
    limits = parse_goodput(goodput) if goodput else None
    accepting = parse_acceptance(acceptance)
    prices = w.open_cost_model(cost_model, strict_range=strict_range, warn=console.warn)
    workload = w.build_workload(
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        request_rate=request_rate,
        burstiness=burstiness,
        seed=seed,
        trace=trace,
        time_scale=time_scale,
        length_scale=length_scale,
        limit=limit,
    )
    config = w.scheduler_config(
        prices,
        workload,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        num_pages=num_pages,
    )
    kind = f"{accepting.label} acceptance, {prices.file.kind} cost model"
    console.say(f"{len(workload)} requests of {workload.name}, {kind}")
    rows: list[list[Any]] = []
    results: list[dict[str, Any]] = []
    for index, spec in enumerate(specs):
        with console.progress(f"simulate {spec.label}", len(workload)) as progress:
            run = simulate(
                workload,
                spec,
                prices,
                accepting,
                config,
                seed=seed,
                noise=noise,
                max_concurrency=max_concurrency,
                progress=lambda done, total, now_s, p=progress: p.update(done, f"{now_s:.1f} s simulated", total=total),
            )
        run.config["cost_model"] = str(cost_model)
        run.meta = provenance()
        run.summary = summarize(run, goodput=limits)
        folder = output_dir / run_name(index, spec.label)
        write_run(folder, run)
        results.append({"policy": spec.label, "run": folder, "summary": run.summary})
        rows.append(row_of(spec.label, folder, run.summary, results[0]["summary"]))
    console.table(COLUMNS, rows, title="simulated")
    console.wrote(output_dir, f"{len(results)} run directories")
    console.next(f"aspire tune --cost-model {cost_model} --acceptance {acceptance}")
    console.result({"runs": results, "extrapolated": dict(prices.extrapolated)})


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
