"""Pages and requests are conserved: aborts, preemption, refusals, failures; what fits alone always finishes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire.engine.llm_engine import LLMEngine
from aspire.errors import CapacityError, InputError
from aspire.sampling_params import SamplingParams
from aspire.scheduler import PAGE_TOKENS, PolicySpec
from tests.invariants.cases import KINDS, ample, fixed, prompt_of, small
from tests.invariants.harness import Limits, check_drained, check_engine, drive, generate, make_engine

PARAMS = SamplingParams(temperature=0.7, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("g", [1, 5])
def test_preemption_changes_no_token_and_leaks_no_page(kind: str, g: int) -> None:
    prompts = [prompt_of(length, seed=1) for length in (14, 15, 30, 31, 46)]
    expected = generate(make_engine("qwen3", limits=Limits(5, 256, 128)), prompts, PARAMS)
    longest = -(-(46 + 24) // PAGE_TOKENS)
    engine = make_engine("qwen3", fixed(g, small(kind)), Limits(5, 64, 128, longest + 6))
    assert generate(engine, prompts, PARAMS) == expected
    preemptions = [live.request.preemptions for live in engine.recorder.submitted]
    assert sum(preemptions) > 0 and preemptions[0] == 0, "the oldest request is never preempted"


@settings(max_examples=15)
@given(st.data())
def test_aborts_at_any_step_free_everything(data: st.DataObject) -> None:
    engine = make_engine("llama", fixed(data.draw(st.integers(1, 5)), small("verify")), Limits(3, 32, 128, 13))
    names = [str(index) for index in range(data.draw(st.integers(1, 6)))]
    for index, name in enumerate(names):
        engine.add_request(name, prompt_of(data.draw(st.integers(1, 60)), seed=index), PARAMS)
    aborts = {name: data.draw(st.integers(0, 50)) for name in names}

    def abort(step: int) -> None:
        for name, at in aborts.items():
            if at == step:
                there = name in engine.scheduler.requests
                assert engine.abort(name) is there
                assert engine.abort(name) is False
                check_engine(engine)

    run = drive(engine, before_step=abort)
    assert engine.scheduler.counts.finished == len(names) == engine.scheduler.counts.arrived
    assert all(output.outputs[0].finish_reason == "length" for output in run.outputs.values())


def test_an_id_may_be_used_again_after_its_request_ended() -> None:
    engine = make_engine("llama", fixed(3, small("verify")))
    first = generate(engine, [prompt_of(30)], PARAMS)
    assert generate(engine, [prompt_of(30)], PARAMS) == first
    engine.add_request("0", prompt_of(30), PARAMS)
    engine.step()
    engine.abort("0")
    assert generate(engine, [prompt_of(30)], PARAMS) == first


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([], {}, InputError),
        (prompt_of(160), {}, InputError),
        ([5, 128], {}, InputError),
        ([-1], {}, InputError),
        (prompt_of(100), {"max_tokens": 60}, CapacityError),
    ],
    ids=["empty", "too long", "unknown token", "negative token", "never fits"],
)
def test_what_can_never_run_is_refused_at_submission(prompt: list[int], params: dict[str, Any], error: type) -> None:
    engine = make_engine("llama", limits=Limits(2, 64, 160, 9))
    engine.add_request("good", prompt_of(40), PARAMS)
    with pytest.raises(error) as caught:
        engine.add_request("bad", prompt, SamplingParams(**params))
    assert "\n" not in str(caught.value) and "bad" in str(caught.value)
    check_engine(engine)
    assert list(drive(engine).outputs) == ["good"]


def test_a_second_request_of_the_same_id_is_refused_and_the_first_goes_on() -> None:
    engine = make_engine("llama", fixed(2, small("verify")))
    expected = generate(make_engine("llama"), [prompt_of(20)], PARAMS)
    engine.add_request("0", prompt_of(20), PARAMS)
    for step in range(4):
        with pytest.raises(InputError, match="id of its own"):
            engine.add_request("0", prompt_of(9), PARAMS)
        engine.step()
        assert engine.scheduler.counts.rejected == step + 1
    assert drive(engine).outputs["0"].outputs[0].token_ids == expected[0]


@pytest.mark.parametrize("policy", [PolicySpec(), fixed(5, ample("window")), fixed(16, small("delta"))])
def test_a_request_that_fits_alone_always_finishes(policy: PolicySpec) -> None:
    if policy.selector.kind == "delta":
        policy = fixed(16, small("verify"))
    prompts = [prompt_of(40, seed=index) for index in range(5)]
    params = SamplingParams(temperature=0.0, max_tokens=56, ignore_eos=True)
    engine = make_engine("llama", policy, Limits(5, 64, 160, 6 + 1))  # each needs all six pages at its end
    outputs = generate(engine, prompts, params)
    assert [len(output) for output in outputs] == [56] * 5


def test_a_token_budget_smaller_than_a_verification_does_not_stall() -> None:
    for budget in (1, 2, 3):
        limits = Limits(1, budget, 128)
        expected = generate(make_engine("llama", limits=limits), [prompt_of(20)], PARAMS)
        engine = make_engine("llama", fixed(8, ample("verify")), limits)
        assert generate(engine, [prompt_of(20)], PARAMS) == expected


def _poison(engine: LLMEngine, request_id: str) -> None:
    """Make the next logits of one request NaN, through its KV."""
    slot = engine.scheduler.slot_of(request_id)
    assert slot is not None
    page = int(engine.scheduler.pages.table[slot, 0])
    engine.pool.keys[0][page] = float("nan")


@pytest.mark.parametrize("model", ["llama", "wide"])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 20}, {"temperature": 1.0}])
@pytest.mark.parametrize("poisoned_step", [2, 4, 5])
def test_logits_that_are_not_finite_fail_their_request_alone(
    model: str, params: dict[str, Any], poisoned_step: int
) -> None:
    prompts = [prompt_of(length, seed=3) for length in (20, 40, 60)]
    each = SamplingParams(**params, max_tokens=30, ignore_eos=True, logprobs=1)
    limits = Limits(3, 256, 128)
    healthy = make_engine(model, fixed(4, ample("verify")), limits)
    expected = generate(healthy, prompts, each)
    scores = [live.cumulative_logprob for live in healthy.recorder.submitted]
    engine = make_engine(model, fixed(4, ample("verify")), limits)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, each)
    run = drive(engine, before_step=lambda step: _poison(engine, "1") if step == poisoned_step else None)
    failed = run.outputs["1"].outputs[0]
    assert failed.finish_reason == "error"
    assert failed.token_ids == expected[1][: len(failed.token_ids)] and len(failed.token_ids) < 30
    for index in (0, 2):
        output = run.outputs[str(index)].outputs[0]
        assert output.token_ids == expected[index] and output.finish_reason == "length"
        assert output.cumulative_logprob == pytest.approx(scores[index], abs=1e-3)
    assert not torch.isnan(torch.tensor([o.cumulative_logprob for k, o in _completions(run) if k != "1"])).any()


def _completions(run: Any) -> list[tuple[str, Any]]:
    return [(name, output.outputs[0]) for name, output in run.outputs.items()]


def test_pages_of_a_failed_request_serve_the_next_one() -> None:
    expected = generate(make_engine("llama"), [prompt_of(40)], PARAMS)[0]
    engine = make_engine("llama", fixed(3, small("verify")), Limits(1, 64, 128, 6))
    engine.add_request("broken", prompt_of(40, seed=8), PARAMS)
    engine.add_request("next", prompt_of(40), SamplingParams(temperature=0.7, max_tokens=24, ignore_eos=True))
    engine.add_request("0", prompt_of(40), PARAMS)
    run = drive(engine, before_step=lambda step: _poison(engine, "broken") if step == 3 else None)
    assert run.outputs["broken"].outputs[0].finish_reason == "error"
    assert run.outputs["0"].outputs[0].token_ids == expected
    assert run.outputs["next"].outputs[0].finish_reason == "length"


def test_an_exception_in_generate_leaves_a_clean_engine() -> None:
    engine = make_engine("llama", fixed(3, small("verify")))
    for index in range(3):
        engine.add_request(str(index), prompt_of(30, seed=index), PARAMS)
    for _ in range(3):
        engine.step()
    for index in range(3):
        engine.abort(str(index))
    check_drained(engine)
