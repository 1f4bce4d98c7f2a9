"""The kriging form: near the cells it follows them, away from them the prices alone, and noise is not followed."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.errors import InputError, UsageError
from aspire.scheduler.features import FEATURES, StepFeatures
from aspire_calibration.cells import Cell, ar, draft, mixed, prefill, verify
from aspire_calibration.forms import fitted_from_json, forms_named, roofline_terms
from aspire_calibration.kriging import (
    AXES,
    MATRIX_WORK,
    MOST_CELLS,
    PADDING,
    STEPS_AT_ONCE,
    KrigedModel,
    _parts,
    fit_kriged,
)
from aspire_calibration.launches import LaunchModel
from aspire_calibration.ramps import design
from aspire_calibration.variables import INDEX, VARIABLES, variable_rows
from tests.calibration.machine import BUCKETS, true_seconds

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
CONTEXTS = (256, 1024, 4096, 8192)


def columns(cells: list[Cell]) -> np.ndarray:
    """[len(FEATURES), cells]."""
    return np.stack([cell.features(BUCKETS).columns() for cell in cells], axis=1)


def grid() -> list[Cell]:
    cells = []
    for rows in ROWS:
        for context in CONTEXTS:
            cells += [ar(rows, context), draft(rows, context, min(context, 512)), verify(rows, context, 4)]
            if rows > 1:
                cells.append(mixed(draft(rows // 2, context, 256), verify(rows - rows // 2, context, 4)))
    return cells


def bumpy_seconds(features: np.ndarray) -> np.ndarray:
    """The made-up machine with launches of their own for every padded number of rows and for long contexts."""
    octaves = np.log2(np.maximum(variable_rows(features, ["padded_rows"])[0], 1.0))
    context = variable_rows(features, ["mean_context_octaves"])[0]
    bumps = 1.0 + 0.1 * np.sin(1.2 * octaves) + 0.06 * np.cos(context + octaves)
    return true_seconds(StepFeatures.from_columns(features)) * bumps


def krige(features: np.ndarray, seconds: np.ndarray, weights: np.ndarray | None) -> KrigedModel:
    return fit_kriged(roofline_terms(features), features, seconds, weights)


CELLS = grid()
FEATURES_OF_CELLS = columns(CELLS)
SECONDS = bumpy_seconds(FEATURES_OF_CELLS)
FITTED = krige(FEATURES_OF_CELLS, SECONDS, None)
TIMES = -(-MOST_CELLS // FITTED.cells)
LARGE = replace(  # the same cells over and over, so that as many are compared with as ever are
    FITTED,
    places=np.tile(FITTED.places, TIMES)[:, :MOST_CELLS],
    pulls=np.tile(FITTED.pulls / TIMES, TIMES)[:MOST_CELLS],
)
steps = st.sampled_from(range(len(CELLS)))


def errors(fitted, features, seconds) -> np.ndarray:
    return np.abs(fitted.seconds(features) / seconds - 1)


def test_unseen_steps_of_a_bumpy_machine_are_foretold_where_sums_of_prices_fail() -> None:
    held = np.random.default_rng(0).permutation(len(CELLS)) % 5 == 0
    seen = FEATURES_OF_CELLS[:, ~held], SECONDS[~held], None
    unseen = FEATURES_OF_CELLS[:, held], SECONDS[held]
    kriged = errors(forms_named(["kriging"], BUCKETS)[0].fit(*seen), *unseen)
    launches = errors(forms_named(["launches"], BUCKETS)[0].fit(*seen), *unseen)
    assert kriged.mean() < 0.025 < 0.04 < launches.mean()


def test_prices_between_rows_of_the_grid_follow_the_padded_rows() -> None:
    between = columns([ar(rows, 4096) for rows in (20, 28, 40, 56, 80, 112)])
    assert errors(FITTED, between, bumpy_seconds(between)).max() < 0.06


@given(step=steps, factors=st.lists(st.floats(0.0, 1e4), min_size=len(FEATURES), max_size=len(FEATURES)))
def test_no_correction_is_larger_than_that_of_a_cell(step: int, factors: list[float]) -> None:
    features = (FEATURES_OF_CELLS[:, step] * factors)[:, None]
    correction = np.log(FITTED.seconds(features) / FITTED.base.seconds(features))
    largest = np.abs(np.log(SECONDS / FITTED.base.seconds(FEATURES_OF_CELLS))).max()
    assert np.abs(correction) <= largest * (1 + 1e-9)


def test_far_from_all_cells_the_prices_stand_alone() -> None:
    near = columns([ar(128, 8192)])
    far = near * np.float64(1e12)
    pull = [abs(float(np.log(FITTED.seconds(at) / FITTED.base.seconds(at))[0])) for at in (near, far)]
    assert pull[1] < 0.25 * FITTED.largest
    assert FITTED.base.seconds(far)[0] > 1e6 * FITTED.base.seconds(near)[0], "they extrapolate along their slopes"


@pytest.mark.parametrize("noise", [0.01, 0.04])
def test_noise_of_cells_is_smoothed(noise: float) -> None:
    disturbed = SECONDS * np.exp(np.random.default_rng(1).normal(0, noise, len(SECONDS)))
    fitted = krige(FEATURES_OF_CELLS, disturbed, None)
    from_truth, from_data = (np.mean(errors(fitted, FEATURES_OF_CELLS, s)) for s in (SECONDS, disturbed))
    assert from_truth < 0.8 * noise
    assert from_data > 0.1 * noise, "a fit through every noisy cell follows its noise"


def test_a_cell_of_no_weight_does_not_pull() -> None:
    spoiled = SECONDS.copy()
    spoiled[7] *= 1.5
    weights = np.ones(len(SECONDS))
    weights[7] = 1e-9
    fitted = krige(FEATURES_OF_CELLS, spoiled, weights)
    assert errors(fitted, FEATURES_OF_CELLS[:, [7]], SECONDS[[7]])[0] < 0.1


@pytest.mark.parametrize("kind", ["draft", "verify"])
def test_the_price_of_one_more_row_is_steady_between_the_steps_of_padding(kind: str) -> None:
    """Prices of a smooth machine, row by row: near the truth in sum, never far below zero."""
    seconds = true_seconds(StepFeatures.from_columns(FEATURES_OF_CELLS))
    fitted = krige(FEATURES_OF_CELLS, seconds, None)
    make = (lambda rows: draft(rows, 4096, 512)) if kind == "draft" else (lambda rows: verify(rows, 4096, 4))
    line = columns([make(rows) for rows in range(1, 129)])
    priced, true = fitted.seconds(line), true_seconds(StepFeatures.from_columns(line))
    assert errors(fitted, line, true).max() < 0.04
    marginal = np.diff(priced)
    assert marginal.min() > -0.02 * priced.min()
    padded = line[INDEX["padded_tokens"]]
    rows_padded = variable_rows(line, ["padded_rows"])[0]
    level = (np.diff(padded) == 0) & (np.diff(rows_padded) == 0)
    assert level.any() and np.abs(np.diff(marginal)[level[1:] & level[:-1]]).max() < 0.004 * priced.min()


def test_rows_of_an_engine_without_graphs_are_not_padded() -> None:
    eager, graphs = (
        forms_named(["kriging"], buckets)[0].fit(FEATURES_OF_CELLS, SECONDS, None) for buckets in ((), BUCKETS)
    )
    assert isinstance(eager, LaunchModel) and isinstance(graphs, LaunchModel)
    assert not PADDING & set(eager.graph.variables) and set(graphs.graph.variables) >= PADDING


def test_prompts_that_fit_a_graph_share_the_cells_of_decode_steps() -> None:
    """A prompt beside rows of a kind that was timed without prompts only: what those rows cost is known from there."""
    prompts = [prefill(chunk, chunk) for chunk in (16, 32, 64, 128, 256, 512)]
    beside = [mixed(ar(rows, 1024), prefill(64, 64)) for rows in (1, 2, 4, 8, 16, 32, 64, 120)]
    features = np.concatenate([FEATURES_OF_CELLS, columns([*prompts, *beside])], axis=1)
    seconds = bumpy_seconds(features)
    fitted = forms_named(["kriging"], BUCKETS)[0].fit(features, seconds, None)
    assert isinstance(fitted, LaunchModel) and fitted.prompts is fitted.graph
    unseen = columns([mixed(ar(rows, 4096), prefill(64, 64)) for rows in (3, 12, 48, 100)])
    with_prompts = features[INDEX["prefill_tokens"]] > 0
    apart = krige(features[:, with_prompts], seconds[with_prompts], None)
    assert errors(fitted, unseen, bumpy_seconds(unseen)).max() < 0.12
    assert errors(apart, unseen, bumpy_seconds(unseen)).max() > 0.15
    written = fitted.to_json()
    again = fitted_from_json(written)
    assert isinstance(again, LaunchModel) and again.prompts is again.graph and again.to_json() == written
    assert again.seconds(features) == pytest.approx(fitted.seconds(features), rel=1e-12)


def test_a_profile_without_prompts_prices_them_apart() -> None:
    fitted = forms_named(["kriging"], BUCKETS)[0].fit(FEATURES_OF_CELLS, SECONDS, None)
    assert isinstance(fitted, LaunchModel) and fitted.prompts is not fitted.graph


def test_many_cells_are_thinned_so_that_predictions_stay_quick() -> None:
    many = np.tile(FEATURES_OF_CELLS, 8)
    fitted = krige(many, np.tile(SECONDS, 8), None)
    assert len(fitted.pulls) <= MOST_CELLS < many.shape[1]
    assert errors(fitted, FEATURES_OF_CELLS, SECONDS).mean() < 0.02


def plain_formula(fitted: KrigedModel, features: np.ndarray) -> np.ndarray:
    """The formula of the module's first lines, in float64 and step by step."""
    base = np.max(
        [design(t, features) @ s for t, s in zip(fitted.base.branches, map(np.array, fitted.base.slopes), strict=True)],
        axis=0,
    )
    at = fitted.mix @ np.log2(1.0 + variable_rows(features, fitted.variables) / fitted.units[:, None])
    apart = np.sqrt(((at[:, :, None] - fitted.places[:, None, :]) ** 2).sum(axis=0))  # [steps, cells]
    pull = (1.0 / (1.0 + apart**1.5)) @ fitted.pulls
    return base * np.exp(np.clip(pull, -fitted.largest, fitted.largest))


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 65, 130, len(CELLS)])
@pytest.mark.parametrize("told", [True, False])
def test_prices_are_those_of_the_formula(count: int, told: bool) -> None:
    """Of steps at cells and beside them, of any number of steps at once, with and without maxima and prompts."""
    beside = FEATURES_OF_CELLS * np.random.default_rng(3).uniform(0.9, 1.4, FEATURES_OF_CELLS.shape)
    features = np.where(np.arange(len(CELLS)) % 2, beside, FEATURES_OF_CELLS)[:, :count]
    features[INDEX["prefill_tokens"], ::3] = 40.0 * told
    features[INDEX["verify_width"] :] *= told
    for fitted in (FITTED, LARGE):
        assert fitted.seconds(features) == pytest.approx(plain_formula(fitted, features), rel=1e-6)


