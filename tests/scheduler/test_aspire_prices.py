"""What `Aspire` takes a draft to cost over a verification: as exact as its decisions need, in few calls of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire.scheduler import PolicyView, StepFeatures
from aspire.scheduler.features import FEATURES, CostModel
from aspire.scheduler.policies import copy_prices
from aspire.scheduler.policies.adaptive import Aspire, gain_and_cost
from aspire.scheduler.policies.copy_prices import LINE_ERROR, CopyPrices, exact_ratio
from aspire.scheduler.policies.cost_ratios import CostRatios
from aspire_calibration import LoadedCostModel, analytic_model, load_cost_model
from tests.scheduler.test_learning import modes_of
from tests.scheduler.test_policies import built, view_of
from tests.simulator.helpers import LinearCost

PROFILES = Path(__file__).parents[2] / "calibration" / "profiles"
SMOLLM2 = load_cost_model(PROFILES / "h200-smollm2-135m.json", warn=lambda _: None)
QWEN3 = load_cost_model(PROFILES / "h200-qwen3-8b.json", warn=lambda _: None)
ANALYTIC = LoadedCostModel(analytic_model("h200", "smollm2-135m"), warn=lambda _: None)


@pytest.fixture(scope="module", autouse=True)
def every_size_stays() -> Iterator[None]:
    """Lines from the first plan on; what comes before them, in batches of a new size, has a test of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_prices, "_PATIENCE", 0)
        yield


class Counted(LinearCost):
    """Linear prices of which it is counted how many are asked for; ``fixed``: it says that they stand."""

    def __init__(self, *, cells: int, fixed: bool) -> None:
        super().__init__(base=1e-3, token=1e-6, kv=1e-8)
        self.cells_per_price, self.fixed_prices = cells, fixed
        self.asked: list[int] = []

    def predict(self, features: StepFeatures) -> np.ndarray:
        self.asked.append(features.columns().shape[1])
        return super().predict(features)


def exactly(view: PolicyView) -> np.ndarray:
    """[n]: by the formula, every request of the batch priced as if all were like it."""
    copies, model = len(view.slots), view.cost_model
    assert model is not None
    draft, verify = view.draft_features().columns() * copies, view.verify_features().columns() * copies
    seconds = [model.predict(StepFeatures.from_columns(columns)) for columns in (draft, verify)]
    return seconds[0] / seconds[1]


def ratios(policy: Aspire, view: PolicyView) -> CostRatios:
    return policy._cost_ratios(view)


def batch(
    model: CostModel, drafted: list[int], contexts: list[int] | np.ndarray, share: float = 0.0, select: float = 1 / 30
) -> PolicyView:
    """Requests with page lists as a selector makes them."""
    context = np.asarray(contexts) + drafted
    view = view_of(list(drafted), cost_model=model, full_layer_share=share, select_layer_share=select)
    return replace(view, context_tokens=context, sparse_tokens=np.minimum(context, 512 + context % 16))


batches = st.lists(st.tuples(st.integers(0, 16), st.integers(20, 8000)), min_size=1, max_size=14)


@given(
    steps=st.lists(batches, min_size=1, max_size=4),
    model=st.sampled_from([SMOLLM2, QWEN3, ANALYTIC]),
    share=st.sampled_from([0.0, 0.1]),
)
def test_lines_between_priced_contexts_are_as_near_as_they_say(
    steps: list[list[tuple[int, int]]], model: CostModel, share: float
) -> None:
    """With measured prices and modelled ones, of steps after each other, also where layers of drafts read all."""
    policy = built("aspire", 16)
    for rows in steps:
        view = batch(model, *map(list, zip(*rows, strict=True)), share=share)  # type: ignore[arg-type]
        found = ratios(policy, view)
        exact = exactly(view)
        assert found.now() == pytest.approx(exact, rel=LINE_ERROR)
        some = np.arange(0, len(rows), 2)
        found.ask_for(some)
        assert found.now()[some] == pytest.approx(exact[some], rel=1e-6)


