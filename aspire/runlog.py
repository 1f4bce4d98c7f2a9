"""Columnar records of a run: what happened to every row of every step, and to every request.

The engine and the simulator fill them with the same two functions: `log_step` after each step, `table_from_log` at the
end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler.features import FEATURES
from aspire.scheduler.plan import StepOutcome, StepPlan
from aspire.scheduler.request import Request

MODES: tuple[str, ...] = ("idle", "prefill", "draft", "verify")  # a verify row with drafted = 0 is autoregressive
IDLE, PREFILL, DRAFT, VERIFY = range(4)

ROW_COLUMNS: tuple[str, ...] = (
    "slot",
    "request",  # index into the request table
    "mode",  # index into MODES
    "query_tokens",
    "context",  # tokens with full-attention KV before the step
    "drafted",  # drafts the row held when the step began
    "accepted",
    "committed",  # tokens that became output in this step
    "finished",  # 1 = the request ended with this step
)

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


class StepLog:
    """Columnar log of steps. `append` copies the arrays it is given; `columns` are views of what was logged.

    ``reserve_rows``: rows to reserve room for. Memory is touched only as it fills, so a generous guess costs nothing.
    A full log goes on in another block of as many rows: to move what is there takes milliseconds, between two steps of
    an engine. Whoever asks for the rows has them put together.
    """

    def __init__(self, reserve_rows: int = 16384) -> None:
        self._steps = 0
        self._rows = 0
        self._filled = 0  # rows of the block that is being filled
        self._block_rows = max(1, reserve_rows)
        self._full: list[tuple[Ints, NDArray[np.float32]]] = []  # blocks: columns and margins
        self._times = np.zeros((3, 1024))  # start_s, duration_s, planned_s
        self._features = np.zeros((1024, len(FEATURES)))
        self._row_end = np.zeros(1024, dtype=np.int64)
        self._new_block(self._block_rows)

    def __len__(self) -> int:
        return self._steps

    @property
    def num_rows(self) -> int:
        """Rows logged, over all steps."""
        return self._rows

    @property
    def start_s(self) -> Floats:
        """[steps]: when each step began, on the clock of the run."""
        return self._times[0, : self._steps]

    @property
    def duration_s(self) -> Floats:
        """[steps]"""
        return self._times[1, : self._steps]

    @property
    def planned_s(self) -> Floats:
        """[steps]: when each step was composed: before it began, where steps are planned ahead."""
        return self._times[2, : self._steps]

    @property
    def planned_ahead(self) -> NDArray[np.bool_]:
        """[steps]: whether the outcome of the step before was not known yet."""
        ahead = np.zeros(self._steps, dtype=bool)
        ahead[1:] = self.planned_s[1:] < (self.start_s + self.duration_s)[:-1]
        return ahead

    @property
    def features(self) -> Floats:
        """[steps, len(FEATURES)]: what the cost model saw."""
        return self._features[: self._steps]

    @property
    def row_end(self) -> NDArray[np.int64]:
        """[steps]: rows of step i are ``row_end[i-1]:row_end[i]`` of every column."""
        return self._row_end[: self._steps]

    @property
    def margin(self) -> NDArray[np.float32]:
        """[rows]: gap of the two best perturbed draft scores; NaN where the row drafted nothing."""
        self._put_together()
        return self._margin[: self._rows]

    def column(self, name: str) -> Ints:
        """[rows]: the column ``name`` of `ROW_COLUMNS`."""
        self._put_together()
        return self._columns[ROW_COLUMNS.index(name), : self._rows]

    def rows_of(self, step: int) -> slice:
        """Where the rows of ``step`` lie in every column."""
        return slice(int(self._row_end[step - 1]) if step else 0, int(self._row_end[step]))

    def step_of_row(self) -> NDArray[np.int64]:
        """[rows]: the step each row belongs to."""
        counts = np.diff(self.row_end, prepend=0)
        return np.repeat(np.arange(self._steps), counts)

    def append(
        self,
        start_s: float,
        duration_s: float,
        features: Floats | Sequence[float],  # [len(FEATURES)]
        *,
        slot: Any,
        request: Any,
        mode: Any,
        query_tokens: Any,
        context: Any,
        drafted: Any,
        accepted: Any,
        committed: Any,
        finished: Any,
        margin: Any = None,  # [rows] float, or None when nothing drafted
        planned_s: float | None = None,  # default: start_s
    ) -> None:
        """Log one step. Row arguments are arrays of one length (or scalars that hold for every row)."""
        count = len(slot)
        step = self._steps
        if step == self._row_end.shape[0]:
            self._times = _doubled(self._times, 1)
            self._features = _doubled(self._features, 0)
            self._row_end = _doubled(self._row_end, 0)
        if self._filled + count > len(self._margin):
            self._full.append((self._columns[:, : self._filled], self._margin[: self._filled]))
            self._new_block(max(count, self._block_rows))
        first, last = self._filled, self._filled + count
        self._times[0, step] = start_s
        self._times[1, step] = duration_s
        self._times[2, step] = start_s if planned_s is None else planned_s
        self._features[step] = features
        self._row_end[step] = self._rows + count
        block = self._columns[:, first:last]
        block[0] = slot
        block[1] = request
        block[2] = mode
        block[3] = query_tokens
        block[4] = context
        block[5] = drafted
        block[6] = accepted
        block[7] = committed
        block[8] = finished
        self._margin[first:last] = np.nan if margin is None else margin
        self._steps = step + 1
        self._rows += count
        self._filled = last

    def _new_block(self, rows: int) -> None:
        self._columns: Ints = np.empty((len(ROW_COLUMNS), rows), dtype=np.int32)
        self._margin: NDArray[np.float32] = np.empty(rows, dtype=np.float32)
        self._filled = 0

    def _put_together(self) -> None:
        """All rows in one block, with as much room to spare: who asks after every step does not copy all every time."""
        if not self._full:
            return
        parts = [*self._full, (self._columns[:, : self._filled], self._margin[: self._filled])]
        self._full = []
        self._new_block(2 * self._rows)
        np.concatenate([columns for columns, _ in parts], axis=1, out=self._columns[:, : self._rows])
        np.concatenate([margin for _, margin in parts], out=self._margin[: self._rows])
        self._filled = self._rows


def _doubled(array: NDArray[Any], axis: int) -> NDArray[Any]:
    return np.concatenate([array, np.empty_like(array)], axis=axis)


@dataclass
class RequestTable:
    """One row per request; NaN where a time was never reached."""

    request_id: list[str]
    arrival_s: Floats
    queued_s: Floats  # when the engine took it, between two steps: at or after its arrival
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]  # generated in this run
    max_tokens: NDArray[np.int64]  # asked for
    priority: NDArray[np.int64]
    first_scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    preemptions: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]  # of the prompt, found in pages that others had computed
    prefix_of: NDArray[np.int64]  # row of an earlier request with the longest equal prefix; -1 = none
    prefix_tokens: NDArray[np.int64]  # of that prefix, whole pages of prompt and output
    status: list[str] = field(default_factory=list)  # length, stop, abort, rejected, running, waiting

    @classmethod
    def empty(cls, count: int) -> RequestTable:
        """``count`` requests that have not arrived."""
        zeros, times = np.zeros((7, count), dtype=np.int64), np.full((3, count), np.nan)
        return cls(
            request_id=[str(index) for index in range(count)],
            arrival_s=np.zeros(count),
            queued_s=np.zeros(count),
            prompt_tokens=zeros[0],
            output_tokens=zeros[1],
            max_tokens=zeros[3],
            priority=zeros[4],
            first_scheduled_s=times[0],
            first_token_s=times[1],
            finish_s=times[2],
            preemptions=zeros[2],
            cached_tokens=zeros[5],
            prefix_of=np.full(count, -1, dtype=np.int64),
            prefix_tokens=zeros[6],
            status=["waiting"] * count,
        )

    def __len__(self) -> int:
        return len(self.request_id)


REQUEST_COLUMNS: tuple[str, ...] = tuple(RequestTable.__dataclass_fields__)
OLD_REQUEST_COLUMNS: tuple[str, ...] = tuple(name for name in REQUEST_COLUMNS if name != "queued_s")
"""Of earlier recordings; their requests count as queued when they arrived."""


def status_of(request: Request) -> str:
    """``length``, ``stop``, ``abort``, ``error`` for finished requests, else the state."""
    return request.finish_reason.name.lower() if request.finish_reason else request.state.value


def log_step(
    log: StepLog,
    plan: StepPlan,
    outcome: StepOutcome,
    owner: NDArray[np.int64],  # [rows] request number of each row
    start_s: float,
    finished: NDArray[np.bool_],  # [rows]
    planned_s: float | None = None,
) -> None:
    """Append a step to the log; the engine and the simulator call the same function."""
    log.append(
        start_s,
        outcome.seconds,
        plan.features.matrix(),
        slot=plan.slots,
        request=owner,
        mode=plan.modes,
        query_tokens=plan.query_tokens,
        context=plan.start - plan.pending if plan.num_drafts else plan.start,
        drafted=plan.drafted,
        accepted=outcome.accepted,
        committed=outcome.committed,
        finished=finished,
        margin=outcome.margin,
        planned_s=planned_s,
    )


def table_from_log(log: StepLog, count: int) -> RequestTable:
    """Request times and output lengths from the rows of a log. First and last tokens are those of the log: a request
    that is preempted later keeps its first token's time."""
    table = RequestTable.empty(count)
    request, committed = log.column("request"), log.column("committed")
    step, end_s = log.step_of_row(), log.start_s + log.duration_s
    table.first_scheduled_s[:] = _at_first(log.start_s, step, request, count)
    gave = np.flatnonzero(committed > 0)
    table.first_token_s[:] = _at_first(end_s, step[gave], request[gave], count)
    table.output_tokens[:] = np.bincount(request[gave], weights=committed[gave], minlength=count)
    ended = np.flatnonzero(log.column("finished"))
    table.finish_s[request[ended]] = end_s[step[ended]]
    return table


def _at_first(times: Floats, step: NDArray[np.int64], request: Ints, count: int) -> Floats:
    """[count] the ``times`` [steps] of the first of the rows of each request, in ``step`` [rows]; NaN without rows."""
    first = np.full(count, len(times))
    first[request[::-1]] = step[::-1]  # written backwards, the earliest stays
    return np.asarray(np.append(times, np.nan)[first])
