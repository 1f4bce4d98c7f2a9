"""The goodput policy: prices of the true batch, no drafts where none pay, bounded exploration, and what it learns."""

from __future__ import annotations

import timeit
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.scheduler import Action, Feedback, PolicySpec, PolicyView, StepFeatures
from aspire.scheduler.policies.goodput import REPRICE_STEPS, Goodput
from aspire.scheduler.policies.prices import Prices, price_curve
from aspire_calibration import LoadedCostModel, analytic_model
from tests.simulator.helpers import LinearCost

DRAFT = int(Action.DRAFT)


def view_of(context: list[int], sparse: list[int], model: Any, drafted: int = 0, **changes: Any) -> PolicyView:
    count = len(context)
    view = PolicyView(
        slots=np.arange(count),
        drafted=np.full(count, drafted),
        can_draft=np.ones(count, dtype=bool),
        context_tokens=np.array(context),
        sparse_tokens=np.array(sparse),
        full_layer_share=0.0,
        select_layer_share=0.0,
        other=StepFeatures.zeros(),
        cost_model=model,
    )
    return replace(view, **changes)


def price_batch(view: PolicyView, model: Any, acceptance: Any, empty_s: float | None = None) -> Prices:
    """Both halves at once."""
    return price_curve(view, model, acceptance, empty_s).around(model)


def built(slots: int, d_max: int = 16, **params: Any) -> Goodput:
    policy = PolicySpec("goodput", params, num_speculative_tokens=d_max).build(slots)
    assert isinstance(policy, Goodput)
    policy.reset(np.arange(slots))
    return policy


def outcome(view: PolicyView, actions: Any, accepted: Any, margin: float = 3.0, seconds: float = np.nan) -> Feedback:
    draft = actions == DRAFT
    rows = float(len(actions))
    features = StepFeatures.of(
        rows=rows,
        query_tokens=float(np.where(draft, 1, view.drafted + 1).sum()),
        draft_rows=float(draft.sum()),
        verify_rows=rows - float(draft.sum()),
        sparse_kv_tokens=float(view.sparse_tokens[draft].sum()),
        full_kv_tokens=float(view.context_tokens[~draft].sum()),
    )
    return Feedback(
        slots=view.slots,
        verified=~draft,
        drafted=view.drafted,
        accepted=np.where(draft, 0, np.minimum(accepted, view.drafted)),
        margin=np.where(draft, margin, np.nan),
        features=features,
        seconds=seconds,
    )


def play(policy: Goodput, view: PolicyView, steps: int, accepted: int, stretch: float | None = None) -> np.ndarray:
    """Run ``steps`` steps in which each round accepts ``accepted`` drafts; [steps, n]: whether each request drafted."""
    drafted, seen = np.zeros(len(view.slots), dtype=np.int64), []
    for _ in range(steps):
        now = replace(view, drafted=drafted)
        actions = policy.plan(now)
        seen.append(actions == DRAFT)
        done = outcome(now, actions, accepted)
        if stretch is not None:
            assert now.cost_model is not None
            done = replace(done, seconds=stretch * float(now.cost_model.predict(done.features)))
        policy.observe(done)
        drafted = np.where(seen[-1], drafted + 1, 0)
    return np.array(seen)


# ---- prices ------------------------------------------------------------------------------------------------------

contexts = st.lists(st.integers(600, 9000), min_size=1, max_size=8)


@given(contexts, st.floats(0.0, 0.5), st.floats(0.0, 1e-2), st.floats(0.0, 1e-4), st.floats(0.1, 1.0))
def test_prices_of_a_linear_model_are_exact(
    context: list[int], share: float, base: float, token: float, alpha: float
) -> None:
    """Where costs are linear the chords are the slopes: every row's own price, and a shared part that is the base."""
    model = LinearCost(base=base + 1e-4, token=token, kv=1e-7)
    sparse = [32 * (7 + index) for index in range(len(context))]
    view = view_of(context, sparse, model, full_layer_share=share)
    prices = price_batch(view, model, np.full((len(context), 5), alpha))
    rows = model.predict(view.draft_features()) - model.base
    np.testing.assert_allclose(prices.of_drafts(view), rows + token + model.base / len(context), rtol=1e-6)
    plain = float(model.predict(StepFeatures.from_matrix(view.verify_features().matrix().sum(axis=0))))
    assert prices.ar_rate == pytest.approx(len(context) / plain)
    assert prices.speedup >= 1.0


