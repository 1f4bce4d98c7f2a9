"""Prompts that are malformed, empty, too short, too long, too many or twice the same."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from aspire import LLM, SamplingParams
from aspire.errors import InputError
from tests.cli.helpers import assert_one_error, run
from tests.faults.helpers import TINY, prompt_file, records

GOOD = {"id": "good", "prompt_token_ids": [5, 6, 7]}
BASE = ["generate", *TINY, "--max-tokens", "4", "--ignore-eos"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt_token_ids": [1, 2', "line 2: "),
        ("[1, 2]", "line 2: holds list, not a JSON object"),
        (b'{"prompt": "\xff\xfe"}', "line 2: "),
        ({"id": "x"}, "line 2: has none of prompt, question"),
        ({"prompt_token_ids": []}, "line 2: prompt_token_ids is not a list of token ids"),
        ({"prompt_token_ids": [1, -2]}, "line 2: prompt_token_ids is not a list of token ids"),
        ({"prompt_token_ids": [1, "2"]}, "line 2: prompt_token_ids is not a list of token ids"),
        ({"prompt": "   "}, "line 2: prompt is not a text, or is empty"),
        ({"prompt": ""}, "line 2: prompt is not a text, or is empty"),
        ({"messages": []}, "line 2: messages is not a list of"),
        ({"prompt_token_ids": [1], "max_tokens": 0}, "line 2: max_tokens 0 is not a whole number >= 1"),
        ({"prompt_token_ids": [1], "max_tokens": "many"}, "line 2: max_tokens 'many' is not a whole number"),
        (GOOD, "line 2: id 'good' was used on line 1 already"),
        ({"id": "far", "prompt_token_ids": [1, 999]}, "line 2: token id 999; the model's vocabulary is 0..127"),
        ({"id": "long", "prompt_token_ids": [1] * 512}, "line 2: 512 tokens; max-model-len 512 leaves no room"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("line") else "",
)
def test_a_malformed_line_is_named_or_skipped(line: Any, words: str, tmp_path: Path) -> None:
    file = prompt_file(tmp_path, GOOD, line, {"id": "last", "prompt_token_ids": [8]})
    done = run(*BASE, "-q", "--dataset-path", file)
    assert_one_error(done, 1, f"{file} {words}", "mend the line or use --on-error skip")
    output = tmp_path / "outputs.jsonl"
    done = run(*BASE, "--dataset-path", file, "--on-error", "skip", "-o", output)
    assert done.code == 0, done.err
    assert f"aspire: warning: skipped {file} {words}" in done.err
    assert set(records(output)) == {"good", "last"}


def test_a_file_in_which_nothing_is_good(tmp_path: Path) -> None:
    file = prompt_file(tmp_path, "{", "")
    assert_one_error(run(*BASE, "-q", "--dataset-path", file, "--on-error", "skip"), 1, "holds no prompt")


def test_an_empty_prompt_on_the_command_line() -> None:
    assert_one_error(run(*BASE, "-q", "--prompt", " "), 1, "--prompt is empty")


def llm(**settings: Any) -> LLM:
    limits = {"max_model_len": 64, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    return LLM("tiny-llama", load_format="dummy", device="cpu", **{**limits, **settings})


def test_the_shortest_and_the_longest_prompt() -> None:
    engine = llm(policy="fixed:g=3")
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    shortest, longest = engine.generate([[5], [5] * 63], params)
    assert len(shortest.outputs[0].token_ids) == 10 and shortest.outputs[0].finish_reason == "length"
    assert len(longest.outputs[0].token_ids) == 1 and longest.outputs[0].finish_reason == "length"
    with pytest.raises(InputError, match="64 tokens; max-model-len 64 leaves no room for output"):
        engine.generate([[5] * 64], params)
    with pytest.raises(InputError, match="empty prompt; give at least one token"):
        engine.generate([[]], params)
    with pytest.raises(InputError, match="'a' is already queued or running; give every request an id of its own"):
        engine.generate([[5], [6]], params, request_ids=["a", "a"])


def test_ten_thousand_requests_in_the_queue_finish_once_each() -> None:
    engine = llm()
    begin = time.process_time()
    seen: list[str] = []
    outputs = engine.generate(
        [[number % 128] for number in range(10_000)],
        SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False),
        on_step=lambda ended: seen.extend(output.request_id for output in ended),
    )
    assert [int(output.request_id) for output in outputs] == list(range(10_000))
    assert len(seen) == len(set(seen)) == 10_000
    assert time.process_time() - begin < 60


def test_ten_thousand_waiting_requests_are_aborted_quickly() -> None:
    engine = llm().engine
    for number in range(10_000):
        engine.add_request(str(number), [number % 128], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    begin = time.process_time()
    assert all(engine.abort(str(number)) for number in reversed(range(10_000)))
    assert time.process_time() - begin < 3
    counts = engine.scheduler.counts
    assert counts.waiting == counts.running == 0 and counts.finished == 10_000
    assert engine.scheduler.pages.num_free == engine.scheduler.pages.num_usable
