"""Options for what to generate from and how tokens are drawn; shared by generate, bench and acceptance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aspire.cli.console import Console
from aspire.cli.options import OnError
from aspire.prompts import Prompt, load_prompts

if TYPE_CHECKING:
    from aspire import SamplingParams

DEFAULT_INPUT_LEN = 2048


def prompt_choice(
    dataset_name: Annotated[
        str | None,
        typer.Option(
            "--dataset-name",
            help="docs or source-code (real text, no download), jsonl, trace (lengths of a trace), or random.",
            show_default="docs, or jsonl with --dataset-path",
        ),
    ] = None,
    dataset_path: Annotated[
        Path | None, typer.Option("--dataset-path", help="JSONL file of prompts, or a trace.", show_default=False)
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", min=1, help="Number of prompts.", show_default="8, or all of a file")
    ] = None,
    input_len: Annotated[
        int | None, typer.Option("--input-len", min=1, help="Prompt tokens.", show_default="2048, or as in the file")
    ] = None,
    output_len: Annotated[
        int, typer.Option("--output-len", "--max-tokens", min=1, help="Most tokens to generate per prompt.")
    ] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Only the K likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Smallest set of tokens with this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option("--min-p", help="Tokens at least this likely, relative to the best.")] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End the text before this string (repeatable).")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")] = False,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Wrap questions in the chat template.")] = True,
    on_error: OnError = "fail",
) -> PromptChoice:
    name = dataset_name or ("jsonl" if dataset_path else "docs")
    if input_len is None and name not in ("jsonl", "trace"):
        input_len = DEFAULT_INPUT_LEN
    source = {
        "dataset_path": dataset_path,
        "num_prompts": num_prompts,
        "input_len": input_len,
        "chat": chat,
        "on_error": on_error,
    }
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "stop": tuple(stop or ()),
        "ignore_eos": ignore_eos,
        "max_tokens": output_len,
    }
    return PromptChoice(name, source, sampling)


@dataclass(frozen=True)
class PromptChoice:
    """The options as given; `prompts` and `params` need a model's tokenizer and are made when there is one."""

    dataset_name: str
    source: dict[str, Any]
    sampling: dict[str, Any]

    def prompts(
        self, tokenizer: Any, vocab_size: int, seed: int, console: Console, max_model_len: int | None = None
    ) -> list[Prompt]:
        """The prompts; says which lines of a file were skipped."""
        skipped: list[str] = []
        found = load_prompts(
            self.dataset_name,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            seed=seed,
            skipped=skipped,
            **self.source,
        )
        for line in skipped:
            console.warn(f"skipped {line}")
        return found

    def params(self, prompts: list[Prompt], seed: int) -> list[SamplingParams]:
        """Sampling parameters per prompt: its own ``max_tokens`` if it has one, and a seed of its own."""
        from aspire import SamplingParams

        shared = SamplingParams(**self.sampling)
        return [
            replace(shared, seed=seed * 1_000_003 + index, max_tokens=prompt.max_tokens or shared.max_tokens)
            for index, prompt in enumerate(prompts)
        ]