def test_a_batch_is_priced_in_two_calls_with_the_numbers_of_many() -> None:
    """The curve over draft lengths and the chords around its best, asked for one by one."""
    model = LoadedCostModel(analytic_model("h200", "smollm2-135m", graph_buckets=(64, 128, 192, 256)), warn=print)
    chunk = StepFeatures.of(rows=1.0, query_tokens=300.0, prefill_tokens=300.0, prefill_pairs=3e5)
    view = view_of([3000] * 24 + [5000] * 24, [512] * 48, model, select_layer_share=1.0, other=chunk)
    asked: list[Any] = []

    class Counted:
        def predict(self, features: StepFeatures) -> np.ndarray:
            return model.predict(features)

        def marginal(self, base: StepFeatures, added: StepFeatures) -> np.ndarray:
            asked.append(added)
            return model.marginal(base, added)

    acceptance, empty_s = np.full((48, 16), 0.8), float(model.predict(StepFeatures.zeros()))
    prices = price_batch(view, Counted(), acceptance, empty_s)
    assert len(asked) == 2
    draft = StepFeatures.of(rows=1.0, query_tokens=1.0, draft_rows=1.0, sparse_kv_tokens=512.0).matrix()
    kv = {"full_kv_tokens": 4000.0, "select_kv_tokens": 4000.0, "select_rows": 1.0}
    verify = StepFeatures.of(rows=1.0, query_tokens=1.0, verify_rows=1.0, **kv).matrix()
    token = StepFeatures.of(query_tokens=1.0, padded_tokens=0.0).matrix()
    rates, seconds = [], []
    for g in range(17):
        step = StepFeatures.from_matrix(48 * (g * (draft + token) + verify) / (g + 1))
        seconds.append(empty_s + float(model.marginal(chunk, step)))
        rates.append(48 * sum(0.8**k for k in range(g + 1)) / (g + 1) / seconds[-1])
    best = int(np.argmax(rates))
    around = StepFeatures.from_matrix(chunk.matrix() + 24 * (best * (draft + token) + verify) / (best + 1))
    row, one, full = (
        float(model.marginal(around, StepFeatures.from_matrix(48 * work))) / 48 for work in (draft, token, verify)
    )
    assert best > 0 and prices.speedup == pytest.approx(rates[best] / prices.ar_rate, rel=1e-9)
    assert (prices.row, prices.token) == (pytest.approx(row, rel=1e-9), pytest.approx(one, rel=1e-9))
    rows_s = 48 * (best * (row + one) + full) / (best + 1)
    assert prices.shared == pytest.approx(seconds[best] - rows_s, rel=1e-9)


def test_prompts_in_the_step_are_not_charged_to_the_drafts() -> None:
    model = LinearCost(base=1e-3, token=1e-6, kv=1e-7, prefill=1e-9)
    chunk = StepFeatures.of(rows=1.0, query_tokens=4000.0, prefill_tokens=4000.0, prefill_pairs=8e6)
    alone = view_of([4000] * 8, [512] * 8, model)
    beside = replace(alone, other=chunk)
    acceptance = np.full((8, 16), 0.9)
    first, second = (price_batch(view, model, acceptance) for view in (alone, beside))
    np.testing.assert_allclose(second.of_drafts(beside), first.of_drafts(alone))
    assert second.ar_rate == pytest.approx(first.ar_rate)


def test_a_staircase_is_seen_whole() -> None:
    """128 rows fill a bucket exactly. The next stair is dear: the best common length looks past it, or stays at 0."""

    class Stairs(LinearCost):
        def __init__(self, stair_s: float) -> None:
            super().__init__(base=1e-3, token=0.0, kv=1e-8)
            self.stair_s = stair_s

        def predict(self, features: StepFeatures) -> np.ndarray:
            return super().predict(features) + self.stair_s * np.ceil(features.query_tokens / 128)

    acceptance = np.full((128, 16), 0.95)
    cheap, dear = (Stairs(stair) for stair in (1e-4, 1e-1))
    view = view_of([7000] * 128, [512] * 128, cheap)
    low, high = price_batch(view, cheap, acceptance), price_batch(replace(view, cost_model=dear), dear, acceptance)
    assert low.speedup > 2.0
    assert high.speedup == 1.0
    # a stair of 128 tokens is shared by them, although the first one alone would climb it
    assert low.token == pytest.approx(1e-4 / 128, rel=0.6)
    assert high.token > 10 * low.token


# ---- decisions ---------------------------------------------------------------------------------------------------


def test_drafts_where_it_pays_and_not_where_it_does_not() -> None:
    long, short = ([8000] * 64, [512] * 64), ([200] * 4, [200] * 4)
    model = LinearCost(base=1e-3, token=1e-6, kv=2e-8)
    assert play(built(64), view_of(*long, model), 60, accepted=9).mean() > 0.6
    assert not play(built(4), view_of(*short, model), 300, accepted=9).any()