@pytest.mark.parametrize("share", [0.0, 1 / 30, 0.5])
@pytest.mark.parametrize(
    "name", sorted(path.name for path in PROFILES.glob("h200-*.json") if "samples" not in path.name)
)
def test_lines_hold_for_every_committed_profile(name: str, share: float) -> None:
    """At contexts of every length that the profiles hold, for batches of all sizes: no ratio is further off than it
    says, which is mostly much less than `LINE_ERROR`."""
    model = load_cost_model(PROFILES / name, warn=lambda _: None)
    contexts = np.unique(np.geomspace(64, 8000, 700).astype(int))
    every = np.arange(len(contexts))
    for copies in (1, 11, 32, 128):
        for drafts in (0, 1, 7, 16):
            view = batch(model, [drafts] * len(contexts), contexts - drafts, share=share)
            lines = CopyPrices(view, model, copies, 16)
            found = lines.ratio(view.drafted, view.sparse_tokens, np.log2(view.context_tokens))
            assert found is not None
            exact = exact_ratio(view, model, copies, slice(None))
            bound = np.concatenate([lines.error(every[some : some + 1]) for some in every])
            assert (np.abs(found / exact - 1.0) < bound).all()
            assert bound.max() <= LINE_ERROR and np.median(bound) < (0.4 if share else 0.1) * LINE_ERROR


@given(rows=batches)
def test_decisions_are_those_of_exact_prices(rows: list[tuple[int, int]]) -> None:
    """Even of requests whose turning point lies between the line and the price itself."""
    drafted, contexts = map(list, zip(*rows, strict=True))
    view, policy = batch(SMOLLM2, drafted, contexts), built("aspire", 16)
    exact = exactly(view)
    turn = 0.5 * (exact + ratios(policy, view).now())
    low, high = np.zeros(len(rows)), np.ones(len(rows))
    for _ in range(60):  # what accepts more drafts on
        alpha = 0.5 * (low + high)
        drafts = np.greater(*gain_and_cost(alpha, turn, view.drafted))
        low, high = np.where(drafts, low, alpha), np.where(drafts, alpha, high)
    gain, cost = gain_and_cost(alpha, exact, view.drafted)
    clear = np.abs(gain - cost) > 1e-7 * cost  # what single precision of the model tells apart
    assert (policy._worth_drafting(view, alpha) == (gain > cost))[clear].all()


@given(
    alpha=st.floats(0.0, 1.0),
    c=st.floats(1e-3, 3.0),
    off=st.floats(-LINE_ERROR, LINE_ERROR),
    drafted=st.integers(0, 16),
)
def test_what_a_ratio_is_off_moves_a_decision_no_further(alpha: float, c: float, off: float, drafted: int) -> None:
    one, drafts = np.array([alpha]), np.array([drafted])
    exact = np.subtract(*gain_and_cost(one, np.array([c]), drafts))
    gain, cost = gain_and_cost(one, np.array([c * (1.0 + off)]), drafts)
    assert abs(float((gain - cost - exact)[0])) <= abs(off) / (1.0 + off) * float(cost[0]) * (1.0 + 1e-9) + 1e-12


@given(
    contexts=st.lists(st.integers(20, 100_000), min_size=1, max_size=128),
    longest=st.integers(0, 16),
    fixed=st.booleans(),
    data=st.data(),
)
def test_some_of_a_large_batch_are_priced_and_the_others_between_them(
    contexts: list[int], longest: int, fixed: bool, data: st.DataObject
) -> None:
    """Within 2 % of the price of each, whatever the batch; of few rows at all exactly."""
    count = len(contexts)
    drafted = data.draw(st.lists(st.integers(0, longest), min_size=count, max_size=count))
    cost = Counted(cells=1000, fixed=fixed)
    view = batch(cost, drafted, contexts)
    view = replace(view, sparse_tokens=np.maximum(np.minimum(view.context_tokens, 512), view.context_tokens // 14))
    found = ratios(built("aspire", count), view)
    asked = cost.asked[0]
    exact = exactly(view)
    assert found.now() == pytest.approx(exact, rel=0.02)
    if not fixed:
        assert asked <= 2 * count
    if count <= 16:  # priced whole
        assert found.now() == pytest.approx(exact, rel=LINE_ERROR if fixed else 1e-12)
    found.ask_for(np.arange(count))
    assert found.now() == pytest.approx(exact, rel=1e-12 if count <= 16 else 0.02)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from([3, 8]), st.integers(0, 16), st.integers(-20, 9000), st.booleans(), st.booleans()),
        min_size=2,
        max_size=8,
    )
)
def test_prices_are_kept_only_while_they_hold(steps: list[tuple[int, int, int, bool, bool]]) -> None:
    """Batches of two sizes, other page lists, two cost models and refreshed layers: always as if priced anew."""
    models = Counted(cells=10_000, fixed=True), Counted(cells=10_000, fixed=True)
    models[1].weights *= 3.0
    keeping = built("aspire", 8)
    for count, drafted, sparse, other_model, refresh in steps:
        view = view_of([drafted] * count, cost_model=models[other_model], full_layer_share=0.1 * refresh)
        view = replace(view, sparse_tokens=sparse + np.arange(count) % 3)
        assert ratios(keeping, view).now() == pytest.approx(ratios(built("aspire", 8), view).now(), rel=1e-12)


