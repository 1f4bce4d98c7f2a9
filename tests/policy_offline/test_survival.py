"""Properties of the survival model, and its agreement with a scalar oracle written from docs/goodput.md."""

from __future__ import annotations

import json
import math
import timeit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.errors import InputError, UsageError
from aspire.scheduler.survival import RateTracker, SurvivalModel, SurvivalParams, best_rate, draft_price, worth_drafting

D_MAX = 6
margins = st.floats(0.0, 30.0, allow_nan=False)
# One round of one request: margins of its drafts and how many were accepted (cut to the number of drafts).
request_round = st.tuples(st.lists(margins, max_size=D_MAX), st.integers(0, D_MAX))
batch_rounds = st.lists(st.lists(request_round, min_size=3, max_size=3), min_size=1, max_size=8)


def play(model: SurvivalModel, rounds: list[list[tuple[list[float], int]]]) -> None:
    """Batched rounds of slots 0..n-1: drafts position by position, then one verification of all."""
    for batch in rounds:
        slots = np.arange(len(batch))
        length = np.array([len(drafts) for drafts, _ in batch])
        for position in range(D_MAX):
            live = slots[length > position]
            if len(live):
                seen = np.array([batch[slot][0][position] for slot in live])
                model.observe_drafts(live, np.full(len(live), position), seen)
        accepted = np.array([min(right, len(drafts)) for drafts, right in batch])
        model.observe_verified(slots, length, accepted)


class Oracle:
    """The same estimator for scalars, one request and one draft at a time."""

    def __init__(self, slots: int, d_max: int, params: SurvivalParams) -> None:
        self.p, self.d_max = params, d_max
        self.w = [params.intercept, params.slope, params.position_slope]
        self.prior = np.diag(params.precision).astype(float)
        self.A = self.prior.copy()
        self.u, self.var = [0.0] * slots, [params.effect_variance] * slots
        self.right, self.seen = [0.0] * d_max, [0.0] * d_max

    def chance(self, slot: int, place: int, margin: float) -> float:
        z = self.w[0] + self.w[1] * math.sqrt(min(margin, 6.0)) + self.w[2] * place / self.d_max + self.u[slot]
        return 1 / (1 + math.exp(-max(-12.0, min(12.0, z))))

    def round(self, batch: list[tuple[list[float], int]]) -> list[float]:
        survival, gradient, hessian = [], np.zeros(3), np.zeros((3, 3))
        effects = []
        keep = math.exp(-len(batch) / self.p.memory_rounds)
        self.right, self.seen = [keep * x for x in self.right], [keep * x for x in self.seen]
        for slot, (drafts, right) in enumerate(batch):
            chances = [self.chance(slot, place, margin) for place, margin in enumerate(drafts)]
            survival.append(math.prod(chances))
            miss = information = 0.0
            for place, chance in enumerate(chances):
                if place > right:
                    break
                x = np.array([1.0, math.sqrt(min(drafts[place], 6.0)), place / self.d_max])
                gradient += x * ((place < right) - chance)
                hessian += np.outer(x, x) * chance * (1 - chance)
                miss += (place < right) - chance
                information += chance * (1 - chance)
                self.right[place] += place < right
                self.seen[place] += 1
            effects.append((miss, information))
        self.A = keep * self.A + (1 - keep) * self.prior + hessian
        self.w = (np.array(self.w) + np.linalg.inv(self.A) @ gradient).tolist()
        self.w[1] = max(self.w[1], 0.0)
        for slot, (miss, information) in enumerate(effects):
            variance = 1 / (1 / self.var[slot] + information)
            self.u[slot] = self.p.effect_carry * (self.u[slot] + variance * miss)
            self.var[slot] = self.p.effect_carry**2 * variance + (1 - self.p.effect_carry**2) * self.p.effect_variance
        return survival

    def next_chance(self, slot: int, place: int, optimism: float | None = None) -> float:
        """Of the draft at ``place``, its margin unknown; by default of a look-ahead from no drafts: with optimism."""
        p = self.p
        hope = p.optimism if optimism is None else optimism
        overall = (sum(self.right) + p.prior_acceptance * p.prior_trials) / (sum(self.seen) + p.prior_trials)
        pooled = (self.right[place] + p.position_trials * overall) / (self.seen[place] + p.position_trials)
        z = math.log(pooled / (1 - pooled)) + self.u[slot] + hope * math.sqrt(self.var[slot])
        return 1 / (1 + math.exp(-max(-12.0, min(12.0, z))))