@pytest.mark.parametrize("context", [8000, 1500])
def test_hopeless_drafts_end_and_exploration_is_bounded(context: int) -> None:
    """Nothing is ever accepted, yet a sure draft would pay: it goes on trying, at less than 2 % of the time."""
    model = LinearCost(base=1e-4, token=1e-6, kv=1e-7)
    policy, view = built(32), view_of([context] * 32, [512] * 32, model)
    play(policy, view, 100, accepted=0)
    drafts = play(policy, view, 800, accepted=0)
    assert drafts.any()
    draft_s = 32 * (model.weights @ view.draft_features().matrix()[0]) + model.base
    verify_s = 32 * (model.weights @ view.verify_features().matrix()[0]) + model.base
    wasted = drafts.mean() * draft_s / ((1 - drafts.mean()) * verify_s)
    assert wasted < 0.02


def test_exploration_tries_requests_in_turn() -> None:
    model = LinearCost(base=1e-4, token=1e-6, kv=1e-7)
    view, drafts = view_of([1500] * 4, [512] * 4, model), {}
    for rounds in (40, 100_000):
        policy = built(4, explore_rounds=rounds)
        play(policy, view, 60, accepted=0)
        drafts[rounds] = play(policy, view, 120, accepted=0)
    assert drafts[100_000].sum() < drafts[40].sum()
    assert (drafts[40].sum(axis=0) >= 2).all() and drafts[40].sum() <= 4 * 5
    assert drafts[40].sum(axis=1).max() <= 2  # not all at once


def test_one_bad_request_does_not_stop_the_others() -> None:
    model = LinearCost(base=1e-4, token=1e-6, kv=1e-7)
    view = view_of([8000] * 16, [512] * 16, model)
    policy, right = built(16), np.full(16, 6)
    right[3] = 0
    drafted, lengths = np.zeros(16, dtype=np.int64), np.zeros(16)
    for _ in range(300):
        now = replace(view, drafted=drafted)
        actions = policy.plan(now)
        lengths += np.where(actions == DRAFT, 1, 0)
        policy.observe(outcome(now, actions, right, margin=1.0))
        drafted = np.where(actions == DRAFT, drafted + 1, 0)
    assert lengths[3] < 0.75 * np.delete(lengths, 3).min()


def test_small_margins_end_a_draft() -> None:
    model = LinearCost(base=1e-4, token=1e-6, kv=1e-7)
    lengths = []
    for margin in (0.01, 0.3, 6.0):
        policy, view, length = built(1), view_of([8000], [512], model), 0
        while policy.plan(replace(view, drafted=np.array([length])))[0] == DRAFT:
            policy.observe(outcome(replace(view, drafted=np.array([length])), np.array([DRAFT]), 0, margin))
            length += 1
        lengths.append(length)
    assert lengths[0] < lengths[1] < lengths[2]


def test_unknown_margins_are_survived() -> None:
    model = LinearCost(base=1e-4, token=1e-6, kv=1e-7)
    policy, view = built(8), view_of([8000] * 8, [512] * 8, model)
    drafted = np.zeros(8, dtype=np.int64)
    for _ in range(200):
        now = replace(view, drafted=drafted)
        actions = policy.plan(now)
        policy.observe(outcome(now, actions, 5, margin=float("nan")))
        drafted = np.where(actions == DRAFT, drafted + 1, 0)
        assert np.isfinite(policy.survival.survival(view.slots, drafted)).all()
    assert policy.speedup > 1.5


def test_a_slower_machine_changes_nothing() -> None:
    """Measured times twice as long as the cost model says: every price is dearer alike."""
    model = LinearCost(base=1e-3, token=1e-6, kv=1e-8)
    view = view_of([5000] * 16, [512] * 16, model)
    runs = [play(built(16), view, 400, accepted=4, stretch=stretch)[200:].mean() for stretch in (None, 1.0, 2.0)]
    assert runs[0] == pytest.approx(runs[1], abs=0.01) and runs[0] == pytest.approx(runs[2], abs=0.03)


def test_a_cost_model_that_learns_is_told() -> None:
    class Learning(LinearCost):
        def __init__(self) -> None:
            super().__init__(base=1e-3, token=1e-6, kv=1e-8)
            self.told: list[float] = []

        def observe(self, features: StepFeatures, seconds: float) -> None:
            self.told.append(seconds)

    model = Learning()
    policy, view = built(4), view_of([5000] * 4, [512] * 4, model)
    play(policy, view, 5, accepted=2)
    assert not model.told  # nothing was measured
    play(policy, view, 5, accepted=2, stretch=1.3)
    assert len(model.told) == 5 and min(model.told) > 0


