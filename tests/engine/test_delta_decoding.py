"""Lossy decoding (`decode` delta): exact where the pages cover the context, sparse where not, and marked as lossy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from aspire.engine.config import DELTA, EngineConfig
from aspire.engine.llm_engine import LLMEngine
from aspire.errors import UsageError
from aspire.sampling_params import SamplingParams
from aspire.scheduler import FEATURES, Mode, PolicySpec, SelectorSpec
from aspire_kernels import counters
from tests.invariants.cases import ample, prompt_of, small
from tests.invariants.harness import Limits, Run, drive, make_engine
from tests.invariants.models import tiny_model

PROMPTS = [prompt_of(length, seed=9, model="qwen3") for length in (5, 31, 64, 97, 150)]
SETTINGS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 256}


def _engine(selector: SelectorSpec, **settings: Any) -> LLMEngine:
    policy = PolicySpec(selector=selector)
    config = EngineConfig(
        model="qwen3", device="cpu", load_format="dummy", policy=policy, decode="delta", **{**SETTINGS, **settings}
    )
    return LLMEngine(config, model=tiny_model("qwen3"))


def _run(engine: LLMEngine, params: SamplingParams) -> Run:
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, params)
    return drive(engine)


def _tokens(run: Run) -> list[list[int]]:
    return [run.outputs[str(index)].outputs[0].token_ids for index in range(len(PROMPTS))]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_pages_that_cover_the_context_give_the_exact_text(temperature: float, async_scheduling: bool) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, detokenize=False)
    exact = _tokens(_run(make_engine("qwen3", limits=Limits(3, 64, 256)), params))
    run = _run(_engine(ample("delta"), async_scheduling=async_scheduling), params)
    assert _tokens(run) == exact
    assert all(output.lossy for output in run.outputs.values())


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_few_pages_are_read_and_the_text_is_another(async_scheduling: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    exact = _tokens(_run(make_engine("qwen3", limits=Limits(3, 64, 256)), params))
    engine = _engine(small("delta"), async_scheduling=async_scheduling)
    counters.reset()
    run = _run(engine, params)
    assert _tokens(run) != exact and [len(each) for each in _tokens(run)] == [40] * len(PROMPTS)
    log = engine.log
    assert (log.column("mode") != Mode.DRAFT).all() and (log.column("drafted") == 0).all()
    decoded = int((log.column("mode") == Mode.VERIFY).sum())
    sparse_layers = engine.loaded.config.num_layers - len({0, 1, *small("delta").layers})
    assert counters.snapshot()["attention.reference.sparse"] == decoded * sparse_layers
    # 3 pages and the one being filled, in the layers that read lists
    features = log.features[log.features[:, FEATURES.index("prefill_tokens")] == 0]
    sparse, rows = (features[:, FEATURES.index(name)] for name in ("sparse_kv_tokens", "draft_rows"))
    share = sparse_layers / engine.loaded.config.num_layers
    assert len(features) > 20 and (sparse <= share * rows * 4 * 16).all() and (rows > 0).all()


def test_the_text_is_the_same_with_and_without_planning_ahead() -> None:
    params = SamplingParams(temperature=0.7, max_tokens=40, ignore_eos=True, detokenize=False)
    one, other = (_run(_engine(small("delta"), async_scheduling=flag), params) for flag in (False, True))
    assert _tokens(one) == _tokens(other)


def test_the_record_says_that_it_is_lossy() -> None:
    engine = _engine(small("delta"))
    engine.begin_record()
    _run(engine, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False))
    _, _, config = engine.record()
    assert config["lossy"] and config["decode"] == "delta" and "lossy" in config["policy_label"]
    plain = make_engine("qwen3")
    assert not plain.record()[2]["lossy"]


def test_its_own_selector_unless_one_is_given() -> None:
    assert EngineConfig(decode="delta").policy_spec.selector == DELTA
    own = SelectorSpec("delta", 0.1, 32)
    assert EngineConfig(decode="delta", policy=PolicySpec(selector=own)).policy_spec.selector == own
    assert EngineConfig().policy_spec.selector == SelectorSpec() and not EngineConfig().lossy


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"policy": "fixed:g=3+delta"}, "policy 'fixed'"),
        ({"policy": PolicySpec(selector=SelectorSpec("verify", 0.5))}, "--selector delta"),
        ({"policy": PolicySpec(selector=SelectorSpec("window"))}, "--selector delta"),
        ({"policy": PolicySpec(num_speculative_tokens=4)}, "num_speculative_tokens"),
        ({"synthetic_acceptance_rates": (0.5,)}, "synthetic_acceptance_rates"),
        ({"decode": "delt"}, "did you mean 'delta'?"),
    ],
)
def test_what_makes_no_sense_with_it_is_an_error(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(UsageError, match="decode") as caught:
        EngineConfig(**{"decode": "delta", **settings})
    assert part in str(caught.value)


def test_a_policy_that_drafts_cannot_be_switched_on() -> None:
    engine = _engine(small("delta"))
    with pytest.raises(UsageError, match="lossy"):
        engine.set_policy("fixed:g=3+delta")
    assert np.all(engine.scheduler.slots.active == 0)
