"""Memory that is not there: for the pool, in a step, for the weights. One line with the sizes and what to lower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from aspire.engine import kv_pool
from aspire.engine.runner import ModelRunner
from aspire.models import loader
from tests.cli.helpers import assert_one_error, run
from tests.faults.helpers import TINY, random_prompts, records, texts


def test_a_pool_that_memory_cannot_hold() -> None:
    done = run("generate", *TINY, *random_prompts(2), "-q", "--num-pages", "4000000000")
    assert_one_error(done, 1, "KV pool of 4000000000 pages needs", "GB", "lower num_pages, max_num_seqs")


def test_no_room_for_a_single_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "_CPU_POOL_BYTES", 1000)
    done = run("generate", *TINY, *random_prompts(2), "-q")
    assert_one_error(done, 1, "no room for KV pages", "GB free", "lower max_num_batched_tokens or max_num_seqs")


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loader, "_load_weights", full)
    done = run("generate", *TINY, *random_prompts(2), "-q")
    assert_one_error(done, 1, "weights of tiny-llama do not fit in the memory of cpu", "use a smaller model")


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            ["does not fit in the memory of cpu", "lower max_num_batched_tokens"],
        ),
        (RuntimeError("device-side assert\ntriggered"), ["unexpected RuntimeError", "ASPIRE_DEBUG=1"]),
    ],
    ids=["out of memory", "unforeseen"],
)
def test_a_step_that_raises_keeps_what_was_finished(
    error: Exception, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["generate", *TINY, *random_prompts(8), "-q", "--policy", "fixed:g=3"]
    assert run(*arguments, "-o", tmp_path / "whole.jsonl").code == 0
    launch = ModelRunner.launch

    def breaks(runner: ModelRunner, *given: Any) -> Any:
        if (tmp_path / "outputs.jsonl").exists():
            raise error
        return launch(runner, *given)

    monkeypatch.setattr(ModelRunner, "launch", breaks)
    arguments += ["-o", tmp_path / "outputs.jsonl"]
    assert_one_error(run(*arguments), 1, *parts)
    finished = records(tmp_path / "outputs.jsonl")
    assert 1 <= len(finished) < 8
    monkeypatch.setattr(ModelRunner, "launch", launch)
    assert run(*arguments, "--resume").code == 0
    assert texts(tmp_path / "outputs.jsonl") == texts(tmp_path / "whole.jsonl")


def test_logits_that_are_not_finite_fail_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["generate", *TINY, *random_prompts(3), "--policy", "fixed:g=3"]
    assert run(*arguments, "-o", tmp_path / "whole.jsonl").code == 0
    launch, steps = ModelRunner.launch, 0

    def poisons(runner: ModelRunner, *given: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            runner.pool.keys[0][int(runner._pages.table[1, 0])] = float("nan")
        return launch(runner, *given)

    monkeypatch.setattr(ModelRunner, "launch", poisons)
    arguments += ["-o", tmp_path / "outputs.jsonl"]
    done = run(*arguments)
    assert done.code == 1 and "1 of 3 requests did not finish; run again with --resume" in done.err
    assert "not finite" in done.err
    expected = texts(tmp_path / "whole.jsonl")
    assert texts(tmp_path / "outputs.jsonl") == {name: expected[name] for name in ("prompt-0", "prompt-2")}
    monkeypatch.setattr(ModelRunner, "launch", launch)
    assert run(*arguments, "--resume").code == 0
    assert texts(tmp_path / "outputs.jsonl") == expected