def test_without_a_cost_model_the_ratios_price() -> None:
    cheap, dear = (built(4, cost_ratio=c, verify_ratio=0.02) for c in (0.1, 1.0))
    view = view_of([1000] * 4, [500] * 4, None)
    assert play(cheap, view, 200, accepted=8).mean() > 0.7
    assert not play(dear, view, 200, accepted=8).any()


def test_no_drafts_allowed_is_plain_decoding() -> None:
    policy = built(2, d_max=0)
    assert not policy.drafts
    assert play(policy, view_of([100, 100], [90, 90], LinearCost()), 3, accepted=0).sum() == 0


@given(st.integers(0, 20), st.integers(0, 20))
def test_drafts_beyond_the_cap_of_a_new_policy_are_verified(held: int, right: int) -> None:
    """A policy with a smaller cap takes over requests that hold longer drafts."""
    policy = built(2, d_max=4, cost_ratio=0.1)
    view = view_of([1000, 1000], [500, 500], None, drafted=held)
    actions = policy.plan(view)
    assert held < 4 or (actions != DRAFT).all()
    policy.observe(outcome(view, actions, right))
    assert np.isfinite(policy.survival.effect).all()


# ---- cost --------------------------------------------------------------------------------------------------------


def test_planning_is_cheap() -> None:
    """Bounds are ten times what an idle core needs (about 60 us a plan of 128 slots), so that a busy one passes."""
    model = LoadedCostModel(analytic_model("h200", "smollm2-135m", graph_buckets=(64, 128, 192, 256, 384, 512)))
    policy, view = built(128), view_of([4000] * 128, [512] * 128, model)
    play(policy, view, 3, accepted=2)

    def step() -> None:
        policy.plan(view)
        policy.learn()

    best_s = min(timeit.repeat(step, number=4 * REPRICE_STEPS, repeat=5)) / (4 * REPRICE_STEPS)
    assert best_s < 600e-6


def test_the_rate_to_beat_is_that_of_a_batch_that_makes_no_page_lists() -> None:
    model = LoadedCostModel(analytic_model("h200", "smollm2-135m"), warn=lambda message: None)
    view = view_of([4000] * 32, [512] * 32, model)
    chance = np.full((32, 16), 0.8)
    with_lists = price_batch(replace(view, select_layer_share=1.0), model, chance)
    assert with_lists.ar_rate == pytest.approx(price_batch(view, model, chance).ar_rate)


def test_where_not_even_a_sure_draft_pays_a_batch_is_asked_ever_less_often() -> None:
    policy, view = built(4), view_of([2000] * 4, [2000] * 4, LinearCost(base=1e-4, token=1e-6, kv=1e-7))
    asked, verify = [], np.full(4, int(Action.VERIFY))
    for step in range(300):
        if not policy.rests(4):
            asked.append(step)
            assert (policy.plan(view) != DRAFT).all() and policy.resting
        policy.observe(outcome(view, verify, 0))
    assert np.diff(asked).tolist() == [8, 16, 32, 64, 64, 64]
    while policy.rests(4):
        pass
    policy.plan(view)
    policy.reset(np.array([3]))  # another request moved in
    assert all(policy.rests(4) for _ in range(8)) and not policy.rests(4)


def test_a_batch_at_rest_is_asked_again_soon_and_learns_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LinearCost(base=1e-4, token=1e-6, kv=1e-7)
    view, rates = view_of([200] * 4, [200] * 4, model), []
    for longest in (1, 8):
        monkeypatch.setattr("aspire.scheduler.policies.goodput._REST_STEPS", longest)
        policy = built(4, explore_rounds=100_000)
        assert not play(policy, view, 60, accepted=0, stretch=1.3).any() and policy.resting
        rates.append((policy.speedup, policy.survival.next_acceptance(view.slots, view.drafted).tolist()))
        better = replace(view, context_tokens=np.full(4, 90_000), cost_model=LinearCost(base=1e-6, token=1e-7, kv=1e-7))
        steps = next(step for step in range(40) if (policy.plan(better) == DRAFT).any())
        assert steps < longest + 2 * REPRICE_STEPS
    np.testing.assert_allclose(rates[0][0], rates[1][0], rtol=1e-9)
    np.testing.assert_allclose(rates[0][1], rates[1][1], rtol=1e-9)
