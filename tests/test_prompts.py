"""Prompt sources: real long text of exact length, files with malformed lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from aspire.errors import InputError, UsageError
from aspire.prompts import load_prompts, read_jsonl


class Letters:
    """One token a character; a chat template of brackets."""

    chat_template = "template"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


@pytest.mark.parametrize("name", ["docs", "source-code"])
@pytest.mark.parametrize("input_len", [300, 5000])
def test_long_text_has_exact_length_and_ends_with_a_question(name: str, input_len: int) -> None:
    tokenizer = Letters()
    prompts = load_prompts(name, tokenizer=tokenizer, num_prompts=3, input_len=input_len, seed=4)
    texts = [tokenizer.decode(prompt.token_ids or ()) for prompt in prompts]
    assert [len(text) for text in texts] == [input_len] * 3
    for index, text in enumerate(texts):
        assert text.startswith(f"<user>Collection {index + 1}\n"), "none begins like another"
        assert text.endswith("<assistant>")


def test_prompts_depend_on_the_seed_alone() -> None:
    once, again, other = (
        load_prompts("docs", tokenizer=Letters(), num_prompts=2, input_len=500, seed=seed) for seed in (1, 1, 2)
    )
    assert once == again != other


def test_prompt_longer_than_all_text_repeats_it() -> None:
    (prompt,) = load_prompts("docs", tokenizer=Letters(), num_prompts=1, input_len=1_500_000)
    assert prompt.token_ids is not None and len(prompt.token_ids) == 1_500_000


def test_random_needs_no_tokenizer() -> None:
    prompts = load_prompts("random", num_prompts=2, input_len=64, vocab_size=50)
    assert [len(prompt.token_ids or ()) for prompt in prompts] == [64, 64]
    assert all(0 <= token < 50 for prompt in prompts for token in prompt.token_ids or ())


def _file(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_jsonl_forms(tmp_path: Path) -> None:
    path = _file(
        tmp_path / "p.jsonl",
        {"prompt": "plain", "max_tokens": 7},
        {"question": "why?", "id": "q"},
        {"messages": [{"role": "user", "content": "hi"}]},
        "",
        {"prompt_token_ids": [1, 2]},
    )
    prompts = read_jsonl(path, tokenizer=Letters())
    assert [prompt.text for prompt in prompts] == ["plain", "<user>why?<assistant>", "<user>hi<assistant>", None]
    assert [prompt.prompt_id for prompt in prompts] == ["line-1", "q", "line-3", "line-5"]
    assert prompts[0].max_tokens == 7 and prompts[3].token_ids == (1, 2)
    assert read_jsonl(path, tokenizer=Letters(), chat=False)[1].text == "why?"
    cut = load_prompts("jsonl", dataset_path=path, tokenizer=Letters(), input_len=3, num_prompts=6)
    assert [len(prompt.token_ids or ()) for prompt in cut] == [3, 3, 3, 2, 3, 3]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "line 2"),
        ("[1]", "not a JSON object"),
        ('{"prompt": ""}', "is empty"),
        ('{"prompt": 3}', "not a text"),
        ('{"other": "x"}', "has none of prompt"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens 0"),
        ('{"messages": [{"role": "user"}]}', "messages is not a list"),
        ('{"prompt_token_ids": [1, -2]}', "not a list of token ids"),
        ('{"prompt": "x", "id": "first"}', "was used on line 1"),
    ],
)
def test_malformed_line_is_named_or_skipped(tmp_path: Path, line: str, reason: str) -> None:
    path = _file(tmp_path / "p.jsonl", {"prompt": "good", "id": "first"}, line, {"prompt": "good too"})
    with pytest.raises(InputError, match="line 2") as caught:
        read_jsonl(path)
    assert reason in str(caught.value)
    skipped: list[str] = []
    assert len(read_jsonl(path, on_error="skip", skipped=skipped)) == 2
    assert len(skipped) == 1 and "line 2" in skipped[0]


def test_bad_bytes_and_missing_or_empty_files(tmp_path: Path) -> None:
    binary = tmp_path / "b.jsonl"
    binary.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(InputError, match="line 1"):
        read_jsonl(binary)
    with pytest.raises(InputError, match="does not exist"):
        read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="holds no prompt"):
        read_jsonl(_file(tmp_path / "e.jsonl", ""))


@pytest.mark.parametrize(
    "arguments",
    [
        {"dataset_name": "dox"},
        {"dataset_name": "docs", "num_prompts": 0},
        {"dataset_name": "docs", "input_len": 0},
        {"dataset_name": "docs", "input_len": 5},
        {"dataset_name": "jsonl"},
        {"dataset_name": "docs", "dataset_path": "x.jsonl"},
        {"dataset_name": "docs", "tokenizer": None},
        {"dataset_name": "random"},
        {"dataset_name": "docs", "on_error": "ignore"},
    ],
)
def test_wrong_arguments(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        load_prompts(**{"tokenizer": Letters(), **arguments})  # type: ignore[arg-type]


def test_a_trace_gives_real_text_of_its_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = [
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,9,109",
        "2023-11-16 18:15:51.2225670,4000,55",
    ]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    load = partial(load_prompts, "trace", tokenizer=Letters(), dataset_path=trace)
    prompts = load(max_model_len=512)
    assert [(len(prompt.token_ids or ()), prompt.max_tokens) for prompt in prompts] == [(374, 44), (9, 109), (457, 55)]
    assert load(max_model_len=512) == prompts and load(num_prompts=1, seed=1)[0] != prompts[0]
    with pytest.raises(UsageError, match="no meaning for --dataset-name trace"):
        load(input_len=10)
