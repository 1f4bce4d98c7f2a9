"""Prefix caching in the engine: fewer tokens through prefill, the same outputs, the same KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire import EngineConfig, LLMEngine, SamplingParams
from aspire.rundir import Run
from aspire.scheduler import PolicySpec
from aspire_simulator.replaying import replay
from tests.invariants.cases import ample, assert_kv_is_fresh, fixed, prompt_of, small
from tests.invariants.harness import Limits, LinearCost, drive, generate, make_engine
from tests.invariants.models import tiny_model

pytestmark = pytest.mark.usefixtures("short_prefixes_are_waited_for")

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=12, ignore_eos=True)


def cold(prompts: list[list[int]], params: SamplingParams = PARAMS, model: str = "llama") -> list[list[int]]:
    """Outputs of each prompt alone in a new engine."""
    return [generate(make_engine(model, limits=LIMITS), [prompt], params)[0] for prompt in prompts]


def prefilled(engine: LLMEngine) -> int:
    """Prompt tokens that went through the model."""
    log = engine.log
    return int(log.column("query_tokens")[log.column("mode") == 1].sum())


def family(count: int, shared: int = 100, tail: int = 20) -> list[list[int]]:
    """Prompts with a common begin."""
    return [prompt_of(shared) + prompt_of(tail, seed=number + 1) for number in range(count)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", [PolicySpec(), fixed(4, small("verify")), fixed(4, small("refresh"))], ids=str)
def test_a_common_prefix_is_computed_once_and_outputs_are_those_of_a_cold_run(
    policy: PolicySpec, asynchronous: bool
) -> None:
    prompts = family(6)
    limits = Limits(4, 64, 256, async_scheduling=asynchronous)
    engine = make_engine("llama", policy, limits)
    engine.begin_record()
    assert generate(engine, prompts, PARAMS) == cold(prompts)
    assert prefilled(engine) == 120 + 5 * (120 - 96)
    again = generate(engine, prompts, PARAMS)
    assert again == cold(prompts)
    assert prefilled(engine) == 120 + 5 * (120 - 96) + 6 * (120 - 112)


def test_the_flag_turns_it_off() -> None:
    config = EngineConfig("tiny-llama", load_format="dummy", device="cpu", max_model_len=256, max_num_seqs=4)
    off = LLMEngine(EngineConfig(**{**vars(config), "enable_prefix_caching": False}))
    on = LLMEngine(config)
    for engine, expected in ((off, 6 * 120), (on, 120 + 5 * 24)):
        for number, prompt in enumerate(family(6)):
            engine.add_request(str(number), prompt, PARAMS)
        outputs = drive(engine, check=False).outputs
        assert prefilled(engine) == expected
        assert [output.num_cached_tokens for output in outputs.values()] == (
            [0] * 6 if engine is off else [0, *[96] * 5]
        )


@pytest.mark.parametrize("selector", ["window", "verify", "verify-per-layer", "refresh", "refresh-per-layer"])
def test_page_lists_of_a_reused_prefix_are_rebuilt(selector: str) -> None:
    """With a budget that covers everything all drafts are accepted, so no list may lack a page."""
    engine = make_engine("qwen3", fixed(5, ample(selector)), LIMITS)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [prompt_of(100, model="qwen3") + prompt_of(20, seed=n, model="qwen3") for n in range(4)]
    generate(engine, prompts[:1], params)
    engine.begin_record()
    engine.add_request("fill", prompts[0], params)
    drive(engine)
    for number, prompt in enumerate(prompts):
        engine.add_request(f"again-{number}", prompt, params)
    drive(engine)
    log = engine.log
    verified = (log.column("mode") == 3) & (log.column("drafted") > 0)
    assert (log.column("accepted") == log.column("drafted"))[verified].all() and verified.sum() > 8


def test_kv_of_reused_pages_is_that_of_a_fresh_prefill() -> None:
    engine = make_engine("llama", fixed(3, small("verify")), LIMITS)
    first = generate(engine, [prompt_of(60)], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))[0]
    turn = prompt_of(60) + first + prompt_of(9, seed=5)  # a conversation goes on: prompt and answer are found
    engine.add_request("next", turn, PARAMS)
    checked = 0
    while engine.has_unfinished_requests:
        engine.step()
        slot = engine.scheduler.slot_of("next")
        if slot is not None and engine.scheduler.slots.computed[slot] >= len(turn):
            tokens = engine.sequences.tokens[slot, : engine.sequences.known[slot]].tolist()
            assert_kv_is_fresh(engine, slot, "llama", tokens)
            checked += 1
    assert checked > 2
    assert engine.recorder.submitted[-1].request.cached_tokens == 96  # of 99 tokens whose KV was there


@settings(max_examples=12)
@given(st.data())
def test_any_traffic_of_families_gives_the_cold_outputs_and_replays(data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from([PolicySpec(), fixed(3, small("verify")), fixed(5, small("window"))]))
    limits = Limits(
        data.draw(st.integers(2, 5)),
        data.draw(st.sampled_from([20, 64, 200])),
        256,
        data.draw(st.sampled_from([14, 20, 60])),
        async_scheduling=data.draw(st.booleans()),
    )
    engine = make_engine("llama", policy, limits)
    engine.begin_record()
    asks: dict[str, tuple[list[int], int]] = {}
    for number in range(data.draw(st.integers(2, 7))):
        shared = prompt_of(100, seed=data.draw(st.integers(0, 1)))[: data.draw(st.integers(0, 100))]
        prompt = shared + prompt_of(data.draw(st.integers(1, 40)), seed=100 + number)
        asks[str(number)] = (prompt, data.draw(st.integers(0, 25)))
    aborted = {name for name in asks if data.draw(st.integers(0, 9)) == 0}

    def before(step: int) -> None:
        for name, (prompt, at) in asks.items():
            if at == step:
                engine.add_request(name, prompt, PARAMS)
            if name in aborted and at + 5 == step:
                engine.abort(name)

    outputs = drive(engine, before_step=before, more=lambda step: step < 26).outputs
    for name, (prompt, _) in asks.items():
        if name in outputs:
            assert outputs[name].outputs[0].token_ids == cold([prompt])[0], name
        else:
            assert name in aborted
    table, log, config = engine.record()
    report = replay(Run(config, table, log), LinearCost())
    assert report.equal_share == 1.0, report.difference


def test_a_record_begins_without_cached_prefixes_and_tells_what_was_shared() -> None:
    engine = make_engine("llama", fixed(3, small("verify")), LIMITS)
    prompts = family(3)
    generate(engine, prompts, PARAMS)
    engine.begin_record()
    generate(engine, prompts, PARAMS)
    table, log, _ = engine.record()
    assert prefilled(engine) == 120 + 2 * 24
    assert table.cached_tokens.tolist() == [0, 96, 96]
    assert table.prefix_of.tolist() == [-1, 0, 0] and table.prefix_tokens.tolist() == [0, 96, 96]
    assert np.isfinite(log.duration_s).all()


def test_a_failed_request_leaves_no_page_that_others_find() -> None:
    engine = make_engine("llama", limits=LIMITS)
    prompt = prompt_of(120)

    def poison(step: int) -> None:
        slot = engine.scheduler.slot_of("broken")
        if step == 3 and slot is not None:
            engine.pool.keys[0][int(engine.scheduler.pages.table[slot, 0])] = float("nan")

    engine.add_request("broken", prompt, PARAMS)
    run: Any = drive(engine, before_step=poison)
    assert run.outputs["broken"].outputs[0].finish_reason == "error"
    assert generate(engine, [prompt], PARAMS) == cold([prompt])


def test_what_lossy_decoding_wrote_is_found_by_nobody() -> None:
    """Its KV is not that of full attention; the prompt's is."""
    config = EngineConfig(
        "qwen3", load_format="dummy", device="cpu", max_model_len=256, max_num_seqs=2, num_pages=60, decode="delta"
    )
    engine = LLMEngine(
        EngineConfig(**{**vars(config), "policy": PolicySpec(selector=small("delta"))}), model=tiny_model("qwen3")
    )
    first = prompt_of(80, model="qwen3")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
    engine.add_request("turn", first, params)
    answer = drive(engine).outputs["turn"].outputs[0].token_ids
    engine.add_request("next", first + answer + [5], params)
    assert drive(engine).outputs["next"].num_cached_tokens == 80
