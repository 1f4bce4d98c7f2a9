"""`goodput` in common rounds: a batch that drafts and verifies together, where one verification makes a step dear."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from aspire.scheduler import Action, StepFeatures
from aspire.scheduler.policies.goodput import Goodput
from aspire.scheduler.policies.rounds import RoundPrices, plan_round
from tests.scheduler.test_goodput import DRAFT, built, outcome, play, view_of

ROWS = ("slots", "verified", "drafted", "accepted", "margin")


class VerifyingIsDear:
    """A step takes 1 ms and a little a row, and ``verify`` ms more if any row verifies."""

    def __init__(self, verify: float) -> None:
        self._verify = verify

    def predict(self, features: StepFeatures) -> np.ndarray:
        ms = 1.0 + 0.01 * features.draft_rows + 0.02 * features.verify_rows + 0.001 * features.query_tokens
        return np.asarray(1e-3 * (ms + self._verify * (features.verify_rows > 0)))

    def marginal(self, base: StepFeatures, added: StepFeatures) -> np.ndarray:
        return np.asarray(self.predict(base + added) - self.predict(base))


def modes(policy: Goodput, model: Any, count: int = 64, steps: int = 60) -> list[set[int]]:
    """Which actions each step holds, every draft being right."""
    view = view_of([4000] * count, [512] * count, model)
    drafted, seen = np.zeros(count, dtype=np.int64), []
    for _ in range(steps):
        now = replace(view, drafted=drafted, can_draft=drafted < policy.d_max)
        actions = policy.plan(now)
        seen.append(set(actions.tolist()))
        done = outcome(now, actions, 16)
        waits = actions == int(Action.WAIT)
        policy.observe(replace(done, **{k: getattr(done, k)[~waits] for k in ROWS}))
        drafted = np.where(actions == DRAFT, drafted + 1, np.where(waits, drafted, 0))
    return seen


def test_a_batch_verifies_together_where_one_verification_makes_the_step_dear() -> None:
    together = modes(built(64), VerifyingIsDear(5.0))
    assert not any({DRAFT, int(Action.VERIFY)} <= step for step in together)
    assert {int(Action.VERIFY)} in together and {DRAFT} in together


def test_no_common_rounds_where_their_verification_costs_more_than_they_give() -> None:
    """Each draft is cheap for what it gives, but a verification makes page lists, and those are dear."""

    class ListsAreDear(VerifyingIsDear):
        def predict(self, features: StepFeatures) -> np.ndarray:
            return np.asarray(super().predict(features) + 40e-3 * (features.select_rows > 0))

    view = view_of([4000] * 64, [512] * 64, ListsAreDear(1.0), select_layer_share=1.0)
    assert play(built(64), view, 200, accepted=16).mean() < 0.02
    cheap = replace(view, cost_model=VerifyingIsDear(1.0))
    assert play(built(64), cheap, 200, accepted=16).mean() > 0.8


def test_nothing_waits_where_verifying_costs_no_more_than_its_rows() -> None:
    apart = modes(built(64), VerifyingIsDear(0.0))
    assert not any(int(Action.WAIT) in step for step in apart)


def test_a_common_round_drops_whom_another_draft_would_not_pay_for() -> None:
    prices = RoundPrices(step=1e-3, row=1e-5, rate=1e5)
    view = view_of([4000] * 4, [512] * 4, None, drafted=3, can_draft=np.array([True, True, True, False]))
    wait, verify = int(Action.WAIT), int(Action.VERIFY)
    # 4,000 tokens per second: the step is worth 4 tokens, a row 0.04
    assert plan_round(prices, view, np.array([3.0, 2.0, 0.01, 9.0]), 4e3, 0.0).tolist() == [DRAFT, DRAFT, wait, wait]
    assert plan_round(prices, view, np.array([1.0, 2.0, 0.01, 9.0]), 4e3, 0.0).tolist() == [verify] * 4


def test_who_has_no_page_list_yet_asks_for_one() -> None:
    view = view_of([4000] * 4, [512] * 4, None, can_draft=np.zeros(4, dtype=bool))
    assert plan_round(RoundPrices(1e-3, 1e-5, 1e5), view, np.full(4, 3.0), 4e3, 0.0).tolist() == [DRAFT] * 4