@given(batch_rounds, st.integers(0, 2), margins)
def test_vectorised_equals_scalar_oracle(rounds: list[list[tuple[list[float], int]]], slot: int, margin: float) -> None:
    params = SurvivalParams(memory_rounds=50.0)
    model, oracle = SurvivalModel(3, D_MAX, params), Oracle(3, D_MAX, params)
    play(model, rounds)
    for batch in rounds:
        oracle.round(batch)
    np.testing.assert_allclose(model.weights, oracle.w, rtol=1e-7, atol=1e-9)
    one = np.array([slot])
    expected = [oracle.next_chance(slot, 0), oracle.next_chance(slot, 0) * oracle.next_chance(slot, 1)]
    np.testing.assert_allclose(model.next_acceptance(one, np.array([0]), 2)[0], expected, rtol=1e-7)
    model.observe_drafts(one, np.array([0]), np.array([margin]))
    model.observe_drafts(one, np.array([1]), np.array([2 * margin]))
    product = oracle.chance(slot, 0, margin) * oracle.chance(slot, 1, 2 * margin)
    np.testing.assert_allclose(model.survival(one, np.array([2])), [product], rtol=1e-7)
    late = product * oracle.next_chance(slot, 2, optimism=0.0)
    np.testing.assert_allclose(model.survival(one, np.array([3])), [late], rtol=1e-7)
    assert model.survival(one, np.array([0])) == 1.0  # a new round, although the verification was not observed


@given(batch_rounds, margins, margins)
def test_survival_is_a_probability_and_grows_with_the_margin(
    rounds: list[list[tuple[list[float], int]]], first: float, second: float
) -> None:
    model = SurvivalModel(3, D_MAX)
    play(model, rounds)
    slots, low, high = np.arange(3), min(first, second), max(first, second)
    none = np.zeros(3, dtype=int)
    assert (model.survival(slots, none) == 1.0).all()
    chances = [model.acceptance(slots, np.zeros(3, dtype=int), np.full(3, margin)) for margin in (low, high)]
    assert (chances[0] <= chances[1]).all()
    previous = model.survival(slots, none)
    for position in range(D_MAX):
        model.observe_drafts(slots, np.full(3, position), np.full(3, low))
        now = model.survival(slots, none + position + 1)
        assert ((now >= 0) & (now <= previous)).all()
        previous = now
        ahead = model.next_acceptance(slots, none + position + 1, 4)
        assert ((ahead >= 0) & (ahead <= 1)).all() and (np.diff(ahead, axis=1) <= 0).all()
        assert (ahead[:, D_MAX - position - 1 :] == 0).all()  # no draft past d_max


@given(batch_rounds, st.lists(margins, min_size=D_MAX, max_size=D_MAX), st.integers(0, D_MAX - 2))
def test_censoring_margins_behind_the_first_rejection_teach_nothing(
    rounds: list[list[tuple[list[float], int]]], drafts: list[float], right: int
) -> None:
    """What was drafted behind a rejection has no label: other margins there leave the same state behind."""
    ends = []
    for tail in (0.0, 25.0):
        model = SurvivalModel(3, D_MAX)
        play(model, rounds)
        shown = [*drafts[: right + 1], *[tail] * (D_MAX - right - 1)]
        play(model, [[(shown, right), ([], 0), (shown[: right + 1], right)]])
        ends.append((model.to_dict(), model.effect.copy()))
    assert ends[0][0] == ends[1][0]
    assert (ends[0][1] == ends[1][1]).all()


def test_a_full_acceptance_says_nothing_about_the_draft_that_was_not_made() -> None:
    model = SurvivalModel(1, D_MAX)
    play(model, [[([1.0, 2.0], 2)]])
    state = model.to_dict()
    assert state["trials"] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert state["accepted"] == state["trials"]


@given(batch_rounds, batch_rounds)
def test_state_round_trip_goes_through_json(
    before: list[list[tuple[list[float], int]]], after: list[list[tuple[list[float], int]]]
) -> None:
    model, copy = SurvivalModel(3, D_MAX), SurvivalModel(3, D_MAX)
    play(model, before)
    copy.load_dict(json.loads(json.dumps(model.to_dict(), allow_nan=False)))
    model.reset(np.arange(3))
    for one in (model, copy):
        play(one, after)
    assert model.to_dict() == copy.to_dict()
    assert (model.effect == copy.effect).all()


