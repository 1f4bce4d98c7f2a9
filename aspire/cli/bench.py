"""`aspire bench`: several policies on the same prompts in one engine, autoregressive decoding among them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aspire.cli.console import Console
from aspire.cli.engine_options import EngineChoice, engine_choice
from aspire.cli.engine_session import draining, open_engine, progress_of
from aspire.cli.options import Json, Quiet, parse_rate, shared_options
from aspire.cli.prompt_options import PromptChoice, prompt_choice
from aspire.cli.report import show_comparison
from aspire.cli.simulate import run_name

if TYPE_CHECKING:
    from aspire.measure import Measured
    from aspire.scheduler import PolicySpec

AUTOREGRESSIVE = "autoregressive"
SHORT_WARMUP_TOKENS = 64


@dataclass
class _Contender:
    """A policy and its runs."""

    spec: PolicySpec
    name: str
    runs: list[Measured] = field(default_factory=list)

    def throughputs(self) -> list[float]:
        """Decode-only tok/s of every run."""
        return [float(run.run.summary.get("decode_only_throughput") or 0.0) for run in self.runs]

    def median(self) -> Measured:
        """The run with the median throughput."""
        rates = self.throughputs()
        return self.runs[sorted(range(len(rates)), key=rates.__getitem__)[(len(rates) - 1) // 2]]

    def note_repeats(self) -> None:
        """Keep the latencies of all runs in the summary of the median one: each is one sample of a first step."""
        summaries = [one.run.summary for one in self.runs]
        if len(summaries) > 1:
            names = [name for name in summaries[0] if name.endswith("_ms") and all(name in one for one in summaries)]
            self.median().run.summary["repeats"] = {name: [one[name] for one in summaries] for name in names}


def _bench(
    engine: EngineChoice,
    source: PromptChoice,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="policy.json, or kind[:key=value,..][+selector]; repeatable. autoregressive is always run.",
            show_default="autoregressive and fixed",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs per policy, in turn; the median counts.")] = 1,
    num_warmups: Annotated[
        int | None,
        typer.Option("--num-warmups", min=0, help="Warm-up requests.", show_default="all on a GPU, one short on a CPU"),
    ] = None,
    request_rate: Annotated[str, typer.Option("--request-rate", help="Requests per second; inf: all at once.")] = "inf",
    burstiness: Annotated[float, typer.Option("--burstiness", help="Gamma shape of arrival gaps; 1: Poisson.")] = 1.0,
    goodput: Annotated[list[str] | None, typer.Option("--goodput", help="Limits in ms, 'ttft:500 tpot:50'.")] = None,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="A run directory per policy and bench.json go here.")
    ] = Path("runs/bench"),
    evidence: Annotated[
        Path | None,
        typer.Option(
            "--evidence", help="Also write an evidence file, e.g. reports/h200/bench.json.", show_default=False
        ),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Measure policies on the same prompts: throughput, latency, acceptance, and whether the texts agree."""
    from aspire.fileio import write_json_atomic
    from aspire.measure import run_requests
    from aspire.rundir import write_run
    from aspire_simulator.metrics import parse_goodput, summarize
    from aspire_simulator.workload import arrivals

    console = Console(quiet=quiet, json=json)
    limits = parse_goodput(goodput) if goodput else None
    rate = parse_rate(request_rate)
    texts = policy or [AUTOREGRESSIVE, "fixed"]
    specs = [engine.policy(text) for text in texts]
    if all(spec.kind != AUTOREGRESSIVE for spec in specs):
        specs.insert(0, engine.policy(AUTOREGRESSIVE))
    specs = _without_twins(specs, console)
    contenders = [_Contender(spec, run_name(index, spec.label)) for index, spec in enumerate(specs)]
    # the first policy that needs the cost model decides early whether there is one
    llm, prices = open_engine(engine, max(specs, key=lambda spec: spec.kind != AUTOREGRESSIVE), console)
    seed = engine.settings["seed"]
    tokenizer = llm.engine.tokenizer if llm.engine.loaded.tokenizer_source is not None else None
    longest = llm.engine.scheduler_config.max_model_len
    prompts = source.prompts(tokenizer, llm.engine.loaded.config.vocab_size, seed, console, longest)
    params = source.params(prompts, seed)
    arrival_s = None if math.isinf(rate) else arrivals(len(prompts), rate, burstiness, seed).tolist()
    model_json = prices.file.to_json() if prices else None
    lengths = sorted(_length(llm, prompt) for prompt in prompts)
    console.say(
        f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, up to {params[0].max_tokens} output tokens"
    )
    with draining(console) as stop:
        for turn in range(repeats):
            for contender in contenders:
                if stop.drain:
                    break
                llm.engine.set_policy(contender.spec)
                _warm_up(llm, prompts, params, num_warmups)
                llm.engine.scheduler.set_policy(contender.spec)  # forget what it learned while warming up
                label = contender.spec.label + (f" {turn + 1}/{repeats}" if repeats > 1 else "")
                with console.progress(label, len(prompts)) as progress:
                    measured = run_requests(
                        llm.engine,
                        prompts,
                        params,
                        arrival_s=arrival_s,
                        margins=True,
                        cost_model=model_json,
                        on_progress=progress_of(progress.update),
                        signal=stop,
                    )
                measured.run.summary = summarize(measured.run, goodput=limits)
                contender.runs.append(measured)
                console.say(f"{label}: {contender.throughputs()[-1]:.1f} tok/s decode-only")
    contenders = [contender for contender in contenders if contender.runs]
    for contender in contenders:
        contender.note_repeats()
    results = [_result(contender, contenders, prices) for contender in contenders]
    for contender in contenders:
        write_run(output_dir / contender.name, contender.median().run)
    document = show_comparison(console, [(one.name, one.median().run) for one in contenders])
    for result in results:
        console.data(result.pop("sentence"))
    document |= {"policies": results, "model": llm.engine.loaded.name, "interrupted": stop.drain}
    write_json_atomic(output_dir / "bench.json", _plain(document))
    console.wrote(output_dir, f"{len(contenders)} run directories and bench.json")
    if evidence is not None:
        _write_evidence(evidence, results)
        console.wrote(evidence, "evidence file")
    console.next(f"aspire report {output_dir}" + (f"  or  aspire validate {output_dir}/*" if prices else ""))
    console.result(document)
    if stop.drain:
        raise typer.Exit(130)


