"""Switching selectors to and fro: the lists of the newest few are kept, the text stays the same."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from aspire.sampling_params import SamplingParams
from aspire.scheduler import PolicySpec
from tests.invariants.cases import KINDS, ample, fixed, prompt_of, small
from tests.invariants.harness import Limits, drive, generate, make_engine

PARAMS = SamplingParams(temperature=0.7, max_tokens=50, ignore_eos=True)
PROMPTS = [prompt_of(length, model="qwen3") for length in (20, 60, 110)]


def test_the_lists_of_the_newest_selectors_are_kept() -> None:
    engine = make_engine("qwen3", fixed(3, small("window")))
    first = engine.runner.lists
    engine.set_policy(fixed(3, small("verify")))
    assert engine.runner.lists is not first
    engine.set_policy(fixed(5, small("window")))
    assert engine.runner.lists is first, "another draft length made other lists"
    for kind in KINDS:
        engine.set_policy(fixed(3, ample(kind)))
        engine.set_policy(fixed(3, small(kind)) if kind != "window" else PolicySpec())
    engine.set_policy(fixed(3, small("window")))
    assert engine.runner.lists is not first, "lists of every selector pile up"


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_switching_back_and_forth_leaves_the_text(ahead: bool) -> None:
    limits = Limits(3, 256, 256, async_scheduling=ahead)
    expected = generate(make_engine("qwen3", limits=limits), PROMPTS, PARAMS)
    engine = make_engine("qwen3", fixed(3, small("window")), limits)
    kinds = ("window", "verify-per-layer", "refresh-per-layer")
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, PARAMS)

    def switch(step: int) -> None:
        if step and step % 7 == 0:
            engine.set_policy(fixed(3, small(kinds[step // 7 % 3])))

    outputs = drive(engine, before_step=switch).outputs
    assert [outputs[str(index)].outputs[0].token_ids for index in range(3)] == expected
    assert len(engine.log) > 42, "it never came back to the first selector"
