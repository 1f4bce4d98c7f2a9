"""The log of steps: what is appended is read again, however it lies in memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aspire.runlog import ROW_COLUMNS, StepLog
from aspire.scheduler.features import FEATURES


@given(
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=12),
)
def test_rows_of_all_blocks_are_read_in_order(reserve: int, steps: list[tuple[int, bool]]) -> None:
    log, rows = StepLog(reserve), np.zeros((0, len(ROW_COLUMNS)), dtype=int)
    for number, (count, look) in enumerate(steps):
        new = np.arange(count * len(ROW_COLUMNS)).reshape(count, len(ROW_COLUMNS)) + 1000 * number
        columns = {name: new[:, place] for place, name in enumerate(ROW_COLUMNS)}
        log.append(float(number), 1.0, np.full(len(FEATURES), number), **columns, margin=new[:, 0] + 0.5)
        rows = np.concatenate([rows, new])
        if look or number == len(steps) - 1:
            assert log.num_rows == len(rows) and len(log) == number + 1
            for place, name in enumerate(ROW_COLUMNS):
                assert log.column(name).tolist() == rows[:, place].tolist()
            assert log.margin.tolist() == (rows[:, 0] + 0.5).tolist()
            assert log.column("slot")[log.rows_of(number)].tolist() == new[:, 0].tolist()
            assert np.bincount(log.step_of_row(), minlength=number + 1).tolist() == [n for n, _ in steps[: number + 1]]
