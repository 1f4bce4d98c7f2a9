"""`goodput` while its batch changes: requests come and go, prompts come in between, few are left of many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aspire.scheduler import StepFeatures
from aspire.scheduler.policies import price_tables
from aspire.scheduler.policies.goodput import REPRICE_STEPS
from aspire_calibration import load_cost_model
from tests.scheduler.test_goodput import DRAFT, built, outcome, play, price_batch, view_of
from tests.simulator.helpers import LinearCost

SMOLLM2 = Path(__file__).parents[2] / "calibration" / "profiles" / "h200-smollm2-135m.json"


def test_a_batch_rests_through_small_changes_without_being_asked() -> None:
    model = LinearCost(base=1e-4, token=1e-6, kv=1e-7)
    few, policy = view_of([2000] * 4, [2000] * 4, model), built(32)
    prompt = StepFeatures.of(rows=1.0, query_tokens=64.0, prefill_tokens=64.0)
    policy.plan(few)
    assert policy.rests(4) and not policy.rests(3) and not policy.rests(5)
    policy.plan(view_of([2000] * 16, [2000] * 16, model))
    assert policy.rests(16) and policy.rests(18) and policy.rests(14) and not policy.rests(19)
    assert (policy.plan(replace(few, other=prompt)) != DRAFT).all() and policy.resting
    assert not policy.rests(4)  # it was asked last beside a prompt, whose step is another one


def test_a_batch_that_changes_all_the_time_is_priced_now_and_then() -> None:
    """Requests come and go, and prompts with them: prices hold for batches alike, and steps with prompts have their
    own."""
    priced: list[bool] = []

    class Counted(LinearCost):
        def marginal(self, base: StepFeatures, added: StepFeatures) -> np.ndarray:
            if added.rows.ndim and added.rows.size > 5:  # the whole curve
                priced.append(bool(base.prefill_tokens.any()))
            return super().marginal(base, added)

    policy, model = built(64), Counted(base=1e-4, token=1e-6, kv=1e-7)
    chunk = StepFeatures.of(rows=1.0, query_tokens=900.0, prefill_tokens=900.0, prefill_pairs=4e5)
    for step in range(320):
        count = 40 + step % 5
        other = chunk if step % 4 == 0 else StepFeatures.zeros()
        view = view_of([8000] * count, [512] * count, model, other=other)
        policy.observe(outcome(view, policy.plan(view), 0))
    assert 1 <= priced.count(True) <= 80 // REPRICE_STEPS + 1
    assert 1 <= priced.count(False) <= 240 // REPRICE_STEPS + 1
    before = len(priced)
    policy.plan(view_of([8000] * 20, [512] * 20, model))  # half the batch left
    assert len(priced) == before + 1


def pricings(slots: int, batches: list[tuple[int, int]]) -> dict[bool, int]:
    """How often prices of SmolLM2 on an H200 are made, with tables and without, while nobody drafts in steps of
    ``batches``: requests and their context."""
    model, found = load_cost_model(SMOLLM2, warn=lambda _: None), {}
    for tables in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if not tables:
                patch.setattr(price_tables, "has_tables", lambda _: False)
            policy, stood = built(slots), [None]
            for count, context in batches:
                if not policy.rests(count):
                    view = view_of([context] * count, [512] * count, model)
                    actions = policy.plan(view)
                    assert (actions != DRAFT).all()
                    policy.observe(outcome(view, actions, 0))
                policy.learn()
                if policy._standing.prices is not stood[-1]:
                    stood.append(policy._standing.prices)
            found[tables] = len(stood) - 1
    return found


def test_a_batch_whose_drafts_gain_nothing_is_priced_anew_less_often() -> None:
    """Four requests, which drafts do not pay for below 2,000 tokens: tables tell so."""
    priced = pricings(4, [(4, 512 + step) for step in range(1000)])
    assert priced[True] <= priced[False] // 2, priced


def test_a_batch_at_rest_that_comes_and_goes_is_not_priced_for_it_where_tables_tell() -> None:
    """12 to 17 requests of 600 tokens: drafts gain nothing for any of these batches."""
    priced = pricings(32, [(12 + (step // 5) % 6, 600) for step in range(600)])
    assert priced[True] <= priced[False] // 4, priced


def test_rounds_go_on_beside_prompts_for_as_long_as_these_last() -> None:
    """A draft beside a prompt costs its row alone, a verification in each of these steps its whole context."""
    model = LinearCost(base=1e-3, token=1e-6, kv=2e-8)
    chunk = StepFeatures.of(rows=1.0, query_tokens=2000.0, prefill_tokens=2000.0, prefill_pairs=2e6)
    view = view_of([8000] * 32, [512] * 32, model)
    policy, drafted, drew = built(32), np.zeros(32, dtype=np.int64), []
    prompts = [step % 10 == 9 or 100 <= step < 140 for step in range(180)]
    for prompt in prompts:
        now = replace(view, drafted=drafted, other=chunk if prompt else StepFeatures.zeros())
        actions = policy.plan(now)
        drew.append((actions == DRAFT).sum())
        policy.observe(outcome(now, actions, 9))
        drafted = np.where(actions == DRAFT, drafted + 1, 0)
    shares = np.array(drew) / 32
    for first, end in ((20, 100), (100, 140), (140, 180)):
        assert shares[first:end].mean() > 0.6, shares[first:end]


def test_a_few_that_are_left_of_many_go_on_drafting() -> None:
    """Many share a step's price and go three times as fast as plain decoding; four reach 1.5 times that at best, which
    the pace of the many would never let them try."""
    model = LinearCost(base=1e-3, token=1e-6, kv=2e-8)
    policy, many = built(64), view_of([9000] * 64, [512] * 64, model)
    play(policy, many, 400, accepted=15)
    assert policy.speedup > 2.5
    few = view_of([9000] * 4, [512] * 4, model)
    promise = price_batch(few, model, policy.survival.unseen_acceptance(few.slots)).promise
    assert 1.1 < promise < 0.6 * policy.speedup
    assert play(policy, few, 60, accepted=15).mean() > 0.6


def test_a_batch_at_rest_is_asked_again_beside_prompts() -> None:
    """The rest ends in a time of prompts, and drafts pay by then."""
    chunk = StepFeatures.of(rows=1.0, query_tokens=2000.0, prefill_tokens=2000.0, prefill_pairs=2e6)
    policy, dear, cheap = built(32), LinearCost(base=1e-3), LinearCost(base=1e-3, token=1e-6, kv=2e-8)
    assert (policy.plan(view_of([200] * 32, [200] * 32, dear)) != DRAFT).all() and policy.rests(32)
    beside = replace(view_of([8000] * 32, [512] * 32, cheap), other=chunk)
    assert any((policy.plan(beside) == DRAFT).all() for _ in range(40))
