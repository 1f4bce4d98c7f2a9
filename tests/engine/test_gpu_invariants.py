"""On a GPU: random scenarios, graph buckets across rejections, bfloat16 with ties named, failures kept apart.

The reference is the torch back end on the CPU in float32, with the same weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from aspire.sampling_params import SamplingParams
from aspire.scheduler import Mode
from tests.engine.gpu import NEEDS_GPU
from tests.invariants.cases import KINDS, ample, assert_kv_is_fresh, fixed, prompt_of, small
from tests.invariants.fuzz import fuzz_scenario, plain_scenario
from tests.invariants.harness import Limits, drive, generate, make_engine
from tests.invariants.lossless import Machine, Tally, check_lossless

pytestmark = NEEDS_GPU

EAGER = Machine("cuda", attention_backend="triton", enforce_eager=True)
GRAPHS = Machine("cuda", attention_backend="triton")
REFERENCE = Machine("cuda", attention_backend="reference")
ON_GPU: dict[str, Any] = {"device": "cuda", "attention_backend": "triton"}


@pytest.mark.parametrize(
    ("machine", "first", "count"),
    [(REFERENCE, 0, 4), (EAGER, 100, 12), (GRAPHS, 200, 6)],
    ids=["reference", "eager", "graphs"],
)
def test_random_scenarios_give_the_text_of_the_cpu(machine: Machine, first: int, count: int) -> None:
    """Half of the scenarios plan their steps ahead."""
    total = Tally()
    for number in range(first, first + count):
        total += check_lossless(fuzz_scenario(number), machine=machine)
    assert total.drafted > 5 * count and total.ties <= 0.01 * total.requests, total


def test_bfloat16_differs_only_where_the_best_scores_are_within_rounding() -> None:
    total = Tally()
    machine = Machine("cuda", torch.bfloat16, "triton", enforce_eager=True, spread=0.03)
    for number in range(12):
        total += check_lossless(plain_scenario(number), machine=machine)
    # each request of these tiny models has some 13 tokens with logits of spread 1
    assert total.ties < 0.5 * total.requests, total


@pytest.mark.parametrize("kind", ["window", "refresh-per-layer", "delta"])
def test_graphs_equal_eager_bucket_by_bucket_across_rejections(kind: str) -> None:
    engines = [
        make_engine(
            "qwen3",
            fixed(3, small(kind)),
            Limits(24, 512, 256, async_scheduling=not eager),
            **ON_GPU,
            enforce_eager=eager,
        )
        for eager in (True, False)
    ]
    assert not engines[0].runner.uses_graphs and engines[1].runner.uses_graphs
    for requests in (2, 9, 24):
        prompts = [prompt_of(130 + 3 * index, seed=requests, model="qwen3") for index in range(requests)]
        params = SamplingParams(temperature=0.8, top_k=20, max_tokens=24, ignore_eos=True)
        outputs = [generate(engine, prompts, params) for engine in engines]
        assert outputs[0] == outputs[1], requests
    assert engines[1].runner.capture_s > 0.0, "no graph was used"
    for engine in engines:
        verify = engine.log.column("mode") == Mode.VERIFY
        drafted, accepted = (int(engine.log.column(name)[verify].sum()) for name in ("drafted", "accepted"))
        assert 0 < accepted < drafted


@pytest.mark.parametrize(
    ("kind", "eager"), [*((kind, False) for kind in KINDS), ("window", True), ("refresh-per-layer", True)]
)
def test_kv_of_committed_tokens_is_fresh(kind: str, eager: bool) -> None:
    prompts = [prompt_of(length, model="qwen3") for length in (65, 80, 90)]
    engine = make_engine("qwen3", fixed(3, small(kind)), Limits(3, 256, 128), **ON_GPU, enforce_eager=eager)

    def check(step: int) -> None:
        if step % 7 == 6:
            for slot in np.flatnonzero(engine.scheduler.slots.active).tolist():
                live = engine.live[engine.scheduler.slots.request_ids[slot]]
                tokens = engine.live.known_of(live, slot).tolist()
                assert_kv_is_fresh(engine, slot, "qwen3", tokens, tolerance=2e-4)

    params = SamplingParams(temperature=0.7, max_tokens=30, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    drive(engine, before_step=check)


@pytest.mark.parametrize(
    ("params", "eager", "ahead"),
    [
        ({"temperature": 0.0}, False, True),
        ({"temperature": 1.0, "top_k": 20}, False, False),
        ({"temperature": 1.0}, False, True),
        ({"temperature": 1.0, "logprobs": 0}, True, True),
    ],
    ids=["greedy", "top-k", "plain", "logprobs"],
)
def test_logits_that_are_not_finite_fail_their_request_alone(params: dict[str, Any], eager: bool, ahead: bool) -> None:
    prompts = [prompt_of(length, seed=3) for length in (66, 75, 80)]
    each = SamplingParams(**params, max_tokens=30, ignore_eos=True)
    limits = Limits(3, 256, 128, async_scheduling=ahead)
    engine = make_engine("llama", fixed(4, ample("verify")), limits, **ON_GPU, enforce_eager=eager)
    expected = generate(engine, prompts, each)

    def poison(step: int) -> None:
        if step == 4:
            page = int(engine.scheduler.pages.table[engine.scheduler.slot_of("1"), 0])
            engine.pool.keys[0][page] = float("nan")

    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, each)
    engine.add_request("3", prompt_of(75, seed=4), each)  # will live in the pages that the failed request leaves
    run = drive(engine, before_step=poison)
    assert run.outputs["1"].outputs[0].finish_reason == "error"
    for index in (0, 2):
        output = run.outputs[str(index)].outputs[0]
        assert output.token_ids == expected[index]
        assert np.isfinite(output.cumulative_logprob)
        if each.logprobs is not None:
            assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    assert run.outputs["3"].outputs[0].finish_reason == "length"
