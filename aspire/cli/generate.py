"""`aspire generate`: run the engine under a policy -> outputs.jsonl and a run directory."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aspire.cli.console import Console
from aspire.cli.engine_options import EngineChoice, engine_choice
from aspire.cli.engine_session import draining, open_engine, progress_of
from aspire.cli.options import Json, Quiet, shared_options
from aspire.cli.prompt_options import PromptChoice, prompt_choice
from aspire.errors import InputError, UsageError

if TYPE_CHECKING:
    from aspire import RequestOutput
    from aspire.prompts import Prompt


def _generate(
    engine: EngineChoice,
    source: PromptChoice,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="A prompt (repeatable), instead of a data set.")
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", help="policy.json, or kind[:key=value,..][+selector].")
    ] = "autoregressive",
    decode: Annotated[
        str, typer.Option("--decode", help="exact, or delta: from a few pages of the context, lossy.")
    ] = "exact",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON lines, one per finished request.", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Only the requests that --output lacks.")] = False,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", help="Run directory to write.", show_default=False)
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Generate text. The output is that of autoregressive decoding with the same seed, whatever the policy, unless
    --decode delta asks for a faster, lossy one."""
    from dataclasses import replace

    from aspire.measure import predicted_and_observed, run_requests
    from aspire.prompts import Prompt

    console = Console(quiet=quiet, json=json)
    spec = engine.policy(policy)
    engine = replace(engine, settings={**engine.settings, "decode": decode})
    if resume and output is None:
        raise UsageError("--resume needs --output: the file whose missing requests are to be generated")
    done = _finished(output, resume)
    llm, prices = open_engine(engine, spec, console)
    seed = engine.settings["seed"]
    if prompt:
        prompts = [Prompt(f"prompt-{index}", text=_chat(llm, text, source)) for index, text in enumerate(prompt)]
    else:
        vocab_size, longest = llm.engine.loaded.config.vocab_size, llm.engine.scheduler_config.max_model_len
        prompts = source.prompts(_tokenizer(llm), vocab_size, seed, console, longest)
    params = source.params(prompts, seed)
    todo = [index for index, one in enumerate(prompts) if one.prompt_id not in done]
    if not todo:
        console.say(f"all {len(prompts)} requests are in {output} already")
        return
    names = {one.prompt_id: one for one in prompts}
    writer = _Writer(output, names)
    with draining(console) as stop, console.progress("generate", len(todo)) as progress:
        measured = run_requests(
            llm.engine,
            [prompts[index] for index in todo],
            [params[index] for index in todo],
            cost_model=prices.file.to_json() if prices else None,
            on_finish=writer.add,
            on_progress=progress_of(progress.update),
            signal=stop,
        )
    outputs = [one for one in measured.outputs if one is not None]
    summary = _summary(measured.run)
    if prices is not None:
        summary["cost_model_check"] = predicted_and_observed(measured.run, prices)
    for one in outputs:
        if output is None or prompt:
            console.data(f"--- {one.request_id} ({_reason(one)})\n{one.outputs[0].text}")
    failed = [one for one in outputs if one.outputs[0].finish_reason == "error"]
    for one in failed:
        console.warn(f"request '{one.request_id}' failed: its logits were not finite; the others went on")
    label = str(measured.run.config["policy_label"])
    _say_rates(console, label, summary)
    if output is not None:
        console.wrote(output, f"{len(outputs)} outputs")
    if output_dir is not None:
        from aspire.rundir import write_run

        measured.run.summary = summary
        write_run(output_dir, measured.run)
        console.wrote(output_dir, "run directory")
        console.next(f"aspire validate {output_dir}" if prices else f"aspire report {output_dir}")
    records = [_record(one, names) for one in outputs]
    console.result({"policy": label, "outputs": records, "summary": summary})
    if failed or len(outputs) < len(todo):
        left = len(todo) - len(outputs) + len(failed)
        more = f"; run again with --resume --output {output}" if output else ""
        console.warn(f"{left} of {len(todo)} requests did not finish{more}")
        raise typer.Exit(1)


