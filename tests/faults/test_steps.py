"""A step that fails or is interrupted, when it is launched or waited for: the engine is as good as new afterwards."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from aspire import LLM, SamplingParams
from tests.invariants.cases import prompt_of

PROMPTS = [prompt_of(length) for length in (70, 5, 33, 120, 18)]
PARAMS = SamplingParams(temperature=0.8, seed=2, max_tokens=25, ignore_eos=True)
SETTINGS: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "max_model_len": 256, "max_num_seqs": 3}
SETTINGS |= {"max_num_batched_tokens": 64, "policy": "fixed:g=3+window"}


def failing(llm: LLM, error: BaseException, step: int, waiting: bool) -> None:
    """Step number ``step`` from now on raises ``error`` once."""
    launch, seen = llm.engine.runner.launch, 0

    def launched(*given: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == step and not waiting:
            raise error
        wait, mine = launch(*given), seen

        def waited() -> Any:
            if mine == step and waiting:
                raise error
            return wait()

        return waited

    llm.engine.runner.launch = launched  # type: ignore[method-assign]


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("waiting", [False, True], ids=["launch", "wait"])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("broken"), KeyboardInterrupt()], ids=repr
)
@pytest.mark.parametrize("step", [1, 6])
def test_what_fails_once_is_forgotten(error: BaseException, waiting: bool, ahead: bool, step: int) -> None:
    llm = LLM("tiny-llama", async_scheduling=ahead, **SETTINGS)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    failing(llm, error, step, waiting)
    with pytest.raises(BaseException) as caught:
        llm.generate(PROMPTS, PARAMS)
    if isinstance(error, torch.OutOfMemoryError):
        assert "does not fit in the memory of cpu; lower max_num_batched_tokens" in str(caught.value)
    else:
        assert caught.value is error
    pages = llm.engine.scheduler.pages
    assert not llm.engine.has_unfinished_requests and pages.num_free == pages.num_usable
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
def test_requests_of_a_failed_step_can_simply_be_stepped_on(ahead: bool) -> None:
    """The engine below `LLM`: nothing is aborted, the failed step's requests are in the queue again."""
    llm = LLM("tiny-llama", async_scheduling=ahead, **SETTINGS)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    for number, prompt in enumerate(PROMPTS):
        llm.engine.add_request(f"again-{number}", prompt, PARAMS)
    failing(llm, RuntimeError("broken"), 6, True)
    outputs, failures = {}, 0
    while llm.engine.has_unfinished_requests:
        try:
            outputs |= {output.request_id: output.outputs[0].token_ids for output in llm.engine.step()}
        except RuntimeError:
            failures += 1
    assert failures == 1 and [outputs[f"again-{number}"] for number in range(len(PROMPTS))] == expected