def _without_twins(specs: list[PolicySpec], console: Console) -> list[PolicySpec]:
    """Each policy once, wherever its file came from."""
    from dataclasses import replace

    kept: dict[str, PolicySpec] = {}
    for spec in specs:
        key = AUTOREGRESSIVE if spec.kind == AUTOREGRESSIVE else str(replace(spec, provenance={}).to_dict())
        if key in kept:
            console.say(f"{spec.label} is given twice (the tuned policy may be it); it is run once")
        kept.setdefault(key, spec)
    return list(kept.values())


def _length(llm: Any, prompt: Any) -> int:
    return len(prompt.token_ids) if prompt.token_ids is not None else len(llm.engine.tokenizer.encode(prompt.text))


def _warm_up(llm: Any, prompts: list[Any], params: list[Any], count: int | None) -> None:
    """Compile, capture and settle: on a GPU with the real lengths, on a CPU with one short prompt."""
    from dataclasses import replace

    from aspire.measure import run_requests
    from aspire.prompts import Prompt

    on_gpu = llm.engine.device.type == "cuda"
    chosen = list(zip(prompts, params, strict=True))[: len(prompts) if on_gpu and count is None else (count or 0)]
    if not on_gpu and count is None:
        ids = prompts[0].token_ids or llm.engine.tokenizer.encode(prompts[0].text)
        chosen = [(Prompt("warm-up", token_ids=tuple(ids[-SHORT_WARMUP_TOKENS:])), params[0])]
    if chosen:
        short = [replace(one, max_tokens=min(one.max_tokens, 64 if on_gpu else 8)) for _, one in chosen]
        run_requests(llm.engine, [prompt for prompt, _ in chosen], short)


def _result(contender: _Contender, contenders: list[_Contender], prices: Any) -> dict[str, Any]:
    """What bench.json holds of one policy, with the sentence that is printed."""
    from aspire.compare import compare
    from aspire.measure import predicted_and_observed

    base = next((one for one in contenders if one.spec.kind == AUTOREGRESSIVE), contender)
    median, rates = contender.median(), contender.throughputs()
    same = compare(median.texts(), base.median().texts())
    result: dict[str, Any] = {
        "policy": contender.spec.to_dict(),
        "label": contender.spec.label,
        "run": contender.name,
        "decode_only_throughput": rates,
        "gain": sorted(rates)[(len(rates) - 1) // 2]
        / (sorted(base.throughputs())[(len(base.runs) - 1) // 2] or math.nan),
        **same.to_json(),
        "synthetic_acceptance": bool(median.run.config.get("synthetic_acceptance")),
        "summary": median.run.summary,
    }
    words = []
    if contender is not base:
        words.append(f"{same.equal} of {same.compared} outputs equal autoregressive decoding")
        if same.differences:
            words.append(same.first_difference)
    if prices is not None:
        check = predicted_and_observed(median.run, prices)
        result["cost_model_check"] = check
        if check:
            words.append(
                f"predicted {check['predicted_tok_s']:.1f} tok/s for these steps, "
                f"observed {check['observed_tok_s']:.1f} ({check['signed_run_error']:+.1%} in time)"
            )
    result["sentence"] = f"{contender.spec.label}: {'; '.join(words) if words else 'the baseline'}"
    return result


def _write_evidence(path: Path, results: list[dict[str, Any]]) -> None:
    from aspire.evidence import write_evidence

    rows = []
    for result in results:
        rates = result["decode_only_throughput"]
        spread = (max(rates) - min(rates)) / max(rates) if len(rates) > 1 and max(rates) else None
        kept = ("policy", "gain", "equal_outputs", "compared_outputs", "differences", "margin_shift", "summary")
        detail = {key: result[key] for key in kept}
        rows.append(
            {
                "id": f"bench.{result['label']}.decode_tok_s",
                "value": sorted(rates)[(len(rates) - 1) // 2],
                "unit": "tok/s",
                "n": len(rates),
                "spread": spread,
                "detail": _plain({**detail, "synthetic_acceptance": result["synthetic_acceptance"]}),
            }
        )
    write_evidence(path, rows)


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    from aspire.cli.console import plain

    return dict(plain(document))


command = shared_options([engine_choice, prompt_choice], _bench, EngineChoice=EngineChoice, PromptChoice=PromptChoice)
