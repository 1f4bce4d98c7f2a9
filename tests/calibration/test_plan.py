"""Cells and the profiling plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.errors import UsageError
from aspire.scheduler.features import FEATURES, StepFeatures
from aspire_calibration import Cell, PlanLimits, RowGroup, ar, draft, mixed, prefill, profile_plan, ragged, verify
from aspire_calibration.cells import bucket_array, padded_tokens, regimes_of
from aspire_calibration.plan import IDLE_RESTS_S, geometric, refinement_level
from aspire_calibration.refine import neighbour
from tests.calibration.machine import AHEAD, LIMITS

limits_strategy = st.builds(
    PlanLimits,
    max_num_seqs=st.integers(1, 300),
    max_model_len=st.integers(40, 50_000),
    num_pages=st.integers(1, 100_000),
    max_num_batched_tokens=st.integers(1, 9000),
    d_max=st.integers(0, 20),
    graph_buckets=st.sampled_from([(), (1, 2, 4, 8, 16), (512,)]),
    max_sparse_tokens=st.none() | st.integers(1, 3000),
    async_scheduling=st.booleans(),
)


@given(limits_strategy, st.integers(0, 5))
def test_every_cell_fits_the_limits_and_is_there_once(limits, seed):
    plan = profile_plan(limits, seed=seed, levels=2)
    assert all(limits.fits(cell) for cell in plan)
    assert len({cell.key for cell in plan}) == len(plan)
    checking = [group for cell in plan for group in cell.groups if group.kind == "verify"]
    assert all(group.query_tokens <= limits.d_max + 1 for group in checking)


def test_the_plan_is_the_same_for_the_same_seed_and_held_out_points_differ_otherwise():
    keys = [[cell.key for cell in profile_plan(LIMITS, seed=seed)] for seed in (0, 0, 1)]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("length", [30, 60, 120, 300])
def test_any_prefix_covers_all_regimes_and_both_ends_of_the_axes(length):
    cells = profile_plan(LIMITS)[:length]
    assert {cell.regime for cell in cells} == {"ar", "draft", "verify", "mixed", "prefill"}
    rows = [cell.rows for cell in cells]
    assert min(rows) == 1 and max(rows) == LIMITS.max_num_seqs
    assert max(group.context_tokens for cell in cells for group in cell.groups) == LIMITS.max_model_len
    assert 0.1 <= np.mean([cell.heldout for cell in cells]) <= 0.25


def test_a_large_gpu_gets_some_hundred_cells_with_mixed_fractions_and_off_grid_points():
    plan = profile_plan(LIMITS)
    assert 300 <= len(plan) <= 1250
    steps = [cell.features() for cell in plan if cell.regime == "mixed"]
    assert {0.1, 0.5, 0.9} <= {round(float(step.draft_rows / step.rows), 1) for step in steps}
    assert any(len({group.context_tokens for group in cell.groups}) >= 3 for cell in plan if cell.heldout)


def test_where_steps_are_planned_ahead_some_cells_start_from_idle_early_and_are_never_held_out():
    plan = profile_plan(AHEAD)
    places = [place for place, cell in enumerate(plan) if cell.idle]
    idle = [plan[place] for place in places]
    assert len(idle) == 12 and places[5] < 60 and not any(cell.heldout for cell in idle)
    assert {cell.rows for cell in idle[:3]} == {1, 4, 16} and len({cell.query_tokens for cell in idle[:4]}) == 4
    assert {cell.rest_s for cell in idle[:3]} == set(IDLE_RESTS_S)
    assert {cell.regime for cell in idle} == {"prefill"} and max(cell.query_tokens for cell in idle) == 2048
    assert [cell for cell in plan if not cell.idle] == profile_plan(LIMITS), "the other cells stay as they are"
    assert not any(cell.idle for cell in profile_plan(AHEAD, with_prefill=False))


def test_features_of_a_mixed_step():
    cell = mixed(draft(3, 1000, 512), verify(2, 2000, 4), prefill(100, 300))
    f = cell.features((16, 128))
    assert cell.regime == "mixed" and cell.query_tokens == 3 + 10 + 100
    expected = {
        "rows": 6,
        "query_tokens": 113,
        "padded_tokens": 128,
        "draft_rows": 3,
        "verify_rows": 2,
        "sparse_kv_tokens": 1536,
        "full_kv_tokens": 4300,
        "prefill_tokens": 100,
        "prefill_pairs": 30000 - 100 * 99 / 2,
        "select_kv_tokens": 4000,
        "select_rows": 2,
        "verify_width": 5,
        "longest_full_kv": 2000,
        "longest_sparse_kv": 512,
    }
    assert {name: float(getattr(f, name)) for name in FEATURES} == expected


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=4))
def test_prefill_pairs_are_counted_token_by_token_however_unlike_the_prompts(chunks):
    cell = mixed(ar(2, 500), *(prefill(chunk, start + chunk) for chunk, start in chunks))
    assert cell.features().prefill_pairs == sum(sum(range(start + 1, start + chunk + 1)) for chunk, start in chunks)


def test_features_are_those_of_the_scheduler_under_refresh_and_shared_lists():
    f = mixed(draft(3, 1000, 512), verify(2, 2000, 4)).features(full_layer_share=0.25, select_layer_share=0.5)
    assert f.sparse_kv_tokens == 0.75 * 1536 and f.full_kv_tokens == 4000 + 0.25 * 3000
    assert f.select_kv_tokens == 0.5 * 4000 + 0.25 * 3000 and f.select_rows == 5


def test_regimes():
    steps = [ar(4, 100), draft(4, 100, 50), verify(4, 100, 2), prefill(50, 100), mixed(ar(1, 50), draft(1, 50, 20))]
    assert [cell.regime for cell in steps] == ["ar", "draft", "verify", "prefill", "mixed"]
    both = StepFeatures.from_matrix(np.stack([cell.features().matrix() for cell in steps]))
    assert list(regimes_of(both)) == [cell.regime for cell in steps]


@given(st.integers(1, 64), st.integers(20, 5000), st.floats(1, 16))
def test_ragged_keeps_rows_and_tokens_and_about_the_context(rows, context, spread):
    even = verify(rows, context, 3)
    uneven = ragged(even, spread)
    assert uneven.rows == rows and uneven.query_tokens == even.query_tokens
    # Groups of unequal size and whole tokens shift the mean a little.
    assert uneven.kv_tokens <= even.kv_tokens * 1.4 + rows and uneven.kv_tokens >= even.kv_tokens * 0.5 - rows


def test_keys_name_the_step_and_survive_json():
    cell = mixed(draft(3, 1000, 512), verify(2, 2000, 4))
    assert cell.key == "draft:3x1q1000c512s verify:2x5q2000c+"
    assert Cell.from_json(cell.to_json()) == cell


def test_a_step_from_idle_has_a_key_of_its_own_and_holds_whole_prompts():
    cell = replace(prefill(512, 512, 4), rest_s=0.02)
    assert cell.key == "idle20ms prefill:4x512q512c" != prefill(512, 512, 4).key
    assert Cell.from_json(cell.to_json(), rest_s=0.02) == cell
    np.testing.assert_array_equal(cell.features().matrix(), prefill(512, 512, 4).features().matrix())
    for other in (ar(1, 10), prefill(5, 10), mixed(prefill(5, 5), draft(1, 9, 9))):
        with pytest.raises(UsageError, match="holds whole prompts alone"):
            replace(other, rest_s=0.02)
    with pytest.raises(UsageError, match="is not held out"):
        replace(cell, heldout=True)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (("decode", 1, 1, 10), "row kind 'decode' is not known.*allowed: draft, prefill, verify"),
        (("verify", 0, 1, 10), "count >= 1"),
        (("verify", 1, 11, 10), "counts the query tokens too"),
        (("draft", 1, 1, 10, 0), "1 <= sparse_tokens <= context_tokens"),
        (("draft", 1, 1, 10, 5, True), "whether draft rows select"),
        (("verify", 1, 1, 10, 5), "only draft rows have sparse_tokens"),
    ],
)
def test_impossible_rows_are_refused(group, message):
    with pytest.raises(UsageError, match=message):
        RowGroup(*group)


@given(st.lists(st.integers(1, 512), max_size=12), st.integers(0, 600))
def test_padding_is_the_smallest_bucket_that_holds_the_tokens(buckets, tokens):
    padded = float(padded_tokens(np.float64(tokens), bucket_array(buckets)))
    fitting = [bucket for bucket in buckets if bucket >= tokens]
    assert padded == (min(fitting) if fitting else tokens)


def test_geometric_and_levels():
    assert geometric(1, 16) == [1, 2, 4, 8, 16] and geometric(5, 5) == [5]
    assert [refinement_level(index, 9) for index in range(9)] == [0, 3, 2, 3, 1, 3, 2, 3, 0]


def test_page_mass_is_timed_for_narrow_wide_and_uneven_verification():
    def widths(limits):
        """Of the selecting rows of each cell with verifying rows alone."""
        cells = [cell for cell in profile_plan(limits) if all(group.select for group in cell.groups)]
        return [{group.query_tokens for group in cell.groups} for cell in cells]

    limits = PlanLimits(128, 8192, 65536, 8192)
    early = widths(limits)[:60]
    assert {1} in early and any(found > {1} for found in early) and any(min(found) > 1 for found in early)
    assert not widths(replace(limits, select_verify=False))


def test_rows_beside_drafting_ones_all_select_or_none_does():
    mass = {"verify": set(), "prefill": set()}
    for cell in profile_plan(PlanLimits(128, 8192, 65536, 8192)):
        if any(group.kind == "draft" for group in cell.groups):
            selects = {group.select for group in cell.groups if group.kind != "draft"}
            assert len(selects) <= 1
            for group in cell.groups:
                mass.get(group.kind, set()).update(selects)
    assert mass == {"verify": {False, True}, "prefill": {False, True}}, "selectors that take no mass are priced too"


def test_steps_of_long_rounds_and_full_steps_of_prompts_beside_drafts_are_timed():
    early = profile_plan(PlanLimits(128, 8192, 65536, 8192))[:500]
    steps = [cell.features(tuple(range(64, 8193, 64))) for cell in early]
    decode = [f for f in steps if f.draft_rows and f.verify_rows and not f.prefill_tokens]
    few = [f for f in decode if f.rows >= 32 and f.verify_rows <= f.rows / 12]
    assert max(f.verify_width for f in few) == 17 and {float(f.rows) for f in few} >= {32, 128}
    full = [f for f in steps if f.prefill_tokens and f.draft_rows and f.padded_tokens == 8192]
    assert {bool(f.select_rows) for f in full} == {False, True}
    assert {float(f.rows) > 64 for f in full} == {False, True}


def test_steps_of_policies_that_follow_each_request_are_timed_and_held_out_at_full_and_quarter_batches():
    plan = profile_plan(PlanLimits(128, 8192, 65536, 8192))
    buckets = (*range(16, 257, 16), *range(320, 1025, 64))
    for rows, fewest in ((128, 15), (32, 10)):
        cells = [cell for cell in plan if cell.rows == rows and {g.kind for g in cell.groups} == {"draft", "verify"}]
        long = [cell for cell in cells if min(group.context_tokens for group in cell.groups) >= 3000]
        steps = [cell.features(buckets) for cell in long]
        few = [f for f in steps if f.select_rows and rows / 32 <= f.verify_rows <= rows / 4]
        assert len(few) >= fewest and len({float(f.verify_rows) for f in few}) >= 5
        assert len({float(f.padded_tokens) for f in few}) >= 4, "a GEMM of each size has its own time"
        assert any(cell.heldout for cell in long)
        widths = [{group.query_tokens for group in cell.groups if group.kind == "verify"} for cell in long]
        assert any(len(found) >= 4 for found in widths) and any(found == {7} for found in widths)
        contexts = [[group.context_tokens for group in cell.groups] for cell in long]
        assert any(1.02 < max(some) / min(some) < 1.12 for some in contexts)


def test_held_out_cells_are_of_every_regime_that_is_drawn_off_the_grid():
    held = [cell for cell in profile_plan(PlanLimits(128, 8192, 65536, 8192)) if cell.heldout]
    assert {cell.regime for cell in held} == {"ar", "draft", "verify", "mixed", "prefill"}
    kinds = {frozenset(group.kind for group in cell.groups) for cell in held}
    assert {frozenset(("draft", "verify")), frozenset(("verify", "prefill"))} <= kinds


def test_prompts_are_timed_alone_together_and_beside_drafts_with_their_first_list() -> None:
    plan = profile_plan(LIMITS)
    prompts = [cell for cell in plan if cell.groups[-1].kind == "prefill"]
    assert {cell.groups[-1].select for cell in prompts if len(cell.groups) == 1} == {False, True}
    assert max(cell.groups[-1].count for cell in prompts) > 8
    beside = [{group.kind for group in cell.groups[:-1]} for cell in prompts if len(cell.groups) > 1]
    assert {"verify"} in beside and {"draft", "verify"} in beside
    f = prefill(100, 300, 2, select=True).features(select_layer_share=0.5)
    assert f.select_rows == 2 and f.select_kv_tokens == 0.5 * 600
    with_lists = [cell for cell in profile_plan(replace(LIMITS, select_verify=False)) if cell.groups[-1].select]
    assert not with_lists


def test_a_neighbour_of_the_longest_prompt_is_a_prompt_that_fits() -> None:
    limits = PlanLimits(max_num_seqs=8, max_model_len=8192, num_pages=5000, max_num_batched_tokens=8192)
    generator = np.random.default_rng(0)
    near = [neighbour(prefill(8192, 8192), limits, generator) for _ in range(200)]
    assert all(cell is None or limits.fits(cell) for cell in near) and any(near)


def test_every_number_of_rows_drafts_with_lists_as_the_selector_makes_them():
    drafting = {
        (cell.rows, group.sparse_tokens)
        for cell in profile_plan(LIMITS)
        for group in cell.groups
        if len(cell.groups) == 1 and group.kind == "draft" and group.context_tokens >= 1024
    }
    usual = LIMITS.sparse_for(1024)
    assert {rows for rows, sparse in drafting if sparse == usual} >= {1, 2, 4, 8, 16, 32, 64, 128}