def _summary(run: Any) -> dict[str, Any]:
    from aspire_simulator.metrics import summarize

    return summarize(run)


def _tokenizer(llm: Any) -> Any:
    return llm.engine.tokenizer if llm.engine.loaded.tokenizer_source is not None else None


def _chat(llm: Any, text: str, source: PromptChoice) -> str:
    if not text.strip():
        raise InputError("--prompt is empty; give some text")
    tokenizer = llm.engine.tokenizer
    if not source.source["chat"] or not tokenizer.chat_template:
        return text
    return str(tokenizer.apply_chat_template([{"role": "user", "content": text}]))


def _say_rates(console: Console, label: str, summary: dict[str, Any]) -> None:
    rate = summary.get("decode_only_throughput")
    accepted = summary.get("acceptance_length")
    drafts = f", {accepted:.2f} tokens per verification" if accepted else ""
    console.say(
        f"{label}: {summary['total_output_tokens']} tokens in {summary['duration']:.2f} s, "
        f"{rate:.1f} tok/s decode-only{drafts}"
        if rate
        else f"{label}: {summary['total_output_tokens']} tokens in {summary['duration']:.2f} s"
    )
    check = summary.get("cost_model_check")
    if check:
        console.say(
            f"predicted {check['predicted_tok_s']:.1f} tok/s, observed {check['observed_tok_s']:.1f} tok/s "
            f"(step time {check['signed_run_error']:+.1%})"
        )


def _reason(output: RequestOutput) -> str:
    marks = (", synthetic acceptance" if output.synthetic else "") + (", lossy" if output.lossy else "")
    one = output.outputs[0]
    return f"{len(one.token_ids)} tokens, {one.finish_reason}{marks}"


def _record(output: RequestOutput, prompts: dict[str, Prompt]) -> dict[str, Any]:
    one = output.outputs[0]
    prompt = prompts[output.request_id]
    record: dict[str, Any] = {"id": output.request_id, "text": one.text, "token_ids": list(one.token_ids)}
    record |= {"finish_reason": one.finish_reason, "prompt_tokens": len(output.prompt_token_ids)}
    if prompt.text is not None:
        record["prompt"] = prompt.text
    if output.synthetic:
        record["synthetic_acceptance"] = True
    if output.lossy:
        record["lossy"] = True
    return record


class _Writer:
    """Appends a whole line per finished request, so that a killed run keeps what it finished."""

    def __init__(self, path: Path | None, prompts: dict[str, Prompt]) -> None:
        self._path = path
        self._prompts = prompts

    def add(self, output: RequestOutput) -> None:
        """Write the record of ``output``; failed requests are left out, so that --resume tries them again."""
        if self._path is None or output.outputs[0].finish_reason in ("abort", "error"):
            return
        line = json_module.dumps(_record(output, self._prompts), ensure_ascii=False) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as stream:
                stream.write(line.encode())
        except OSError as error:
            raise InputError(
                f"cannot append to {self._path}: {error.strerror or error}; free space or choose another --output"
            ) from error


def _finished(path: Path | None, resume: bool) -> set[str]:
    """Ids in an output file to be continued; a torn last line (a killed run) is cut off."""
    if path is None or not path.exists() or path.is_char_device() or path.is_fifo():
        return set()
    if not resume:
        raise UsageError(f"{path} exists; continue it with --resume, or choose another --output")
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    ids = set()
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            ids.add(str(json_module.loads(line)["id"]))
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path} line {number} is not an output record; choose another --output") from None
    if len(whole) < len(raw):
        with path.open("r+b") as stream:
            stream.truncate(len(whole))
    return ids


command = shared_options(
    [engine_choice, prompt_choice], _generate, EngineChoice=EngineChoice, PromptChoice=PromptChoice
)
