"""Every option changes something that can be seen, or is an error."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from aspire.engine.config import EngineConfig
from aspire.errors import UsageError
from aspire.outputs import CompletionOutput
from aspire.sampling_params import SamplingParams
from aspire.scheduler import POLICIES, PolicySpec, SelectorSpec
from tests.invariants.cases import fixed, prompt_of, small
from tests.invariants.harness import Limits, drive, make_engine

BASE: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 20, "ignore_eos": True}
CHANGES: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 0.3,
    "top_k": 2,
    "min_p": 0.5,
    "seed": 8,
    "max_tokens": 9,
    "min_tokens": 15,
    "stop": ("ab",),
    "stop_token_ids": tuple(range(0, 128, 9)),
    "ignore_eos": False,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "repetition_penalty": 2.0,
    "logprobs": 2,
    "detokenize": False,
    "include_stop_str_in_output": True,
}
CONTEXT: dict[str, dict[str, Any]] = {  # what an option needs to matter
    "min_tokens": {"stop_token_ids": tuple(range(0, 128, 9))},
    "include_stop_str_in_output": {"stop": ("ab",)},
    "ignore_eos": {"temperature": 5.0, "max_tokens": 100, "seed": 1},
    "presence_penalty": {"temperature": 0.0},
    "frequency_penalty": {"temperature": 0.0},
    "repetition_penalty": {"temperature": 0.0},
}
ELSEWHERE = {"skip_special_tokens"}  # tests/models/test_tokenizer.py: the letters here have no special tokens


def _output(g: int, **params: Any) -> CompletionOutput:
    engine = make_engine("llama", fixed(g, small("verify")) if g else None, Limits(2, 64, 160))
    engine.add_request("0", prompt_of(36), SamplingParams(**params))
    return drive(engine).outputs["0"].outputs[0]


def test_every_sampling_parameter_is_tested() -> None:
    assert {field.name for field in fields(SamplingParams)} == {*CHANGES} | ELSEWHERE


@pytest.mark.parametrize("name", CHANGES)
def test_every_sampling_parameter_changes_the_output_and_speculation_changes_nothing(name: str) -> None:
    base = {**BASE, **CONTEXT.get(name, {})}
    changed = {**base, name: CHANGES[name]}
    before, after = _output(4, **base), _output(4, **changed)
    assert before != after, f"{name} is silently ignored"
    plain = _output(0, **changed)
    assert (plain.token_ids, plain.text, plain.finish_reason) == (after.token_ids, after.text, after.finish_reason)


def test_logprobs_are_the_models_own_whatever_is_filtered() -> None:
    settings = {**BASE, "logprobs": 3, "top_k": 4, "repetition_penalty": 1.3, "presence_penalty": 0.4}
    outputs = [_output(g, **settings) for g in (0, 1, 4)]
    for output in outputs:
        assert output.token_ids == outputs[0].token_ids
        assert output.logprobs is not None and len(output.logprobs) == 20
        assert output.cumulative_logprob == pytest.approx(
            sum(each[token] for each, token in zip(output.logprobs, output.token_ids, strict=True)), abs=1e-3
        )
        for token, each in zip(output.token_ids, output.logprobs, strict=True):
            # the three likeliest and the sampled one, all from one distribution
            best = sorted(each.values(), reverse=True)
            assert 3 <= len(each) <= 4 and token in each and max(each.values()) <= 1e-5
            if len(each) == 4:
                assert each[token] == best[-1]
    assert _output(4, **{**BASE, "logprobs": 0}).logprobs is not None


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 1.5},
        {"max_tokens": 0},
        {"min_tokens": 17},
        {"min_tokens": -1},
        {"presence_penalty": 3.0},
        {"frequency_penalty": -3.0},
        {"repetition_penalty": 0.0},
        {"logprobs": 21},
        {"stop": ("",)},
        {"stop": ("a",), "detokenize": False},
        {"temperature": float("nan")},
    ],
    ids=str,
)
def test_values_out_of_range_are_errors(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**bad)
    assert "\n" not in str(caught.value)


def _schedule(selector: dict[str, Any] | None = None, kind: str = "fixed", **settings: Any) -> list[Any]:
    """What a policy did: modes, drafts, acceptance and prices of all steps."""
    spec = PolicySpec(kind=kind, selector=SelectorSpec(**(selector or {})), **settings)
    engine = make_engine("qwen3", spec, Limits(3, 256, 400))
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    for index in range(3):
        engine.add_request(str(index), prompt_of(150 + 60 * index, seed=index, model="qwen3"), params)
    drive(engine)
    columns = [engine.log.column(name).tolist() for name in ("mode", "drafted", "accepted", "context")]
    return [columns, engine.log.features.tolist()]


SELECTOR_BASE: dict[str, Any] = {"budget_ratio": 0.0, "min_pages": 4, "sinks": 1, "recent": 2, "layers": (1, 2)}
SELECTOR_CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "kind": ({}, "window"),
    "budget_ratio": ({}, 0.6),
    "min_pages": ({}, 9),
    "sinks": ({}, 0),
    "recent": ({}, 3),
    "layer": ({"kind": "refresh"}, 1),
    "refresh_power": ({"kind": "refresh-per-layer", "refresh_power": 0.0}, 1.0),
    "layers": ({"kind": "delta"}, (3,)),
}


@pytest.mark.parametrize("name", SELECTOR_CHANGES)
def test_every_selector_parameter_changes_something(name: str) -> None:
    assert {field.name for field in fields(SelectorSpec)} == {*SELECTOR_CHANGES}
    context, value = SELECTOR_CHANGES[name]
    base = {**SELECTOR_BASE, **context}
    assert _schedule(base) != _schedule({**base, name: value}), f"selector {name} is silently ignored"


POLICY_CHANGES: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "fixed": {"g": 3},
    "staggered": {"g": 3},
    "fsm": {"g_init": 3, "g_min": 4},
    "aspire": {"w": 0.2, "alpha_0": 0.3, "gamma_init": 1, "cost_ratio": 0.9},
    "goodput": {
        "hysteresis": 5.0,
        "explore_rounds": 2,
        "window_tokens": 20.0,
        "cost_ratio": 0.6,
        "verify_ratio": 0.5,
    },
}
POLICY_BASE: dict[str, dict[str, Any]] = {
    "aspire": {"cost_ratio": 0.1},
    "goodput": {"cost_ratio": 0.1},
}
NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    ("fsm", "g_min"): {"g_init": 4, "g_min": 0},
    ("goodput", "explore_rounds"): {"cost_ratio": 0.45, "hysteresis": 0.8},
}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in POLICY_CHANGES.items() for n in names])
def test_every_policy_parameter_changes_the_schedule(kind: str, name: str) -> None:
    base = NEEDS.get((kind, name), POLICY_BASE.get(kind, {}))
    changed = {**base, name: POLICY_CHANGES[kind][name]}
    if (kind, name) == ("fsm", "g_min"):
        changed["g_init"] = 4
    before, after = (_schedule(SELECTOR_BASE, kind, params=params) for params in (base, changed))
    assert before != after, f"policy parameter {name} is silently ignored"


def test_every_policy_parameter_is_tested() -> None:
    for kind, policy in POLICIES.items():
        assert {field.name for field in fields(policy.Params)} == {*POLICY_CHANGES[kind]}, kind


@pytest.mark.parametrize("kind", [kind for kind in POLICIES if kind != "autoregressive"])
def test_the_cap_on_drafts_holds_for_every_policy(kind: str) -> None:
    params = POLICY_BASE.get(kind, {})
    for cap in (0, 1, 3):
        (_, drafted, _, _), _ = _schedule(SELECTOR_BASE, kind, params=params, num_speculative_tokens=cap)
        assert max(drafted) == cap if kind in ("fixed", "staggered", "fsm") else max(drafted) <= cap


@pytest.mark.parametrize(
    "bad",
    [
        {"block_size": 32},
        {"tensor_parallel_size": 2},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.5},
        {"attention_backend": "flash"},
        {"synthetic_acceptance_rates": (1.5,)},
        {"synthetic_acceptance_rates": ()},
        {"policy": "fixde:g=5"},
        {"policy": "fixed:h=5"},
        {"policy": "fixed:g=0"},
        {"policy": "fixed:g=2+verfy"},
    ],
    ids=str,
)
def test_engine_options_out_of_range_are_errors(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        EngineConfig(**bad)
    assert "\n" not in str(caught.value)


def test_limits_are_obeyed() -> None:
    engine = make_engine("llama", fixed(3, small("verify")), Limits(2, 20, 96, 9))
    assert engine.scheduler.pages.num_usable == 8
    for index in range(4):
        engine.add_request(str(index), prompt_of(40, seed=index), SamplingParams(max_tokens=20, ignore_eos=True))
    drive(engine)
    steps = engine.log.step_of_row()
    rows = [int((steps == step).sum()) for step in range(len(engine.log))]
    tokens = [int(engine.log.column("query_tokens")[steps == step].sum()) for step in range(len(engine.log))]
    assert max(rows) == 2 and max(tokens) <= 20 < sum(tokens)
    with pytest.raises(UsageError, match="max_model_len"):
        make_engine("llama", limits=Limits(max_model_len=4097))
    with pytest.raises(UsageError, match="max_num_batched_tokens"):
        make_engine("llama", limits=Limits(8, 4))
