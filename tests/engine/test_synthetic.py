"""Synthetic acceptance: the declared rates, the same luck for every policy, and a mark on every output."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from aspire import LLM, EngineConfig, LLMEngine, SamplingParams
from aspire.engine.synthetic import SyntheticAcceptance, _uniform
from aspire.errors import UsageError
from aspire.models import load_model


def _run(policy: str, rates: tuple[float, ...]) -> LLMEngine:
    config = EngineConfig(
        model="tiny-llama",
        load_format="dummy",
        policy=policy,
        max_num_seqs=4,
        max_model_len=256,
        synthetic_acceptance_rates=rates,
    )
    engine = LLMEngine(config, model=load_model("tiny-llama", load_format="dummy"))
    for index in range(4):
        engine.add_request(str(index), [index + 1, 2, 3], SamplingParams(max_tokens=120, ignore_eos=True))
    while engine.has_unfinished_requests:
        assert all(output.synthetic for output in engine.step())
    return engine


def test_rates_are_met() -> None:
    engine = _run("fixed:g=3+window", (0.9, 0.5))
    verify = engine.log.column("drafted") == 3
    accepted = engine.log.column("accepted")[verify & (engine.log.column("mode") == 3)]
    reached = [float((accepted >= place).mean()) for place in (1, 2, 3)]
    np.testing.assert_allclose(reached, [0.9, 0.45, 0.225], atol=0.12)


@pytest.mark.parametrize(("rates", "mean"), [((0.0,), 0.0), ((1.0,), 3.0)])
def test_all_or_nothing(rates: tuple[float, ...], mean: float) -> None:
    engine = _run("fixed:g=3+window", rates)
    rounds = (engine.log.column("mode") == 3) & (engine.log.column("drafted") == 3)
    assert engine.log.column("accepted")[rounds].mean() == mean


def test_luck_is_uniform_and_differs_by_key_and_counter() -> None:
    luck = _uniform(np.arange(200, dtype=np.uint64)[:, None], np.arange(200, dtype=np.uint64))
    counts = np.bincount((luck.ravel() * 20).astype(int), minlength=20)
    assert ((counts - 2000.0) ** 2 / 2000.0).sum() < 45  # chi-square, 19 degrees of freedom: p = 0.001 at 43.8
    assert len(np.unique(luck)) == luck.size
    assert abs(np.corrcoef(luck[:, :-1].ravel(), luck[:, 1:].ravel())[0, 1]) < 0.02


def test_rates_outside_0_to_1_are_refused() -> None:
    with pytest.raises(UsageError, match="probabilities in 0..1"):
        EngineConfig(synthetic_acceptance_rates=(1.2,))


def test_nothing_is_drawn_where_nothing_was_drafted() -> None:
    drawn = SyntheticAcceptance((0.5,), 0)
    engine = LLM("tiny-llama", load_format="dummy", max_num_seqs=1, max_model_len=64).engine
    engine.add_request("a", [1], SamplingParams(max_tokens=4, ignore_eos=True))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert drawn.draw(plan).tolist() == [-1]
