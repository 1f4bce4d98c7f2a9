"""The engine's record of margins: one for each committed token, the same under every policy, in order of output."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from aspire.sampling_params import SamplingParams
from aspire.scheduler import PolicySpec
from tests.invariants.cases import fixed, prompt_of, small
from tests.invariants.harness import Limits, drive, make_engine

PARAMS = SamplingParams(temperature=0.8, max_tokens=30, ignore_eos=True)


def _margins(policy: PolicySpec, limits: Limits) -> tuple[list[np.ndarray], list[list[int]], int]:
    engine = make_engine("qwen3", policy, limits)
    engine.begin_record(margins=True)
    for index, length in enumerate((40, 70, 100)):
        engine.add_request(str(index), prompt_of(length, model="qwen3"), PARAMS)
    outputs = drive(engine).outputs
    found = engine.recorder.margins()
    assert found is not None
    tokens = [outputs[str(index)].outputs[0].token_ids for index in range(3)]
    return found, tokens, sum(output.metrics.preemptions for output in outputs.values())


def test_every_token_has_the_margin_that_plain_decoding_finds() -> None:
    plain, tokens, _ = _margins(PolicySpec(), Limits(4, 256, 256))
    assert [len(each) for each in plain] == [30, 30, 30]
    assert all((each > 0).all() for each in plain)
    for policy, limits in (
        (fixed(4, small("verify")), Limits(4, 256, 256)),
        (fixed(3, small("window")), Limits(2, 64, 256)),
    ):
        margins, same, _ = _margins(policy, limits)
        assert same == tokens
        for ours, theirs in zip(margins, plain, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_preemption_loses_no_margin() -> None:
    plain, _, _ = _margins(PolicySpec(), Limits(4, 256, 256))
    margins, _, preemptions = _margins(fixed(3, small("verify")), Limits(3, 128, 256, num_pages=18))
    assert preemptions > 0
    for ours, theirs in zip(margins, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_nothing_is_kept_unasked() -> None:
    engine = make_engine("qwen3")
    engine.add_request("0", prompt_of(20, model="qwen3"), PARAMS)
    drive(engine)
    assert engine.recorder.margins() is None
