"""Cost forms and solvers: what they can represent, what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire.errors import InputError, UsageError
from aspire.scheduler.features import StepFeatures
from aspire_calibration.forms import FORMS, fitted_from_json, forms_named, knots
from aspire_calibration.ramps import Ramp, RampModel, chain, design, present
from aspire_calibration.solve import nonnegative_relative, ordinary
from aspire_calibration.staircase import sizes_of
from aspire_calibration.variables import INDEX, NOT_PLAIN, VARIABLES, is_plain, variable_rows
from tests.calibration.machine import measured_samples

SAMPLES = measured_samples(noise=0.01, most=260)
MATRIX, SECONDS = SAMPLES.matrix()
FITTED = {name: form.fit(MATRIX.T, SECONDS, None) for name, form in FORMS.items()}
MONOTONE = [name for name, form in FORMS.items() if form.monotone]
# What more of, in an otherwise equal step, is more work. (More rows come with tokens: see the test of added rows.)
AMOUNTS = ("padded_tokens", "sparse_kv_tokens", "full_kv_tokens", "select_kv_tokens", "select_rows")
steps = st.sampled_from(range(len(SECONDS)))


@pytest.mark.parametrize("name", MONOTONE)
@given(step=steps, factor=st.floats(1.0, 3.0), feature=st.sampled_from(AMOUNTS))
def test_more_work_in_a_step_never_costs_less(name, step, factor, feature):
    more = MATRIX[step].copy()
    more[INDEX[feature]] *= factor
    before, after = FITTED[name].seconds(np.stack([MATRIX[step], more], axis=1))
    assert after >= before * (1 - 1e-9)


@pytest.mark.parametrize("name", MONOTONE)
@given(
    step=steps, count=st.integers(1, 20), kind=st.sampled_from(["draft", "verify"]), context=st.integers(2000, 40_000)
)
def test_added_rows_never_cost_less_than_nothing(name, step, count, kind, context):
    base = StepFeatures.from_matrix(MATRIX[step])
    if kind == "draft":
        row = {"draft_rows": count, "sparse_kv_tokens": count * context, "query_tokens": count}
    else:
        # A row like those of the step: the price of verify width is a mean over rows, exact when rows are alike.
        width = max(1.0, float((base.query_tokens - base.prefill_tokens - base.draft_rows) / max(base.verify_rows, 1)))
        mean = max(context, float(base.full_kv_tokens / max(base.rows - base.draft_rows, 1)))
        row = {"verify_rows": count, "full_kv_tokens": count * mean, "query_tokens": count * width}
    after = base + StepFeatures.of(rows=count, **row)
    before_s, after_s = FITTED[name].seconds(np.stack([base.matrix(), after.matrix()], axis=1))
    assert after_s >= before_s * (1 - 1e-9)


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_positive_finite_and_survive_json(name):
    fitted = FITTED[name]
    seconds = fitted.seconds(MATRIX.T)
    assert np.all(np.isfinite(seconds)) and (np.all(seconds > 0) or name.endswith("-ols"))
    again = fitted_from_json(fitted.to_json())
    assert again.seconds(MATRIX.T) == pytest.approx(seconds, rel=1e-5)


@pytest.mark.parametrize("name", MONOTONE)
def test_slopes_are_never_negative(name):
    assert min(min(row) for row in FITTED[name].slopes) >= 0.0


@settings(max_examples=15)
@given(
    prices=st.tuples(st.floats(1e-4, 5e-3), st.floats(1e-7, 1e-5), st.floats(1e-10, 1e-8)),
    noise=st.floats(0.0, 0.03),
    seed=st.integers(0, 100),
)
def test_relative_fit_recovers_a_planted_model_within_noise(prices, noise, seed):
    matrix = design([Ramp("one"), Ramp("query_tokens"), Ramp("kv_tokens")], MATRIX.T)
    truth = matrix @ np.array(prices)
    measured = truth * np.exp(np.random.default_rng(seed).normal(0, noise, len(truth)))
    found = matrix @ nonnegative_relative(matrix, measured)
    assert np.mean(np.abs(found / truth - 1)) <= 0.35 * noise + 0.002


def test_least_squares_on_seconds_is_worse_on_a_wide_grid():
    def error(name):
        return float(np.mean(np.abs(FITTED[name].seconds(MATRIX.T) / SECONDS - 1)))

    assert error("paper-ols") > 1.3 * error("paper")
    assert error("paper") > 2 * error("roofline") and error("linear") > error("roofline")


def test_a_disturbed_cell_does_not_bend_the_fit():
    matrix = design([Ramp("one"), Ramp("kv_tokens")], MATRIX.T)
    truth = matrix @ np.array([1e-3, 1e-8])
    spoiled = truth.copy()
    spoiled[::25] *= 3.0
    robust = matrix @ nonnegative_relative(matrix, spoiled)
    plain = matrix @ nonnegative_relative(matrix, spoiled, robust=False)
    assert np.mean(np.abs(robust / truth - 1)) < 0.5 * np.mean(np.abs(plain / truth - 1))


def test_the_staircase_form_follows_a_size_that_is_slower_than_a_larger_one():
    features = np.tile(MATRIX.T, 2)[:, :400]
    padded = np.resize([8.0, 16.0, 24.0, 32.0, 48.0, 64.0], features.shape[1])
    features[INDEX["padded_tokens"]] = padded
    seconds = 1e-3 + 1e-6 * padded + np.where(padded == 24, 3e-4, 0.0) + 1e-8 * features[INDEX["full_kv_tokens"]]
    fit = {name: FORMS[name].fit(features, seconds, None) for name in ("staircase", "roofline")}
    step = StepFeatures.of(padded_tokens=np.array([24.0, 32.0])).matrix().T
    assert fit["staircase"].seconds(step) == pytest.approx([1.324e-3, 1.032e-3], rel=0.02)
    assert fit["roofline"].seconds(step)[1] >= fit["roofline"].seconds(step)[0], "the monotone form cannot"
    beyond = StepFeatures.of(padded_tokens=np.array([128.0])).matrix().T
    assert 1.05e-3 < fit["staircase"].seconds(beyond)[0] < 1.5e-3


def test_overlap_finds_the_host_floor():
    host = 4e-3 + 1e-5 * MATRIX[:, INDEX["rows"]]
    device = 1e-3 + 8e-9 * MATRIX[:, INDEX["full_kv_tokens"]] + 4e-9 * MATRIX[:, INDEX["sparse_kv_tokens"]]
    seconds = np.maximum(host, device)
    assert 0.2 < np.mean(host > device) < 0.97
    fitted = FORMS["overlap"].fit(MATRIX.T, seconds, None)
    assert np.mean(np.abs(fitted.seconds(MATRIX.T) / seconds - 1)) < 0.01
    assert {"host", "device"} == set(fitted.names)


def test_ramps():
    terms = [Ramp("one"), *chain("rows", [4.0, 10.0]), present("draft_rows")]
    model = RampModel((tuple(terms),), ((1.0, 1.0, 0.5, 0.25, 100.0),))
    at = StepFeatures.of(rows=np.array([0.0, 2.0, 4.0, 10.0, 14.0]), draft_rows=np.array([0, 0, 0, 0, 7])).matrix().T
    assert model.seconds(at) == pytest.approx([1.0, 3.0, 5.0, 8.0, 109.0])
    assert [term.name for term in terms] == ["one", "rows[0..4]", "rows[4..10]", "rows[10..]", "draft_rows[0..1]"]


@given(
    st.lists(st.tuples(st.floats(0, 900), st.floats(1, 300), st.floats(-1, 1)), min_size=1, max_size=14),
    st.integers(0, 9),
)
def test_a_long_chain_is_the_sum_of_its_ramps(ramps, last):
    terms = [Ramp("rows", start, start + width) for start, width, _ in ramps] + [Ramp("rows", float(last))]
    slopes = [slope for _, _, slope in ramps] + [0.5]
    rows = np.array([0.0, 1.0, 7.5, 120.0, 1199.0, 5000.0])
    at = StepFeatures.of(rows=rows).matrix().T
    model = RampModel((tuple(terms), (Ramp("one"),)), (tuple(slopes), (3.0,)), ("a", "b"))
    assert model.seconds(at) == pytest.approx(np.maximum(design(terms, at) @ np.array(slopes), 3.0), rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(1, 1e6), max_size=60), st.integers(1, 8))
def test_knots_leave_samples_in_every_segment(values, most):
    data = np.array(values)
    inner = knots(data, most)
    assert inner == sorted(set(inner)) and len(inner) <= most
    assert not inner or inner[-1] <= data.max() / 4, "a curve extrapolates along a long segment"
    edges = [0.0, *inner, np.inf]
    for low, high in zip(edges, edges[1:], strict=False):
        assert not inner or len(np.unique(data[(data > low) & (data <= high)])) >= 3


def test_staircase_sizes():
    assert list(sizes_of(np.array([0, 8, 8, 16, 16, 100, 101, 101, 300.0]))) == [8, 16, 101, 300]
    assert len(sizes_of(1.05 ** np.arange(400))) <= 97


def test_derived_variables_of_a_step_with_all_kinds_of_rows():
    step = StepFeatures.of(
        rows=6,
        query_tokens=113,
        draft_rows=3,
        verify_rows=2,
        sparse_kv_tokens=1536,
        full_kv_tokens=4300,
        prefill_tokens=100,
        prefill_pairs=30000 - 100 * 99 / 2,
        select_kv_tokens=4000,
        select_rows=2,
    )
    names = [name for name in VARIABLES if name not in INDEX]
    values = dict(zip(names, variable_rows(step.matrix()[:, None], names)[:, 0], strict=True))
    assert values == {
        "one": 1,
        "padded_rows": 0,  # with prompts all graphs have the same rows
        "idle_rows": 0,
        "padded_width": 0,
        "longest_context": pytest.approx(4300 / 3),
        "full_rows": 3,
        "kv_tokens": 5836,
        "logits_rows": 14,
        "verify_kv_tokens": 4000,
        "verify_extra_qkv": 4000 * 4,
        "mean_drafted": 4,
        "mean_context_octaves": pytest.approx(np.log2(4300 / 3 / 128)),
        "select_context_octaves": pytest.approx(np.log2(4300 / 3 / 128)),
        "full_spread": 0,
        "sparse_spread": 0,
        "wide_select_kv_tokens": 4000,
        "widest_verify": 5,
        "wide_kv_tokens": 4000,
        "widest_kv_tokens": 0,
    }
    told = StepFeatures.of(**{**{name: getattr(step, name) for name in INDEX}, "verify_width": 9.0}).matrix()[:, None]
    assert variable_rows(told, ["widest_verify"])[0, 0] == 9
    assert variable_rows(told, ["mean_drafted"])[0, 0] == 4


@given(
    st.lists(st.tuples(*[st.integers(0, 128)] * 3, *[st.floats(0.0, 1e6)] * 3), min_size=1, max_size=4),
    st.sampled_from(["prefill_tokens", "prefill_pairs", "verify_width", "longest_full_kv", "longest_sparse_kv"]),
)
def test_plain_steps_have_no_prompts_and_tell_no_maxima(rows: list[tuple[float, ...]], other: str) -> None:
    names = ("draft_rows", "verify_rows", "select_rows", "sparse_kv_tokens", "full_kv_tokens", "select_kv_tokens")
    given_ = dict(zip(names, np.array(rows, dtype=np.float64).T, strict=True))
    given_["rows"] = given_["draft_rows"] + given_["verify_rows"]
    step = StepFeatures.of(**given_, query_tokens=given_["rows"] + 3.0 * given_["verify_rows"]).columns()
    assert is_plain(step) and not variable_rows(step, sorted(NOT_PLAIN)).any()
    step[INDEX[other], -1] = 1.0
    assert not is_plain(step)


def test_rows_of_graphs_are_powers_of_two() -> None:
    rows = np.concatenate([[0.0, 0.5, 1.0, 1.5], *([2.0**k - 1, 2.0**k, 2.0**k + 1] for k in range(2, 50))])
    padded, idle = variable_rows(StepFeatures.of(rows=rows).columns(), ["padded_rows", "idle_rows"])
    assert (np.frexp(padded)[0] == 0.5).all() and (padded >= rows).all()
    assert (padded[1:] < 2.0 * np.maximum(rows[1:], 0.51)).all() and (idle == padded - rows).all()


def test_graphs_of_decode_steps_are_made_for_rounded_rows_and_widths() -> None:
    rows, widest = np.array([1.0, 5.0, 33.0, 64.0, 64.0]), np.array([1.0, 2.0, 9.0, 17.0, 0.0])
    step = StepFeatures.of(
        rows=rows,
        query_tokens=rows,
        verify_rows=np.where(widest > 0, rows, 0),
        draft_rows=np.where(widest > 0, 0, rows),
        full_kv_tokens=np.where(widest > 0, 100 * rows, 0),
        verify_width=widest,
        longest_full_kv=np.array([100.0, 300.0, 0.0, 100.0, 0.0]),
    )
    names = ["padded_rows", "idle_rows", "padded_width", "longest_context"]
    assert variable_rows(step.columns(), names).T.tolist() == [
        [1, 0, 1, 100],
        [8, 3, 3, 300],
        [64, 31, 9, 100],
        [64, 0, 17, 100],
        [64, 0, 0, 0],
    ]


def test_launches_prices_steps_without_a_graph_apart():
    features = MATRIX.T
    eager = (features[INDEX["prefill_tokens"]] > 0) | (features[INDEX["query_tokens"]] > 256)
    octaves = variable_rows(features, ["mean_context_octaves"])[0]
    seconds = np.where(eager, 2e-2, 1e-3 + 1e-4 * octaves + 8e-9 * features[INDEX["full_kv_tokens"]])
    fitted = forms_named(["launches"], (64, 256))[0].fit(features, seconds, None)
    assert np.abs(fitted.seconds(features) / seconds - 1).mean() < 0.01
    again = fitted_from_json(fitted.to_json())
    assert again.graph_tokens == 256 and again.graph.names == ("graph",) and again.eager.names[0] == "eager host"
    for part in (eager, ~eager):
        assert again.seconds(features[:, part]) == pytest.approx(fitted.seconds(features)[part])
    with pytest.raises(InputError, match="graph_tokens > 0"):
        fitted_from_json({**fitted.to_json(), "graph_tokens": 0})
    roofline = FORMS["roofline"].fit(features, seconds, None)
    assert np.abs(roofline.seconds(features) / seconds - 1).mean() > 0.05


def test_prompts_that_fit_a_graph_are_priced_apart_from_those_that_do_not() -> None:
    features = MATRIX.T
    prompts, large = features[INDEX["prefill_tokens"]] > 0, features[INDEX["query_tokens"]] > 1024
    assert min((prompts & ~large).sum(), large.sum()) >= 8
    tokens = features[INDEX["padded_tokens"]]
    seconds = np.where(large, 2e-2, np.where(prompts, 2e-3 + 1e-6 * tokens, 1e-3))
    fitted = forms_named(["launches"], (64, 1024))[0].fit(features, seconds, None)
    assert np.abs(fitted.seconds(features) / seconds - 1).mean() < 0.01
    old = {key: value for key, value in fitted.to_json().items() if key != "prompts"}
    assert fitted_from_json(old).prompts == fitted_from_json(old).eager


def test_launches_without_steps_of_one_kind_still_prices_them():
    decode = MATRIX[MATRIX[:, INDEX["prefill_tokens"]] == 0]
    fitted = FORMS["launches"].fit(decode.T, np.full(len(decode), 1e-3), None)
    assert fitted.graph_tokens == np.inf
    assert fitted.seconds(MATRIX.T) == pytest.approx(np.full(len(MATRIX), 1e-3), rel=0.05)


def test_wider_verification_makes_page_mass_dearer_only_where_cells_show_it():
    rows = np.tile([8.0, 16.0, 32.0, 64.0], 40)
    wide = np.arange(160) % 8 < 4
    context = np.repeat(np.geomspace(256, 8192, 40), 4)
    step = (
        StepFeatures.of(
            rows=rows,
            query_tokens=rows * np.where(wide, 3, 1),
            verify_rows=rows,
            full_kv_tokens=rows * context,
            select_kv_tokens=rows * context,
            select_rows=rows,
        )
        .matrix()
        .T
    )
    seconds = 1e-3 + rows * context * np.where(wide, 9e-9, 6e-9)
    fitted = FORMS["launches"].fit(step, seconds, None)
    assert np.abs(fitted.seconds(step) / seconds - 1).mean() < 0.01
    narrow_only = FORMS["launches"].fit(step[:, ~wide], seconds[~wide], None)
    assert "wide_select_kv_tokens" not in {term.variable for term in narrow_only.graph.branches[0]}


def test_one_wide_row_makes_the_whole_launch_dearer() -> None:
    """As the engine does: the widest verifying row chooses the launch of all. The mean width of a step hides it."""
    rng = np.random.default_rng(0)
    rows, widest = rng.integers(16, 129, 240), rng.choice([2, 4, 8, 16], 240)
    context = rng.integers(256, 8192, 240)
    step = StepFeatures.of(
        rows=rows,
        query_tokens=rows + 15,  # the same work, in one row or in fifteen
        verify_rows=rows,
        full_kv_tokens=rows * context,
        verify_width=widest,
    )
    bucket = np.searchsorted([1, 3, 5, 9, 17], widest)
    seconds = 1e-3 + 5e-5 * bucket + 6e-9 * rows * context * np.where(widest > 9, 1.2, 1.0)
    told, hidden = step.columns(), step.columns().copy()
    hidden[INDEX["verify_width"]] = 0.0
    errors = []
    for features in (told, hidden):
        fitted = FORMS["launches"].fit(features, seconds, None)
        errors.append(np.abs(fitted.seconds(features) / seconds - 1).mean())
    assert errors[0] < 0.01 < 0.03 < errors[1]


def test_widths_of_joined_work_are_not_summed() -> None:
    one, two = (
        StepFeatures.of(rows=2.0, verify_rows=2.0, query_tokens=2.0 * w, verify_width=w, longest_full_kv=1e3 / w)
        for w in (3.0, 9.0)
    )
    assert (one + two).verify_width == 9.0 and (one + two).rows == 4.0
    assert (one + two).longest_full_kv == one.longest_full_kv == (two + one).longest_full_kv


def test_rows_of_unlike_contexts_are_told_from_rows_of_their_mean() -> None:
    step = StepFeatures.of(
        rows=np.array([4.0, 4.0, 6.0]),
        verify_rows=np.array([4.0, 4.0, 2.0]),
        draft_rows=np.array([0.0, 0.0, 4.0]),
        full_kv_tokens=np.array([4e3, 4e3, 2e3]),
        sparse_kv_tokens=np.array([0.0, 0.0, 2e3]),
        longest_full_kv=np.array([2.5e3, 0.0, 1e3]),
        longest_sparse_kv=np.array([0.0, 0.0, 1e3]),
    )
    assert variable_rows(step.columns(), ["full_spread", "sparse_spread"]).tolist() == [[1.5, 0, 0], [0, 0, 1]]


def test_prefill_takes_the_larger_of_host_and_device() -> None:
    chunk, rows = np.geomspace(64, 8192, 60), np.ones(60)
    context = np.resize([1.0, 2.0, 4.0], 60) * chunk
    pairs = chunk * (context - (chunk - 1) / 2)
    step = StepFeatures.of(
        rows=rows, query_tokens=chunk, prefill_tokens=chunk, full_kv_tokens=context, prefill_pairs=pairs
    )
    seconds = np.maximum(1.5e-2, 1e-3 + 2e-5 * chunk + 1e-10 * pairs)
    assert 0.2 < (seconds == 1.5e-2).mean() < 0.9
    fitted = FORMS["launches"].fit(step.columns(), seconds, None)
    assert np.abs(fitted.seconds(step.columns()) / seconds - 1).max() < 0.03


def test_ordinary_least_squares_is_the_textbook_one():
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert ordinary(matrix, np.array([1.0, 3.0, 5.0])) == pytest.approx([-1.0, 2.0])


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"type": "spline"}, UsageError, "fitted form type 'spline' is not known"),
        ({"type": "ramps", "combine": "max", "branches": []}, InputError, "at least one branch"),
        ({"type": "ramps", "combine": "min", "branches": [1]}, UsageError, "'min' is not known"),
        (
            {"type": "ramps", "combine": "max", "branches": [{"name": "a", "terms": [{"variable": "kvtokens"}]}]},
            UsageError,
            "variable 'kvtokens' is not known.*did you mean 'kv_tokens'",
        ),
    ],
)
def test_bad_fitted_forms_are_refused(data, error, message):
    with pytest.raises(error, match=message):
        fitted_from_json(data)


def test_unknown_form():
    with pytest.raises(UsageError, match=r"form 'roofine' is not known \(did you mean 'roofline'\?\)"):
        forms_named(["roofine"])
