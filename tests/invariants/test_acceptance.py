"""Drafts that see everything are always right; drafting off and on again loses nothing; the sparse path is taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aspire.engine.llm_engine import LLMEngine
from aspire.sampling_params import SamplingParams
from aspire.scheduler import POLICIES, Mode, PolicySpec
from aspire_kernels import counters
from tests.invariants.cases import KINDS, ample, fixed, prompt_of, small
from tests.invariants.harness import Limits, drive, generate, make_engine

PROMPTS = [prompt_of(length, seed=5, model="qwen3") for length in (3, 31, 64, 97)]


def _drafted_and_accepted(engine: LLMEngine, first_step: int = 0, last_step: int | None = None) -> tuple[int, int]:
    steps = engine.log.step_of_row()
    rows = (engine.log.column("mode") == Mode.VERIFY) & (steps >= first_step)
    if last_step is not None:
        rows &= steps < last_step
    return int(engine.log.column("drafted")[rows].sum()), int(engine.log.column("accepted")[rows].sum())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_that_covers_the_context_accepts_everything(kind: str, temperature: float) -> None:
    engine = make_engine("qwen3", fixed(4, ample(kind)), Limits(4, 256, 256))
    params = SamplingParams(temperature=temperature, top_k=50 if temperature else 0, max_tokens=25, ignore_eos=True)
    generate(engine, PROMPTS, params)
    drafted, accepted = _drafted_and_accepted(engine)
    assert drafted == accepted > 60


@pytest.mark.parametrize("kind", [kind for kind in POLICIES if kind != "autoregressive"])
def test_every_policy_drafts_and_is_right_with_an_ample_budget(kind: str) -> None:
    params = {"cost_ratio": 0.1} if kind in ("aspire", "goodput") else {}
    engine = make_engine("qwen3", PolicySpec(kind=kind, params=params, selector=ample("verify")), Limits(4, 256, 256))
    generate(engine, PROMPTS, SamplingParams(temperature=0.7, max_tokens=25, ignore_eos=True))
    drafted, accepted = _drafted_and_accepted(engine)
    assert drafted == accepted > 30


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("off", [PolicySpec(), PolicySpec(kind="fsm", num_speculative_tokens=0)], ids=["ar", "cap0"])
def test_drafting_off_and_on_again(kind: str, off: PolicySpec) -> None:
    on = fixed(4, ample(kind))
    engine = make_engine("qwen3", on, Limits(4, 256, 256))
    params = SamplingParams(temperature=0.7, max_tokens=60, ignore_eos=True)
    switches = {20: off, 32: on}
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, params)
    drive(engine, before_step=lambda step: engine.set_policy(switches[step]) if step in switches else None)
    for first, last in ((0, 20), (34, None)):
        drafted, accepted = _drafted_and_accepted(engine, first, last)
        assert drafted == accepted > 20, (first, last)
    drafted, _ = _drafted_and_accepted(engine, 22, 32)
    assert drafted == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_sparse_path_is_taken_when_and_only_when_drafting(kind: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    counters.reset()
    generate(make_engine("qwen3"), PROMPTS, params)
    assert counters.snapshot().get("attention.reference.sparse", 0) == 0
    counters.reset()
    engine = make_engine("qwen3", fixed(3, small(kind)), Limits(4, 256, 256))
    generate(engine, PROMPTS, params)
    draft_rows = int((engine.log.column("mode") == Mode.DRAFT).sum())
    full_layers = {"refresh": 1, "refresh-per-layer": 1, "delta": 3}.get(kind, 0)
    sparse = counters.snapshot()["attention.reference.sparse"]
    assert draft_rows > 20 and sparse == draft_rows * (engine.loaded.config.num_layers - full_layers)


@pytest.mark.parametrize(("power", "changes"), [(0.0, False), (1.0, True)])
def test_drafting_changes_lists_by_the_refresh_power(power: float, changes: bool) -> None:
    engine = make_engine(
        "qwen3", fixed(6, replace(small("refresh-per-layer"), refresh_power=power)), Limits(4, 256, 256)
    )
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, SamplingParams(temperature=0.7, max_tokens=30, ignore_eos=True))
    before, changed, drafts = engine.runner.lists.lists.clone(), 0, 0
    while engine.has_unfinished_requests:
        engine.step()
        after = engine.runner.lists.lists.clone()
        if (engine.log.column("mode")[engine.log.rows_of(len(engine.log) - 1)] == Mode.DRAFT).all():
            drafts += 1
            changed += not bool((before == after).all())
        before = after
    assert drafts > 20 and (changed > 0) is changes, (drafts, changed)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_after_prefill_drafts_already(kind: str) -> None:
    engine = make_engine("qwen3", fixed(3, small(kind)), Limits(1, 256, 256))
    generate(engine, [PROMPTS[3]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert engine.log.column("mode")[:2].tolist() == [Mode.PREFILL, Mode.DRAFT]


def test_drafts_read_no_more_than_the_budget() -> None:
    engine = make_engine("qwen3", fixed(3, small("verify")), Limits(1, 256, 256))
    generate(engine, [prompt_of(200, model="qwen3")], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    from aspire.scheduler import FEATURES

    rows, tokens = (FEATURES.index(name) for name in ("draft_rows", "sparse_kv_tokens"))
    features = engine.log.features[engine.log.features[:, rows] > 0]
    # 3 pages, and up to one more that drafts have grown into
    assert len(features) > 10 and np.all(features[:, tokens] / features[:, rows] <= 4 * 16)
