"""Prompts for profile, bench, generate and the demo: files of prompts, and real long text that needs no download.

    docs         chapters of the Python language reference, which ship with CPython (`pydoc_data.topics`)
    source-code  modules of Python's standard library
    jsonl        a file: one JSON object a line with ``prompt``, ``question``, ``messages`` or ``prompt_token_ids``
    trace        a trace of requests in a format that `aspire trace stats` reads: docs, cut to the trace's lengths
    random       random token ids: for shapes without weights, never for measuring acceptance

Deterministic: the same arguments give the same prompts.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from aspire.errors import InputError, UsageError, check_choice

DATASETS = ("docs", "source-code", "jsonl", "trace", "random")
ON_ERROR = ("fail", "skip")

_QUESTIONS = (
    "Summarize the text above in a few paragraphs.",
    "Explain the most important rules in the text above, with examples.",
    "List the main points of the text above and explain each.",
    "Write an introduction for beginners to what the text above describes.",
    "Which questions does the text above answer? Answer three of them.",
)
_SEPARATOR = "\n\n"


class Tokenizer(Protocol):
    """What is needed of a tokenizer (transformers' have it)."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]:
        """Token ids of ``text``."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: its text, its token ids where a length mattered, and its ``max_tokens`` if the file says."""

    prompt_id: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class _Limits:
    """What a model takes: token ids below ``vocab_size``, fewer than ``max_model_len`` of them; None = not checked."""

    vocab_size: int | None
    max_model_len: int | None
    tokenizer: Tokenizer | None

    def checked(self, prompt: Prompt) -> Prompt:
        """``prompt``, with its tokens where they had to be counted; raises ValueError for one that cannot run."""
        vocab, longest = self.vocab_size, self.max_model_len
        if prompt.token_ids is not None and vocab is not None:
            for token in prompt.token_ids:
                if token >= vocab:
                    raise ValueError(f"token id {token}; the model's vocabulary is 0..{vocab - 1}")
        if longest is not None and prompt.token_ids is None and self.tokenizer is not None:
            prompt = replace(prompt, token_ids=tuple(self.tokenizer.encode(prompt.text or "")))
        if longest is not None and prompt.token_ids is not None and len(prompt.token_ids) >= longest:
            raise ValueError(
                f"{len(prompt.token_ids)} tokens; max-model-len {longest} leaves no room for output, shorten the prompt"
            )
        return prompt


def load_prompts(
    dataset_name: str,
    *,
    tokenizer: Tokenizer | None = None,
    dataset_path: str | Path | None = None,
    num_prompts: int | None = None,
    input_len: int | None = None,
    vocab_size: int | None = None,
    max_model_len: int | None = None,
    seed: int = 0,
    chat: bool = True,
    on_error: str = "fail",
    skipped: list[str] | None = None,
) -> list[Prompt]:
    """``num_prompts`` prompts of data set ``dataset_name``, each of exactly ``input_len`` tokens when that is given.

    ``vocab_size`` and ``max_model_len`` are the model's; a line that they forbid counts as malformed. Requests of a
    trace are cut to ``max_model_len``.

    ``chat`` wraps real text in the tokenizer's chat template where it has one. With ``on_error`` skip, malformed lines
    of a file are left out and described in ``skipped``. Raises `InputError` or `UsageError`.
    """
    check_choice("--dataset-name", dataset_name, DATASETS)
    check_choice("--on-error", on_error, ON_ERROR)
    if num_prompts is not None and num_prompts < 1:
        raise UsageError(f"--num-prompts {num_prompts} is too small; give a number >= 1")
    if input_len is not None and input_len < 1:
        raise UsageError(f"--input-len {input_len} is too small; give a number of tokens >= 1")
    if (dataset_name in ("jsonl", "trace")) != (dataset_path is not None):
        raise UsageError("--dataset-name jsonl and trace need --dataset-path FILE, and only they take one")
    if dataset_name == "random":
        return _random_prompts(num_prompts or 1, input_len or 1024, vocab_size, seed)
    if dataset_name == "trace" and dataset_path is not None:
        if input_len is not None:
            raise UsageError("--input-len has no meaning for --dataset-name trace: lengths are those of the trace")
        return _trace_prompts(dataset_path, _tokenizer_for(dataset_name, tokenizer), num_prompts, max_model_len, seed)
    if dataset_path is not None:
        limits = _Limits(vocab_size, None if input_len else max_model_len, tokenizer)  # longer ones are cut
        prompts = read_jsonl(
            dataset_path, tokenizer=tokenizer, chat=chat, on_error=on_error, skipped=skipped, limits=limits
        )
        if num_prompts is not None:
            prompts = [prompts[index % len(prompts)] for index in range(num_prompts)]
        return [_cut(prompt, input_len, tokenizer) for prompt in prompts] if input_len else prompts
    texts = _docs() if dataset_name == "docs" else _source_code()
    tokenizer = _tokenizer_for(dataset_name, tokenizer)
    return _long_prompts(texts, tokenizer, num_prompts or 8, input_len or 2048, seed, chat)


def _tokenizer_for(dataset_name: str, tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise UsageError(f"data set '{dataset_name}' needs a model with a tokenizer; use --dataset-name random")
    return tokenizer


def read_jsonl(
    path: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    chat: bool = True,
    on_error: str = "fail",
    skipped: list[str] | None = None,
    limits: _Limits | None = None,
) -> list[Prompt]:
    """All prompts of a JSONL file. A malformed line raises `InputError` with its number, or is skipped and noted."""
    source = Path(path)
    try:
        lines = source.read_bytes().splitlines()
    except FileNotFoundError:
        raise InputError(f"prompt file {source} does not exist; check --dataset-path") from None
    except OSError as error:
        raise InputError(f"prompt file {source} cannot be read: {error.strerror or error}") from error
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse_line(line, number, tokenizer, chat)
            if prompt.prompt_id in seen:
                raise ValueError(f"id '{prompt.prompt_id}' was used on line {seen[prompt.prompt_id]} already")
            if limits is not None:
                prompt = limits.checked(prompt)
        except ValueError as error:
            problem = f"{source} line {number}: {error}"
            if on_error == "fail":
                raise InputError(f"{problem}; mend the line or use --on-error skip") from error
            if skipped is not None:
                skipped.append(problem)
            continue
        seen[prompt.prompt_id] = number
        prompts.append(prompt)
    if not prompts:
        raise InputError(f'prompt file {source} holds no prompt; write a line such as {{"prompt": "..."}}')
    return prompts


def _parse_line(line: bytes, number: int, tokenizer: Tokenizer | None, chat: bool) -> Prompt:
    """Raises ValueError (json.JSONDecodeError and UnicodeDecodeError are such) that says what is wrong."""
    record = json.loads(line.decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"holds {type(record).__name__}, not a JSON object")
    prompt_id = str(record.get("id", record.get("request_id", f"line-{number}")))
    max_tokens = record.get("max_tokens", record.get("output_len"))
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError(f"max_tokens {max_tokens!r} is not a whole number >= 1")
    if "prompt_token_ids" in record:
        ids = record["prompt_token_ids"]
        if not isinstance(ids, list) or not ids or any(type(token) is not int or token < 0 for token in ids):
            raise ValueError("prompt_token_ids is not a list of token ids")
        return Prompt(prompt_id, token_ids=tuple(ids), max_tokens=max_tokens)
    if "messages" in record:
        text = _chat_text(_checked_messages(record["messages"]), tokenizer)
        return Prompt(prompt_id, text=text, max_tokens=max_tokens)
    for key in ("prompt", "question", "problem", "text"):
        if key in record:
            text = record[key]
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{key} is not a text, or is empty")
            if chat and key in ("question", "problem"):
                text = _chat_text([{"role": "user", "content": text}], tokenizer)
            return Prompt(prompt_id, text=text, max_tokens=max_tokens)
    raise ValueError("has none of prompt, question, problem, text, messages, prompt_token_ids")


def _checked_messages(messages: Any) -> list[dict[str, str]]:
    good = (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
            for item in messages
        )
    )
    if not good:
        raise ValueError('messages is not a list of {"role": ..., "content": ...}')
    return [{"role": item["role"], "content": item["content"]} for item in messages]


def _chat_text(messages: list[dict[str, str]], tokenizer: Tokenizer | None) -> str:
    """The messages in the model's chat template; without one, their contents joined."""
    if getattr(tokenizer, "chat_template", None):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))  # type: ignore[union-attr]
    return _SEPARATOR.join(message["content"] for message in messages)