def test_reset_forgets_one_request_alone() -> None:
    model = SurvivalModel(3, D_MAX)
    play(model, [[([0.2] * 4, 0), ([3.0] * 4, 4), ([0.2] * 4, 4)]] * 4)
    kept = model.effect[[0, 2]].copy()
    assert model.effect[0] < 0 < model.effect[2]
    model.reset(np.array([1]))
    assert model.effect[1] == 0.0
    assert (model.effect[[0, 2]] == kept).all()


def test_learns_the_true_curve_and_the_requests_that_differ_from_it() -> None:
    """Drafts of known acceptance logit 0.5 + 1.5 sqrt(m) + u: the estimate ends near it from a wrong prior."""
    rng = np.random.default_rng(7)
    count, true_effect = 64, np.repeat([-1.0, 1.0], 32)
    model, slots = SurvivalModel(count, D_MAX, SurvivalParams(intercept=-2.0, slope=3.0)), np.arange(count)
    for _ in range(150):
        seen = rng.exponential(2.0, (count, D_MAX))
        right = rng.random((count, D_MAX)) < 1 / (1 + np.exp(-(0.5 + 1.5 * np.sqrt(seen) + true_effect[:, None])))
        for position in range(D_MAX):
            model.observe_drafts(slots, np.full(count, position), seen[:, position])
        model.observe_verified(slots, np.full(count, D_MAX), np.cumprod(right, axis=1).sum(axis=1))
    chance = [model.acceptance(slots, np.zeros(count, dtype=int), np.full(count, m)) for m in (0.25, 1.0, 4.0)]
    for value, m in zip(chance, (0.25, 1.0, 4.0), strict=True):
        for group, shift in ((value[:32], -1.0), (value[32:], 1.0)):
            assert abs(group.mean() - 1 / (1 + math.exp(-(0.5 + 1.5 * math.sqrt(m) + shift)))) < 0.05


def test_unknown_margins_count_as_the_mean_and_do_not_move_the_curve() -> None:
    model = SurvivalModel(2, D_MAX)
    before = model.weights.copy()
    play(model, [[([float("nan")] * 3, 1), ([float("nan")] * 2, 2)]])
    assert (model.weights == before).all()
    assert model.effect[0] < 0 < model.effect[1]
    model.observe_drafts(np.array([0]), np.array([0]), np.array([float("nan")]))
    assert 0.0 < model.survival(np.array([0]), np.array([1]))[0] < 1.0


def test_a_request_that_stopped_drafting_is_tried_again() -> None:
    """g = 0 for long: the request's bad record fades and its first draft looks worth it again."""
    model, slot = SurvivalModel(1, D_MAX), np.array([0])
    play(model, [[([2.0] * 4, 0)]] * 6)
    low = model.next_acceptance(slot, np.array([0]))[0, 0]
    for _ in range(40):
        model.observe_verified(slot, np.array([0]), np.array([0]))
    assert model.next_acceptance(slot, np.array([0]))[0, 0] > low + 0.2


def test_worth_drafting_compares_gain_with_price() -> None:
    ahead = np.array([[0.9], [0.9], [0.0]])
    stay = worth_drafting(np.array([1.0, 0.1, 1.0]), ahead, 0.1, 3.0)
    assert stay.tolist() == [True, False, False]
    # A dear first row (a graph bucket fills up) pays when the next ones are nearly free.
    step = np.array([[3.5, 0.1, 0.1, 0.1]])
    assert not worth_drafting(np.ones(1), np.array([[1.0]]), step[:, :1], 1.0)[0]
    assert worth_drafting(np.ones(1), np.ones((1, 4)), step, 1.0)[0]


def test_a_draft_bears_its_share_of_the_step() -> None:
    """Alone, a request pays the whole step for a draft, so a rate near 1 / step leaves no room to draft on doubt."""
    row, token = np.array([0.01]), np.array([0.01])
    chance = np.array([[0.7]])
    assert worth_drafting(np.ones(1), chance, draft_price(row, token, 0.0, 1), 1.1)[0]
    assert not worth_drafting(np.ones(1), chance, draft_price(row, token, 0.8, 1), 1.1)[0]
    assert worth_drafting(np.ones(1), chance, draft_price(row, token, 0.8, 64), 1.1)[0]