def test_a_price_that_stands_is_asked_for_once() -> None:
    cost = Counted(cells=1000, fixed=True)
    policy, contexts = built("aspire", 4), np.array([1000, 1001, 1002, 1003])

    def prices(drafted: int, contexts: np.ndarray) -> list[int]:
        before = len(cost.asked)
        ratios(policy, batch(cost, [drafted] * len(contexts), contexts - drafted))
        return cost.asked[before:]

    assert prices(2, contexts) == [2 + 4], "both ends of a line, and as many draft steps as lists differ: in one call"
    assert prices(2, contexts) == []
    assert prices(3, contexts) == [2], "verifications of other lengths"
    assert prices(2, contexts + [1000, 0, 0, 0]) == [2 + 1], "another context, and list"
    assert prices(2, contexts) == []
    assert prices(2, contexts[:3]) == [2 + 3], "a batch of another size"
    assert prices(2, contexts) == [], "the size of before"
    cost.fixed_prices = False
    assert [prices(2, contexts) for _ in range(2)] == [[8], [8]], "a model that learns is asked at every step"


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("rows", [1, 4, 32])
def test_plans_find_the_prices_that_were_asked_for_ahead(rows: int, share: float) -> None:
    """Contexts that grow, by as much as rounds of up to seven drafts make them: after a few steps no plan asks the
    model, and `learn` seldom and at most once, for few prices."""
    cost, policy = Counted(cells=100, fixed=True), built("aspire", 32)
    context, drafted, learned = 500 + 3 * np.arange(rows), np.arange(rows) % 8, []
    for step in range(600):
        context, drafted = context + (drafted + 1) * (drafted == 7), (drafted + 1) % 8
        cost.asked.clear()
        ratios(policy, batch(cost, drafted.tolist(), context, share=share))
        assert step < 40 or not cost.asked
        cost.asked.clear()
        policy.learn()
        assert len(cost.asked) <= 1 and max(cost.asked, default=0) <= 32
        learned.append(len(cost.asked))
        policy.learn()
        assert len(cost.asked) == learned[-1], "it has nothing left to do"
    assert sum(learned[40:]) < 60


def test_nothing_is_asked_ahead_of_a_size_that_may_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_prices, "_PATIENCE", 4)
    cost, policy = Counted(cells=1000, fixed=True), built("aspire", 4)
    for step in range(6):
        ratios(policy, batch(cost, [2] * 4, 1000 + step + np.arange(4)))
        before = len(cost.asked)
        policy.learn()
        assert (len(cost.asked) > before) == (step >= 4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999), st.booleans(), st.sampled_from([0.3, 0.8, 0.95]), st.sampled_from(["verify", "refresh"]))
def test_plans_are_the_same_whoever_calls_learn(seed: int, ahead: bool, rate: float, selector: str) -> None:
    cost = Counted(cells=1000, fixed=True)
    cost.weights[FEATURES.index("full_kv_tokens")] = 3e-6
    seen, asked = [], []
    for calls in (0, 2):
        cost.asked.clear()
        seen.append(modes_of(calls, cost, seed, ahead=ahead, rate=rate, policy=f"aspire+{selector}")[0])
        asked.append(list(cost.asked))
    assert seen[0] == seen[1]
    assert asked[0] == asked[1]


