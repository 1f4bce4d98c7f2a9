"""What `Aspire` takes a draft to cost over a verification: as exact as its decisions need, in few calls of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.scheduler import PolicyView, StepFeatures
from aspire.scheduler.features import CostModel
from aspire.scheduler.policies import copy_prices
from aspire.scheduler.policies.adaptive import Aspire, gain_and_cost
from aspire.scheduler.policies.copy_prices import LINE_ERROR, CopyPrices, exact_ratio
from aspire.scheduler.policies.cost_ratios import CostRatios
from aspire_calibration import LoadedCostModel, analytic_model, load_cost_model
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


@pytest.mark.parametrize(
    "name", sorted(path.name for path in PROFILES.glob("h200-*.json") if "samples" not in path.name)
)
def test_lines_hold_for_every_committed_profile(name: str) -> None:
    """Within `LINE_ERROR` at contexts of every length that the profiles hold, for batches of all sizes."""
    model = load_cost_model(PROFILES / name, warn=lambda _: None)
    contexts = np.unique(np.geomspace(64, 8000, 700).astype(int))
    for copies in (1, 11, 32, 128):
        for drafts in (0, 1, 7, 16):
            view = batch(model, [drafts] * len(contexts), contexts - drafts)
            lines = CopyPrices(view, model, copies, 16)
            found = lines.ratio(view.drafted, view.sparse_tokens, np.log2(view.context_tokens))
            assert found is not None
            exact = exact_ratio(view, model, copies, slice(None))
            assert np.abs(found / exact - 1.0).max() < LINE_ERROR


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

    def calls(drafted: int, contexts: np.ndarray) -> int:
        before = len(cost.asked)
        ratios(policy, batch(cost, [drafted] * len(contexts), contexts - drafted))
        return len(cost.asked) - before

    assert calls(2, contexts) == 2, "one for each kind"
    assert max(cost.asked) <= 2 * 17, "with neighbours of the prices that are due"
    assert [calls(drafted, contexts) for drafted in range(17)] == [0] * 17, "verifications of all lengths among them"
    assert calls(2, contexts + [1000, 0, 0, 0]) == 1, "another context"
    assert calls(2, contexts) == 0
    assert calls(2, contexts[:3]) == 2, "a batch of another size"
    assert calls(2, contexts) == 0, "the size of before"
    cost.fixed_prices = False
    assert [calls(2, contexts) for _ in range(2)] == [1, 1], "a model that learns is asked at every step"


def test_a_batch_of_a_new_size_is_priced_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are for sizes that stay: their prices are more than those of one batch."""
    monkeypatch.setattr(copy_prices, "_PATIENCE", 4)
    cost = Counted(cells=1000, fixed=True)
    policy = built("aspire", 4)
    for step in range(6):
        found = ratios(policy, batch(cost, [2] * 4, np.array([1000, 2000, 3000, 4000]) + step))
        assert (found.error == 0.0) == (step < 4)
    assert cost.asked[:4] == [8] * 4 and cost.asked[4] > 8


@given(
    steps=st.lists(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 99)), min_size=1, max_size=30), min_size=1)
)
def test_what_was_filled_in_is_read_again(steps: list[list[tuple[int, int]]]) -> None:
    """Whatever points and numbers come in whatever order, nothing is asked twice."""
    lines, known = copy_prices._Lines(17), set()
    for pairs in steps:
        point, number = (np.array(column) for column in zip(*pairs, strict=True))
        asked = lines.unknown(point, number)
        new = set(zip(*(column.tolist() for column in asked), strict=True))
        assert len(new) == len(asked[0]) and not new & known
        known |= new
        assert set(pairs) <= known
        lines.fill(*asked, 1.0 + asked[0] + 1000.0 * asked[1])
        assert lines.unknown(point, number)[0].size == 0
        assert lines.at(point, number) == pytest.approx(1.0 + point + 1000.0 * number)


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