def test_rate_tracker_starts_from_the_prior_and_follows_the_batch() -> None:
    tracker = RateTracker(best_rate(0.9, 0.17, 16), window_tokens=500.0)
    assert tracker.rate == pytest.approx(max(sum(0.9**i for i in range(g + 1)) / (1 + 0.17 * g) for g in range(17)))
    for _ in range(100):
        tracker.observe(40.0, 20.0)
    assert tracker.rate == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"effect_variance": 0.0},
        {"effect_carry": 1.0},
        {"prior_acceptance": 1.0},
        {"slope": -1.0},
        {"memory_rounds": -1.0},
    ],
)
def test_parameters_out_of_range_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        SurvivalParams(**change)


def test_state_of_another_draft_cap_or_broken_is_refused() -> None:
    state = SurvivalModel(1, 4).to_dict()
    with pytest.raises(InputError, match="d_max 6"):
        SurvivalModel(1, 6).load_dict(state)
    for name, bad in (("trials", [-1.0] * 4), ("precision", [[0.0] * 3] * 3), ("weights", ["a", 1, 2])):
        with pytest.raises(InputError):
            SurvivalModel(1, 4).load_dict({**state, name: bad})
    with pytest.raises(UsageError, match="no key"):
        SurvivalModel(1, 4).load_dict({**state, "extra": 1})


def test_calls_are_cheap_for_256_slots() -> None:
    """The bound is ten times what an idle core needs, so that a busy machine does not fail it."""
    model, slots = SurvivalModel(256, 16), np.arange(256)
    place, seen, length = np.full(256, 3), np.linspace(0.0, 9.0, 256), np.full(256, 8)
    calls = {
        "drafts": lambda: model.observe_drafts(slots, place, seen),
        "next": lambda: model.next_acceptance(slots, place),
        "verified": lambda: model.observe_verified(slots, length, slots % 9),
    }
    for name, call in calls.items():
        best_s = min(timeit.repeat(call, number=20, repeat=5)) / 20
        assert best_s < 800e-6, name


def test_a_draft_without_a_rival_counts_as_a_very_sure_one() -> None:
    """top-k or top-p may leave one token: its margin is infinite, and nothing may become NaN by it."""
    model = SurvivalModel(3, D_MAX, SurvivalParams())
    play(model, [[([math.inf, 1.0], 1), ([math.inf], 1), ([0.5, math.inf], 2)]] * 5)
    assert np.isfinite(model.weights).all()
    slots, first = np.arange(3), np.zeros(3, dtype=np.int64)
    sure = model.acceptance(slots, first, np.full(3, math.inf))
    assert (sure > model.acceptance(slots, first, np.full(3, 1.0))).all()


@given(batch_rounds, st.integers(1, 9))
def test_rounds_without_drafts_may_be_passed_at_once(rounds: list[list[tuple[list[float], int]]], count: int) -> None:
    params = SurvivalParams(memory_rounds=50.0)
    each, once = SurvivalModel(3, D_MAX, params), SurvivalModel(3, D_MAX, params)
    for model in (each, once):
        play(model, rounds)
    slots, none = np.array([0, 2]), np.zeros(2, dtype=np.int64)
    for _ in range(count):
        each.observe_verified(slots, none, none)
    once.pass_rounds(slots, np.full(2, count))
    every, drafted = np.arange(3), np.zeros(3, dtype=np.int64)
    np.testing.assert_allclose(once.weights, each.weights, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        once.next_acceptance(every, drafted, 3), each.next_acceptance(every, drafted, 3), rtol=1e-9
    )
    assert once.next_acceptance(every, drafted).tolist() == once.next_acceptance(every, drafted, 3)[:, :1].tolist()


def test_a_population_that_learns_in_blocks_ends_where_one_does_that_learns_at_once() -> None:
    luck = np.random.default_rng(5)
    models = SurvivalModel(8, 4), SurvivalModel(8, 4, block_rounds=64)
    slots, held = np.arange(8), np.full(8, 4)
    for step in range(400):
        margins, right = luck.exponential(2.0, (4, 8)), luck.integers(0, 5, 8)
        for model in models:
            for place in range(4):
                model.observe_drafts(slots, np.full(8, place), margins[place])
            model.observe_verified(slots, held, right)
        if step == 0:  # the first round of all is learned from at once, as are the requests' own shifts
            np.testing.assert_array_equal(models[0].weights, models[1].weights)
    np.testing.assert_allclose(models[1].weights, models[0].weights, atol=0.1)
    np.testing.assert_allclose(models[1].effect, models[0].effect, atol=0.1)
    given, want = (np.array(model.to_dict()["trials"]) for model in (models[1], models[0]))
    np.testing.assert_allclose(given, want, rtol=0.02)  # nothing is left out
