"""What `Aspire` takes a draft to cost over a verification: read from tables, or asked of a model that learns."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.scheduler import PolicySpec, PolicyView, Request, Scheduler, SchedulerConfig, StepFeatures
from aspire.scheduler.features import CostModel
from aspire.scheduler.policies.adaptive import Aspire
from aspire.scheduler.policies.price_tables import LINE_ERROR, PriceTables, best_round_of, tables_of
from aspire_calibration import LoadedCostModel, analytic_model, load_cost_model
from tests.scheduler.executor import FakeExecutor
from tests.scheduler.test_policies import built, view_of
from tests.simulator.helpers import LinearCost

PROFILES = Path(__file__).parents[2] / "calibration" / "profiles"
SMOLLM2 = load_cost_model(PROFILES / "h200-smollm2-135m.json", warn=lambda _: None)
QWEN3 = load_cost_model(PROFILES / "h200-qwen3-8b.json", warn=lambda _: None)
ANALYTIC = LoadedCostModel(analytic_model("h200", "smollm2-135m"), warn=lambda _: None)
STRAIGHT = 1e-9  # what lines are off where prices are straight


class Counted(LinearCost):
    """Linear prices of which it is counted how many are asked for; ``fixed``: it says that they stand."""

    def __init__(self, *, cells: int, fixed: bool) -> None:
        super().__init__(base=1e-3, token=1e-6, kv=1e-8)
        self.cells_per_price, self.fixed_prices = cells, fixed
        self.asked: list[int] = []

    def predict(self, features: StepFeatures) -> np.ndarray:
        self.asked.append(features.rows.size)
        return super().predict(features)


def exactly(view: PolicyView) -> np.ndarray:
    """[n]: by the formula, every request of the batch priced as if all were like it."""
    copies, model = len(view.slots), view.cost_model
    assert model is not None
    draft, verify = view.draft_features().columns() * copies, view.verify_features().columns() * copies
    seconds = [model.predict(StepFeatures.from_columns(columns)) for columns in (draft, verify)]
    return seconds[0] / seconds[1]


def ratios(policy: Aspire, view: PolicyView) -> np.ndarray:
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
def test_lines_are_as_near_as_they_say(steps: list[list[tuple[int, int]]], model: CostModel, share: float) -> None:
    """With measured prices and modelled ones, of steps after each other, also where layers of drafts read all."""
    policy = built("aspire", 16)
    for rows in steps:
        view = batch(model, *map(list, zip(*rows, strict=True)), share=share)  # type: ignore[arg-type]
        assert ratios(policy, view) == pytest.approx(exactly(view), rel=LINE_ERROR)


@pytest.mark.parametrize("share", [0.0, 1 / 30, 0.5])
@pytest.mark.parametrize(
    "name", sorted(path.name for path in PROFILES.glob("h200-*.json") if "samples" not in path.name)
)
def test_lines_hold_for_every_committed_profile(name: str, share: float) -> None:
    """At contexts of every length that the profiles hold, for batches of all sizes."""
    model = load_cost_model(PROFILES / name, warn=lambda _: None)
    contexts = np.unique(np.geomspace(64, 8000, 700).astype(int))
    for copies in (1, 11, 32, 128):
        off = []
        for drafts in (0, 1, 7, 16):
            view = batch(model, [drafts] * len(contexts), contexts - drafts, share=share)
            found = PriceTables(view, model, 16).ratio(copies, view.drafted, view.sparse_tokens, view.context_tokens)
            features = [view.draft_features().columns() * copies, view.verify_features().columns() * copies]
            draft_s, verify_s = (model.what_if(StepFeatures.from_columns(columns)) for columns in features)
            off.append(np.abs(found * verify_s / draft_s - 1.0))
        assert np.max(off) < LINE_ERROR and np.median(off) < (0.25 if share else 0.1) * LINE_ERROR


@given(
    contexts=st.lists(st.integers(20, 100_000), min_size=1, max_size=128),
    longest=st.integers(0, 16),
    fixed=st.booleans(),
    data=st.data(),
)
def test_the_ratios_of_a_large_batch_are_near_those_asked_for_one_by_one(
    contexts: list[int], longest: int, fixed: bool, data: st.DataObject
) -> None:
    """Read from tables exactly, for these prices; of a model that learns within 2 %, and of few rows exactly."""
    count = len(contexts)
    drafted = data.draw(st.lists(st.integers(0, longest), min_size=count, max_size=count))
    cost = Counted(cells=1000, fixed=fixed)
    view = batch(cost, drafted, contexts)
    view = replace(view, sparse_tokens=np.maximum(np.minimum(view.context_tokens, 512), view.context_tokens // 14))
    found = ratios(built("aspire", count), view)
    asked = list(cost.asked)
    assert found == pytest.approx(exactly(view), rel=STRAIGHT if fixed or count <= 16 else 0.02)
    if not fixed:
        assert asked[0] <= 2 * count and len(asked) == 1


@given(
    steps=st.lists(
        st.tuples(st.sampled_from([3, 8]), st.integers(0, 16), st.integers(-20, 9000), st.booleans(), st.booleans()),
        min_size=2,
        max_size=8,
    )
)
def test_tables_are_of_one_model_and_kind_of_row(steps: list[tuple[int, int, int, bool, bool]]) -> None:
    """Batches of two sizes, other page lists, two cost models and refreshed layers: always as if priced anew."""
    models = Counted(cells=10_000, fixed=True), Counted(cells=10_000, fixed=True)
    models[1].weights *= 3.0
    policy = built("aspire", 8)
    for count, drafted, sparse, other_model, refresh in steps:
        view = view_of([drafted] * count, cost_model=models[other_model], full_layer_share=0.1 * refresh)
        view = replace(view, sparse_tokens=sparse + np.arange(count) % 3)
        assert ratios(policy, view) == pytest.approx(exactly(view), rel=STRAIGHT)


def test_an_octave_is_asked_for_once_and_a_model_that_learns_in_every_plan() -> None:
    cost = Counted(cells=1000, fixed=True)
    policy, contexts = built("aspire", 4), np.array([1000, 1001, 1002, 1003])

    def asked(drafted: int, contexts: np.ndarray) -> list[int]:
        before = len(cost.asked)
        ratios(policy, batch(cost, [drafted] * len(contexts), contexts - drafted))
        return sorted(cost.asked[before:])

    assert asked(2, contexts) == [24, 24 * 17], "an octave of verifications of 0 to 16 drafts, and of lists"
    assert asked(3, contexts + 40) == []
    assert asked(2, contexts + [3000, 0, 0, 0]) == [2 * 24 * 17], "the octaves between"
    assert asked(2, contexts[:3]) == [24, 24 * 17], "a batch of another size"
    assert asked(2, contexts) == [], "the size of before"
    another = built("aspire", 4)
    ratios(another, batch(cost, [2] * 4, contexts))
    assert asked(2, contexts) == [], "another policy reads the same tables"
    cost.fixed_prices = False
    assert [asked(2, contexts) for _ in range(2)] == [[8], [8]]


@pytest.mark.parametrize("policy", ["aspire", "aspire+refresh", "aspire:cost_ratio=0.2", "goodput"])
def test_a_prepared_policy_plans_the_same_and_asks_nothing(policy: str) -> None:
    """Of the model, for its plans: whatever requests come."""
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=256, max_model_len=512, num_pages=160, num_layers=4)
    seen = []
    for prepared in (False, True):
        cost = Counted(cells=1000, fixed=True)
        scheduler = Scheduler(config, PolicySpec.parse(policy), cost)
        if prepared:
            scheduler.prepare()
        filled, steps = list(cost.asked), []
        for index in range(14):
            scheduler.add_request(Request(str(index), 20 + 35 * index, 30 + index, 0.0))
        executor = FakeExecutor(scheduler, rate=0.8, seed=3)
        executor.run()
        steps = [plan.modes.tolist() for plan in executor.plans]
        seen.append(steps)
        assert bool(filled) == (prepared and "cost_ratio" not in policy)
        if policy.startswith("aspire"):
            assert not prepared or cost.asked == filled
    assert seen[0] == seen[1]


@given(st.integers(1, 16), st.integers(100, 8000), st.sampled_from([0.0, 0.1]))
def test_the_best_round_is_found_among_all(requests: int, context: int, share: float) -> None:
    """By the formula, of rounds of 0 to 16 drafts that are all accepted."""
    view = batch(SMOLLM2, [0] * 17, [context] * 17, share=share)
    view = replace(view, drafted=np.arange(17))
    columns = [requests * each.columns() for each in (view.draft_features(), view.verify_features())]
    draft_s, verify_s = (SMOLLM2.what_if(StepFeatures.from_columns(each)) for each in columns)
    best = max((g + 1) * verify_s[0] / (g * draft_s[0] + verify_s[g]) for g in range(17))
    found = best_round_of(view, 16, requests, float(view.sparse_tokens[0]), float(context))
    assert found == pytest.approx(best, rel=2 * LINE_ERROR)
    assert best_round_of(replace(view, cost_model=ANALYTIC), 16, requests, 512.0, float(context)) is None


def test_contexts_that_no_row_has_are_no_reason_to_warn() -> None:
    """Octaves end beyond the contexts that were profiled."""
    warnings: list[str] = []
    model = load_cost_model(PROFILES / "h200-smollm2-135m.json", warn=warnings.append, strict_range=True)
    longest = int(model.file.ranges["full_kv_tokens"][1]) // 4
    ratios(built("aspire", 4), batch(model, [0] * 4, [longest] * 4))
    assert not warnings and not model.extrapolated


def test_tables_go_with_their_model() -> None:
    cost = Counted(cells=1000, fixed=True)
    ratios(built("aspire", 2), batch(cost, [1, 2], [100, 200]))
    gone = weakref.ref(cost)
    del cost
    gc.collect()
    assert gone() is None


def test_tables_that_would_take_long_are_not_filled_ahead() -> None:
    """Many requests with long contexts, in some layers of whose drafts all is read."""
    cost = Counted(cells=1000, fixed=True)
    view = batch(cost, [0], [1], share=0.1)
    PriceTables(view, cost, 16).fill(range(1, 257), 131_072, 9_200)
    assert not cost.asked
    PriceTables(view, cost, 16).fill(range(1, 9), 131_072, 9_200)
    assert len(cost.asked) == 2 * 8


def test_a_price_of_nothing_is_a_price() -> None:
    """Of a model that says 0 seconds."""
    cost = Counted(cells=1000, fixed=True)
    cost.base, cost.weights = 0.0, 0.0 * cost.weights
    view = batch(cost, [1, 2], np.array([100, 200]))
    assert ratios(built("aspire", 2), view) == pytest.approx([1.0, 1.0])
    assert tables_of(cost, view, 2) is tables_of(cost, view, 2)


def test_no_line_is_drawn_over_a_gap_between_contexts() -> None:
    """What is a fifth longer than the shortest is not priced between that one and one eight times as long."""
    view = batch(Counted(cells=1000, fixed=False), [4] * 128, np.repeat([1050, 1270, 8000], [40, 40, 48]))
    assert ratios(built("aspire", 128), view) == pytest.approx(exactly(view), rel=0.02)


def test_few_of_a_batch_of_like_contexts_are_priced() -> None:
    cost = Counted(cells=1000, fixed=False)
    view = batch(cost, list(np.arange(128) % 8), 7000 + 5 * np.arange(128))
    ratios(built("aspire", 128), view)
    assert cost.asked == [2 * 2 * 8]
    cost.cells_per_price = 0
    ratios(built("aspire", 128), view)
    assert cost.asked[1:] == [2 * 128], "prices that are plain sums are asked for at once"
