"""`Policy.learn`: what may be known one plan later is done while the device works, with the same plans to follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire.scheduler import PolicySpec, Request, Scheduler, SchedulerConfig, StepFeatures
from aspire.scheduler.policies.goodput import REPRICE_STEPS, Goodput
from aspire.scheduler.survival import SurvivalModel
from tests.scheduler.executor import FakeExecutor
from tests.scheduler.test_goodput import DRAFT, built, outcome, view_of
from tests.scheduler.test_goodput_rounds import VerifyingIsDear
from tests.simulator.helpers import LinearCost

LONG = LinearCost(base=1e-3, token=1e-6, kv=2e-8)  # contexts of 8k are dear to verify


class Counted(LinearCost):
    """Counts the calls of `predict`: a batch is priced in two of `marginal`, which are two each."""

    def __init__(self, **prices: float) -> None:
        super().__init__(**prices)
        self.calls = 0

    def predict(self, features: StepFeatures) -> np.ndarray:
        self.calls += 1
        return super().predict(features)


def modes_of(learn: int, model: Any, seed: int, *, ahead: bool, rate: float) -> tuple[list[list[int]], Goodput]:
    """Steps of requests that come and go. ``learn``: calls of `Scheduler.learn` before each outcome."""
    config = SchedulerConfig(
        max_num_seqs=6, max_num_batched_tokens=256, max_model_len=512, num_pages=160, num_layers=4, watermark=0.0
    )
    scheduler = Scheduler(config, PolicySpec("goodput"), model)
    for index in range(14):
        scheduler.add_request(Request(str(index), 20 + 13 * index, 30 + index, 0.0))
    outcomes = FakeExecutor(scheduler, rate=rate, stop=0.01, seed=seed)
    seen = []
    while scheduler.has_work or scheduler.in_flight:
        while len(scheduler.in_flight) < 1 + ahead and (plan := scheduler.schedule()) is not None:
            seen.append(plan.modes.tolist() + plan.slots.tolist())
        for _ in range(learn):
            scheduler.learn()
        oldest = scheduler.in_flight[0]
        scheduler.update(oldest, outcomes.outcome(oldest))
    policy = scheduler.policy
    assert isinstance(policy, Goodput)
    return seen, policy


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 999), st.booleans(), st.sampled_from([0.3, 0.8, 0.95]), st.booleans())
def test_nobody_need_call_it_and_twice_is_as_good_as_once(seed: int, ahead: bool, rate: float, rounds: bool) -> None:
    model = VerifyingIsDear(5.0) if rounds else LinearCost(base=1e-3, token=1e-6, kv=5e-6)
    never, other = (modes_of(calls, model, seed, ahead=ahead, rate=rate) for calls in (0, 2))
    assert never[0] == other[0]
    assert never[1].survival.to_dict() == other[1].survival.to_dict()
    np.testing.assert_array_equal(never[1].survival.effect, other[1].survival.effect)
    assert never[1].speedup == other[1].speedup


def test_a_plan_whose_prices_are_old_asks_the_cost_model_nothing() -> None:
    model = Counted(base=1e-3, token=1e-6, kv=2e-8)
    policy, drafted, learned = built(32), np.zeros(32, dtype=np.int64), 0
    for step in range(8 * REPRICE_STEPS):
        view = view_of([8000 + step] * 32, [512] * 32, model, drafted=0)
        view = replace(view, drafted=drafted)
        before = model.calls
        actions = policy.plan(view)
        assert step == 0 or model.calls == before
        before = model.calls
        policy.learn()
        learned += model.calls > before
        before = model.calls
        policy.observe(outcome(view, actions, 9))
        assert model.calls == before
        drafted = np.where(actions == DRAFT, drafted + 1, 0)
    assert 4 <= learned <= 28  # half of the prices twice, and the steps that were not priced, every 16 steps


@pytest.mark.parametrize(
    ("before", "after", "at_once"), [(32, 26, False), (32, 18, False), (32, 16, True), (8, 16, True)]
)
def test_only_another_batch_is_priced_before_it_is_planned(before: int, after: int, at_once: bool) -> None:
    model = Counted(base=1e-3, token=1e-6, kv=2e-8)
    policy = built(64)
    policy.plan(view_of([8000] * before, [512] * before, model))
    policy.learn()
    asked = []
    for _ in range(7):
        calls = [model.calls]
        policy.plan(view_of([8000] * after, [512] * after, model))
        calls.append(model.calls)
        policy.learn()
        calls.append(model.calls)
        asked.append(np.diff(calls).tolist())
    quiet = [[0, 0]] * 4  # it may change again in the next step
    assert asked == ([[4, 0], *quiet, [0, 0], [0, 0]] if at_once else [*quiet, [0, 2], [0, 2], [0, 0]])


def test_a_common_round_is_priced_anew_when_it_verifies() -> None:
    """A step of drafts is shorter than the work; so is not the one in which all verify."""
    model = VerifyingIsDear(5.0)
    policy, drafted, priced = built(32), np.zeros(32, dtype=np.int64), []
    for step in range(10 * REPRICE_STEPS):
        view = replace(view_of([2000] * 32, [200] * 32, model), drafted=drafted)
        actions = policy.plan(view)
        stood = policy._standing.prices
        policy.learn()
        if policy._standing.prices is not stood:
            priced.append((step, bool((actions == DRAFT).any())))
        policy.observe(outcome(view, actions, 3))
        drafted = np.where(actions == DRAFT, drafted + 1, 0)
    assert len(priced) >= 4 and not any(drafts for _, drafts in priced), priced
    assert max(np.diff([step for step, _ in priced])) <= 3 * REPRICE_STEPS + 1


def test_a_batch_at_rest_whose_prices_are_old_is_asked_again_with_new_ones() -> None:
    policy = built(16)
    short, long = (view_of([context] * 16, [200] * 16, LONG) for context in (200, 40_000))
    policy.plan(short)
    stood = policy._standing.prices
    assert policy.resting and stood is not None
    while policy.rests(16):
        policy.learn()
    for _ in range(2):  # two steps share the work
        assert (policy.plan(long) != DRAFT).all() and policy._standing.prices is stood
        assert not policy.rests(16), "no rest by prices that are known to be old"
        policy.learn()
    assert policy._standing.prices is not stood
    assert not policy.rests(16), "no rest by prices that are known to be old"
    assert (policy.plan(long) == DRAFT).all()


def test_rounds_that_ended_are_learned_from_before_their_slot_is_given_away() -> None:
    """A request finishes in the verification and another moves in before `learn`: it starts at the population's."""
    early, late = SurvivalModel(2, 4), SurvivalModel(2, 4)
    slots, two = np.arange(2), np.array([2, 2])
    for model in (early, late):
        for place in range(2):
            model.observe_drafts(slots, np.full(2, place), np.array([0.5, 2.0]))
        model.end_rounds(slots, two, np.array([0, 2]))
        if model is early:
            model.learn()
        assert model.survival(slots, np.zeros(2, dtype=np.int64)).tolist() == [1.0, 1.0]
        model.reset(np.array([1]))
        model.observe_drafts(slots, np.zeros(2, dtype=np.int64), np.array([1.0, np.nan]))
        model.learn()
    assert early.effect.tolist() == late.effect.tolist() and early.effect[1] == 0.0 and early.effect[0] < 0.0
    assert early.to_dict() == late.to_dict()
    ones = np.ones(2, dtype=np.int64)
    assert early.survival(slots, ones).tolist() == late.survival(slots, ones).tolist()


def test_survival_of_the_next_round_does_not_wait_for_what_the_last_one_teaches() -> None:
    model = SurvivalModel(1, 4)
    slot, first = np.array([0]), np.array([0])
    model.observe_drafts(slot, first, np.array([0.1]))
    before = model.next_acceptance(slot, first).item()
    model.end_rounds(slot, np.array([1]), np.array([0]))
    assert model.survival(slot, np.array([0])).item() == 1.0
    assert model.next_acceptance(slot, first).item() == before
    model.learn()
    assert model.next_acceptance(slot, first).item() < before