def _docs() -> list[tuple[str, str]]:
    from pydoc_data.topics import topics

    return [(name, text) for name, text in sorted(topics.items()) if len(text) > 400]


def _source_code() -> list[tuple[str, str]]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if path.stat().st_size > 4000)
    if not files:
        raise InputError(f"no Python sources in {folder}; use --dataset-name docs")
    return [(path.name, path.read_text(encoding="utf-8", errors="replace")) for path in files]


def _long_prompts(
    texts: list[tuple[str, str]], tokenizer: Tokenizer, num_prompts: int, input_len: int, seed: int, chat: bool
) -> list[Prompt]:
    """Each prompt: whole texts in a random order until long enough, cut to length, and a question at the end.

    A number stands at the beginning of each, so that none begins like another and all are prefilled.
    """
    chooser = random.Random(seed)
    prompts = []
    for index in range(num_prompts):
        question = _QUESTIONS[index % len(_QUESTIONS)]
        start = tokenizer.encode("")
        end = tokenizer.encode(_SEPARATOR + question, add_special_tokens=False)
        if chat and getattr(tokenizer, "chat_template", None):
            before, after = _chat_text([{"role": "user", "content": "\0"}], tokenizer).split("\0")
            start = tokenizer.encode(before, add_special_tokens=False)
            end = tokenizer.encode(_SEPARATOR + question + after, add_special_tokens=False)
        room = input_len - len(start) - len(end)
        if room < 1:
            least = len(start) + len(end) + 1
            raise UsageError(f"--input-len {input_len} has no room for the question; give at least {least}")
        prompts.append(
            Prompt(f"prompt-{index}", token_ids=(*start, *_body(index, texts, tokenizer, room, chooser), *end))
        )
    return prompts