@given(count=st.integers(2, 400), most=st.integers(2, 70))
def test_parts_are_all_and_none_is_alone(count: int, most: int) -> None:
    parts = [np.arange(count)[part] for part in _parts(count, most)]
    assert set(np.concatenate(parts)) == set(range(count))
    assert all(2 <= len(part) <= most for part in parts)


def test_no_product_wakes_the_threads_of_blas() -> None:
    for evaluation in (LARGE._compiled.any_steps, LARGE._compiled.plain_steps):
        assert 2 <= evaluation.block < STEPS_AT_ONCE, "else the parts are not tried here"
        assert evaluation.block * evaluation.cells.size <= MATRIX_WORK
        assert STEPS_AT_ONCE * evaluation.pulls.size <= MATRIX_WORK


def test_axes_are_of_known_variables() -> None:
    assert {name for axis in AXES for name in axis.of} <= set(VARIABLES)


def test_a_kriged_model_survives_json() -> None:
    again = KrigedModel.from_json(FITTED.to_json())
    assert again.seconds(FEATURES_OF_CELLS) == pytest.approx(FITTED.seconds(FEATURES_OF_CELLS), rel=1e-12)


def test_bad_kriged_models_are_refused() -> None:
    good = FITTED.to_json()

    def without_a_place(data: dict) -> None:
        data["cells"][3]["place"].pop()

    def without_an_axis(data: dict) -> None:
        for cell in data["cells"]:
            cell["place"].pop()

    def of_an_unknown_variable(data: dict) -> None:
        data["variables"][0]["variable"] = "padded_token"

    def without_cells(data: dict) -> None:
        data["cells"] = []

    def that_pulls_without_end(data: dict) -> None:
        data["cells"][0]["pull"] = float("inf")

    for spoil, error, message in (
        (without_a_place, InputError, "equally many places"),
        (without_an_axis, InputError, f"finite places on {len(good['cells'][0]['place'])} axes"),
        (of_an_unknown_variable, UsageError, "did you mean 'padded_tokens'"),
        (without_cells, InputError, "equally many places"),
        (that_pulls_without_end, InputError, "finite places"),
    ):
        data = copy.deepcopy(good)
        spoil(data)
        with pytest.raises(error, match=message):
            KrigedModel.from_json(data)