def test_contexts_that_no_row_has_are_no_reason_to_warn() -> None:
    """The end of a line may lie beyond the contexts that were profiled, what is asked for ahead still further."""
    warnings: list[str] = []
    model = load_cost_model(PROFILES / "h200-smollm2-135m.json", warn=warnings.append, strict_range=True)
    longest = int(model.file.ranges["full_kv_tokens"][1]) // 4
    policy = built("aspire", 4)
    for _ in range(12):
        ratios(policy, batch(model, [0] * 4, [longest] * 4))
        policy.learn()
    assert not warnings and not model.extrapolated


def test_a_batch_of_a_new_size_is_priced_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are for sizes that stay: their prices are more than those of one batch."""
    monkeypatch.setattr(copy_prices, "_PATIENCE", 4)
    cost = Counted(cells=1000, fixed=True)
    policy, tie = built("aspire", 4), np.ones(4)
    for step in range(6):
        found = ratios(policy, batch(cost, [2] * 4, np.array([1000, 2000, 3000, 4000]) + step))
        assert len(found.doubtful(tie, tie)) == (0 if step < 4 else 4)
    assert cost.asked[:4] == [8] * 4 and cost.asked[4] > 8


def test_a_decision_is_doubted_where_lines_bend() -> None:
    """Straight prices are known better than those of a profile."""
    tie = np.ones(4)
    for model, off, doubted in ((Counted(cells=1000, fixed=True), 2e-5, 0), (SMOLLM2, 1e-6, 4)):
        policy = built("aspire", 4)
        for _ in range(16):
            found = ratios(policy, batch(model, [2] * 4, np.array([550, 1100, 2200, 4400])))
            policy.learn()
        assert len(found.doubtful(tie, tie)) == 4
        assert len(found.doubtful(tie, tie * (1.0 + off))) == doubted


@given(
    steps=st.lists(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 99)), min_size=1, max_size=30), min_size=1)
)
def test_what_was_filled_in_is_read_again(steps: list[list[tuple[int, int]]]) -> None:
    """Whatever points and numbers come in whatever order, nothing is asked twice, nor what nobody needs."""
    known, asked_for = copy_prices._Known(), set()
    for pairs in steps:
        point, number = (np.array(column) for column in zip(*pairs, strict=True))
        asked = known.unknown(point, number)
        new = set(zip(*(column.tolist() for column in asked), strict=True))
        assert len(new) == len(asked[0]) and new == set(pairs) - asked_for
        assert (known.seconds(point, number) is None) == bool(new)
        asked_for |= new
        known.keep(*asked, 1.0 + asked[0] + 1000.0 * asked[1])
        assert known.seconds(point, number) == pytest.approx(1.0 + point + 1000.0 * number)


def test_a_price_of_nothing_is_a_price() -> None:
    """A model that says 0 seconds is not asked for ever."""
    cost = Counted(cells=1000, fixed=True)
    cost.base, cost.weights = 0.0, 0.0 * cost.weights
    assert ratios(built("aspire", 2), batch(cost, [1, 2], np.array([100, 200]))).now() == pytest.approx([1.0, 1.0])


def test_no_line_is_drawn_over_a_gap_between_contexts() -> None:
    """What is a fifth longer than the shortest is not priced between that one and one eight times as long."""
    view = batch(Counted(cells=1000, fixed=False), [4] * 128, np.repeat([1050, 1270, 8000], [40, 40, 48]))
    assert ratios(built("aspire", 128), view).now() == pytest.approx(exactly(view), rel=0.02)


def test_few_of_a_batch_of_like_contexts_are_priced() -> None:
    cost = Counted(cells=1000, fixed=False)
    view = batch(cost, list(np.arange(128) % 8), 7000 + 5 * np.arange(128))
    ratios(built("aspire", 128), view)
    assert cost.asked == [2 * 2 * 8]
    cost.cells_per_price = 0
    ratios(built("aspire", 128), view)
    assert cost.asked[1:] == [2 * 128], "prices that are plain sums are asked for at once"
