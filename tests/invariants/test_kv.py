"""KV of committed tokens is full-attention KV, whatever was drafted, accepted and where page borders lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from aspire.engine.llm_engine import LLMEngine
from aspire.errors import InputError
from aspire.sampling_params import SamplingParams
from aspire.scheduler import PAGE_TOKENS, Action, Policy, PolicyView
from tests.invariants.cases import KINDS, assert_kv_is_fresh, fixed, prompt_of, small
from tests.invariants.harness import Limits, check_engine, drive, generate, make_engine

PAIRS = [(drafted, accepted) for drafted in range(5) for accepted in range(drafted + 1)]


class _Rounds(Policy):
    """Drafts as many tokens as the next pair of `PAIRS` says."""

    kind = "rounds"

    def __init__(self) -> None:
        super().__init__(None, 1, 16)
        self.round = 0

    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        wanted = PAIRS[self.round % len(PAIRS)][0]
        return np.where(view.drafted < wanted, Action.DRAFT, Action.VERIFY).astype(np.int8)

    def observe(self, feedback: Any) -> None:
        self.round += int(feedback.verified.sum())


def _autoregressive(model: str, prompt: list[int], params: SamplingParams, limits: Limits) -> list[int]:
    return generate(make_engine(model, limits=limits), [prompt], params)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("model", "temperature", "length"), [("qwen3", 0.0, 90), ("qwen3", 1.0, 45)])
def test_kv_after_every_pair_of_drafted_and_accepted(kind: str, model: str, temperature: float, length: int) -> None:
    limits = Limits(1, 64, 256)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
    prompt = prompt_of(length, model=model)
    expected = [*prompt, *_autoregressive(model, prompt, params, limits)]
    engine = make_engine(model, fixed(4, small(kind)), limits)
    policy = engine.scheduler.policy = _Rounds()
    engine.add_request("0", prompt, params)
    slots, seen = engine.scheduler.slots, []
    while engine.has_unfinished_requests and policy.round < len(PAIRS):
        drafted, accepted = PAIRS[policy.round]
        known = int(slots.known[0])
        if slots.drafted[0] == drafted and slots.computed[0] == known - 1 and known > len(prompt):
            # drafts that are right up to `accepted` and wrong there
            run = expected[known : known + drafted]
            if accepted < drafted:
                run[accepted] = (run[accepted] + 1) % 128
            engine.runner.state.pending[0, 1 : 1 + drafted] = torch.tensor(run, dtype=torch.int32)
            before = policy.round
            engine.step()
            assert policy.round == before + 1
            assert slots.known[0] == known + accepted + 1, (drafted, accepted)
            assert engine.live.known_of(engine.live["0"], 0).tolist() == expected[: known + accepted + 1]
            assert_kv_is_fresh(engine, 0, model, expected)
            seen.append((drafted, accepted))
        else:
            engine.step()
        check_engine(engine)
    assert set(seen) >= set(PAIRS[1:])
    run = drive(engine)
    assert run.outputs["0"].outputs[0].token_ids == expected[len(prompt) :]


@pytest.mark.parametrize("g", [1, 2, 3, 4, 7])
def test_every_residue_of_the_length_modulo_the_page(g: int) -> None:
    prompts = [prompt_of(2 * PAGE_TOKENS + residue) for residue in range(PAGE_TOKENS + 1)]
    limits = Limits(len(prompts), 400, 128)
    params = SamplingParams(temperature=0.0, max_tokens=19, ignore_eos=True)
    expected = generate(make_engine("llama", limits=limits), prompts, params)
    engine = make_engine("llama", fixed(g, small(KINDS[g % len(KINDS)])), limits)

    def check(step: int) -> None:
        if step % 4 == 3:
            for slot in np.flatnonzero(engine.scheduler.slots.active).tolist()[step % 3 :: 3]:
                live = engine.live[engine.scheduler.slots.requests[slot].request_id]  # type: ignore[union-attr]
                tokens = engine.live.known_of(live, slot).tolist()
                assert_kv_is_fresh(engine, slot, "llama", tokens)

    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    run = drive(engine, before_step=check)
    assert [run.outputs[str(i)].outputs[0].token_ids for i in range(len(prompts))] == expected


@pytest.mark.parametrize("max_len", [32, 33, 47])
@pytest.mark.parametrize("g", [1, 5, 16])
def test_nothing_is_written_past_the_models_length(max_len: int, g: int) -> None:
    prompts = [prompt_of(length) for length in (max_len - 1, max_len - 2, max_len - 6, max_len - 15)]
    limits = Limits(len(prompts), 128, max_len)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=500, ignore_eos=True)
    expected = generate(make_engine("llama", limits=limits), prompts, params)
    assert [len(prompt) + len(output) for prompt, output in zip(prompts, expected, strict=True)] == [max_len] * 4
    engine = make_engine("llama", fixed(g, small("verify")), limits)
    assert engine.scheduler.pages.table.shape[1] == -(-max_len // PAGE_TOKENS)
    assert generate(engine, prompts, params) == expected
    _refuses(engine, prompt_of(max_len))


def _refuses(engine: LLMEngine, prompt: list[int]) -> None:
    with pytest.raises(InputError, match="max-model-len"):
        engine.add_request("long", prompt)
    assert not engine.has_unfinished_requests and engine.scheduler.counts.rejected == 1
