"""An engine takes its prices from a file, and refuses those of another setup."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from aspire import LLM, EngineConfig, LLMEngine, SamplingParams
from aspire.engine.identity import identity_of
from aspire.errors import MismatchError
from aspire_calibration import analytic_model
from tests.scheduler.test_aspire_prices import Counted

SETTINGS = {"load_format": "dummy", "max_num_seqs": 2, "max_model_len": 128, "policy": "aspire+window"}


def test_prices_of_another_setup_are_refused_unless_allowed(tmp_path: Path) -> None:
    path = analytic_model("h100", "qwen3-8b").save(tmp_path / "cost_model.json")
    with pytest.raises(MismatchError, match="was made for another setup.*--allow-mismatch"):
        LLM("tiny-llama", cost_model=path, **SETTINGS)
    llm = LLM("tiny-llama", cost_model=path, allow_mismatch=True, **SETTINGS)
    output = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 8


def test_prices_of_this_setup_are_taken(tmp_path: Path) -> None:
    from aspire.evidence import provenance

    engine = LLM("tiny-llama", **{**SETTINGS, "policy": "autoregressive"}).engine
    model, settings = identity_of(engine)
    file = replace(analytic_model("cpu", "smollm2-135m"), hardware={"name": provenance()["hardware"]}, model=model)
    path = replace(file, settings=settings).save(tmp_path / "cost_model.json")
    assert LLM("tiny-llama", cost_model=path, **SETTINGS).engine.scheduler.cost_model is not None


def test_prices_are_ready_before_the_first_request_and_after_a_switch() -> None:
    """No plan of `aspire` asks the cost model."""
    prices = Counted(cells=1000, fixed=True)
    config = EngineConfig("tiny-llama", load_format="dummy", max_num_seqs=2, max_model_len=128, policy="aspire+window")
    engine = LLMEngine(config, cost_model=prices)
    for policy in ("aspire+window", "aspire+refresh"):
        engine.set_policy(policy)
        filled = len(prices.asked)
        for index in range(2):
            engine.add_request(f"{policy}-{index}", [1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
        while engine.has_unfinished_requests:
            engine.step()
        assert filled and len(prices.asked) == filled
    assert engine.log.column("drafted").max() > 0