def _body(
    index: int, texts: list[tuple[str, str]], tokenizer: Tokenizer, room: int, chooser: random.Random
) -> list[int]:
    """``room`` tokens: the number of the prompt and whole texts in a random order, the last one cut."""
    order = chooser.sample(range(len(texts)), len(texts))
    body = list(tokenizer.encode(f"Collection {index + 1}{_SEPARATOR}", add_special_tokens=False))
    for position in order * (1 + room * 8 // sum(len(text) for _, text in texts)):
        name, text = texts[position]
        # three characters a token is the least that ordinary text needs; longer pieces would be encoded for nothing
        piece = f"# {name}{_SEPARATOR}{text[: (room - len(body)) * 8]}{_SEPARATOR}"
        body += tokenizer.encode(piece, add_special_tokens=False)
        if len(body) >= room:
            break
    while len(body) < room:
        body += body
    return body[:room]


def _trace_prompts(
    path: str | Path, tokenizer: Tokenizer, num_prompts: int | None, max_model_len: int | None, seed: int
) -> list[Prompt]:
    """Prompts and outputs as long as those of the trace's first requests; prompts are cut to what the model allows."""
    from aspire_simulator.traces import load_trace

    trace = load_trace(path, limit=num_prompts)
    chooser, texts = random.Random(seed), _docs()
    prompts = []
    for index, (length, output) in enumerate(
        zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    ):
        if max_model_len is not None:
            output = min(output, max_model_len - 1)
            length = min(length, max_model_len - output)
        prompts.append(
            Prompt(
                f"trace-{index}", token_ids=tuple(_body(index, texts, tokenizer, length, chooser)), max_tokens=output
            )
        )
    return prompts


def _cut(prompt: Prompt, input_len: int, tokenizer: Tokenizer | None) -> Prompt:
    """The last ``input_len`` tokens of a prompt: the question stands at the end. Shorter prompts stay as they are."""
    if prompt.token_ids is not None:
        ids = prompt.token_ids
    elif tokenizer is not None:
        ids = tuple(tokenizer.encode(prompt.text or ""))
    else:
        raise UsageError("--input-len for a text file needs a model with a tokenizer")
    return Prompt(prompt.prompt_id, token_ids=ids[-input_len:], max_tokens=prompt.max_tokens)


def _random_prompts(num_prompts: int, input_len: int, vocab_size: int | None, seed: int) -> list[Prompt]:
    if vocab_size is None or vocab_size < 1:
        raise UsageError("data set 'random' needs the vocabulary size of a model")
    chooser = random.Random(seed)
    return [
        Prompt(f"prompt-{index}", token_ids=tuple(chooser.randrange(vocab_size) for _ in range(input_len)))
        for index in range(num_prompts)
    ]
