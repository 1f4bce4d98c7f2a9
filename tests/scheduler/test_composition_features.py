"""What the scheduler counts of a step is what the profiler counts of the same step."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aspire.scheduler.composition import features_of_rows
from aspire.scheduler.features import FEATURES
from aspire_calibration.cells import Cell, RowGroup

PAGE = 16
draft_rows = st.tuples(st.integers(200, 4000), st.integers(0, 8)).map(
    lambda row: RowGroup("draft", 1, 1, row[0], (8 - row[1]) * PAGE + row[0] % PAGE)
)
verify_rows = st.tuples(st.integers(20, 4000), st.integers(1, 17)).map(
    lambda row: RowGroup("verify", 1, row[1], row[0])
)
prefill_rows = st.tuples(st.integers(300, 4000), st.integers(18, 300)).map(
    lambda row: RowGroup("prefill", 1, row[1], row[0])
)


@given(
    st.lists(draft_rows | verify_rows | prefill_rows, min_size=1, max_size=8).filter(
        lambda rows: all(row.sparse_tokens > 0 for row in rows if row.kind == "draft")
    )
)
def test_features_of_rows_are_those_of_the_cell(rows: list[RowGroup]) -> None:
    query = np.array([row.query_tokens for row in rows])
    context = np.array([row.context_tokens for row in rows])
    drafting, prompts = (np.array([row.kind == kind for row in rows]) for kind in ("draft", "prefill"))
    # pages and tail of a list: it reads (pages - tail) * PAGE + context tokens
    tail = context // PAGE
    pages = np.where(drafting, [row.sparse_tokens // PAGE for row in rows], 0)
    told = features_of_rows(
        drafting,
        prompts if prompts.any() else None,
        query,
        context,
        (pages - tail) * PAGE + context,
        None,
        tokens=int(query.sum()),
        padded_tokens=int(query.sum()),
        full_layer_share=0.0,
        select_layer_share=1.0,
    )
    expected = Cell(tuple(rows)).features()
    assert dict(zip(FEATURES, told.columns().tolist(), strict=True)) == dict(
        zip(FEATURES, expected.columns().tolist(), strict=True)
    )
