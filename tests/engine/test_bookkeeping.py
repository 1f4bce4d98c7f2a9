"""What is made while a request runs, so that little is left for its end: names of its pages, and its text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from aspire import SamplingParams
from aspire.engine import live, llm_engine
from aspire.engine.runner import StepResult
from aspire.errors import InputError
from aspire.scheduler import PolicySpec
from aspire.scheduler.prefix_cache import page_hashes
from tests.invariants.cases import fixed, prompt_of, small
from tests.invariants.harness import Limits, drive, make_engine
from tests.invariants.models import LETTERS, LetterStream, LetterTokenizer

TIGHT = {"num_pages": 15}  # two or three of four requests fit: some are sent back and computed again


class WindowStream(LetterStream):
    """As streams that decode a window of tokens: what comes after an empty push would be spelled as a text's begin."""

    ended = False

    def push(self, token_ids: Iterable[int]) -> str:
        tokens = list(token_ids)
        assert not self.ended
        self.ended = not tokens
        return super().push(tokens)


class WindowTokenizer(LetterTokenizer):
    def stream(self, **_options: Any) -> WindowStream:
        return WindowStream()


CASES = [
    (PolicySpec(), {}, 1),
    (PolicySpec(), {"async_scheduling": True}, 128),
    (fixed(3, small("verify")), {"async_scheduling": True}, 1),
    (fixed(3, small("verify")), {**TIGHT, "async_scheduling": True}, 5),
]


@pytest.mark.parametrize(("policy", "limits", "every"), CASES)
def test_names_and_text_do_not_depend_on_when_they_are_made(
    policy: PolicySpec, limits: dict[str, Any], every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "KEEP_UP_STEPS", every)
    monkeypatch.setattr(llm_engine, "SLACK_S", 0.0)
    engine = make_engine("llama", policy, Limits(4, 64, 160, **limits))
    engine._tokenizer = WindowTokenizer()  # type: ignore[assignment]
    prompts = [prompt_of(40 + number, seed=number) for number in range(6)]
    stops = (11,)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.9, seed=number, max_tokens=80, ignore_eos=True, stop_token_ids=stops)
        engine.add_request(str(number), prompt, params)
    requests = [each.request for each in engine.live.values()]
    outputs = drive(engine).outputs
    assert ("num_pages" in limits) is any(request.preemptions for request in requests)
    for request, prompt in zip(requests, prompts, strict=True):
        completion = outputs[request.request_id].outputs[0]
        tokens = completion.token_ids
        assert request.page_hashes == page_hashes([*prompt, *tokens])
        spelled = tokens[:-1] if completion.finish_reason == "stop" else tokens
        assert completion.text == "".join(LETTERS[token % len(LETTERS)] for token in spelled)
    assert {outputs[request.request_id].outputs[0].finish_reason for request in requests} <= {"stop", "length"}


@pytest.mark.parametrize("waits", [False, True])
def test_it_is_made_early_only_where_the_host_waits_for_the_device(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "KEEP_UP_STEPS", 1)
    monkeypatch.setattr(llm_engine, "SLACK_S", 1e-3 if waits else 1.0)  # a busy machine may halt the test for a while
    engine = make_engine("llama")
    launch = engine.runner.launch

    def slow(*given: Any) -> Callable[[], StepResult]:
        wait = launch(*given)
        result = wait()
        return lambda: (time.sleep(2e-3) if waits else None, result)[1]

    engine.runner.launch = slow  # type: ignore[method-assign]
    engine.add_request("0", prompt_of(20), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    request = engine.live["0"]
    for _ in range(35):
        engine.step()
    assert (len(request.page_names), request.spelled) == ((3, 34) if waits else (1, 0))
    drive(engine)
    assert request.request.page_hashes == request.page_names and len(request.page_names) == 3
    assert request.spelled == 40


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, dtype=np.int32)])
def test_prompts_of_any_kind_are_the_same_prompt(kind: Any) -> None:
    engine = make_engine("llama")
    ids = prompt_of(37)
    given = kind(ids)
    engine.add_request("0", given, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    if isinstance(given, list):
        given[:] = [0] * len(given)  # the caller's own from now on
    assert engine.live["0"].request.page_hashes == page_hashes(ids)
    output = drive(engine).outputs["0"]
    assert list(output.prompt_token_ids) == ids


@pytest.mark.parametrize("bad", [-1, 128, 2**31, 2**70, -(2**40), 1.5, "x", None])
def test_what_is_no_token_is_refused_by_name(bad: Any) -> None:
    engine = make_engine("llama")
    with pytest.raises(InputError, match=r"has token id .*vocabulary is 0\.\.127"):
        engine.add_request("0", [5, bad, 6])
    assert not engine.has_unfinished_requests and not engine.live
