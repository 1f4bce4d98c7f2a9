"""What a step does (`StepPlan`) and what came of it (`StepOutcome`): all that scheduler and executor exchange."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler.features import StepFeatures

Ints = NDArray[np.int64]


class Mode(IntEnum):
    """What a row does in a step. An autoregressive row verifies a draft of length 0."""

    IDLE = 0
    PREFILL = 1  # tokens that the request brought, from the host
    DRAFT = 2
    VERIFY = 3


@dataclass(frozen=True)
class StepPlan:
    """A composed batch: row r is the request in slot ``slots[r]``; rows are in slot order. All arrays are int64 [rows].

    Row r puts ``query_tokens[r]`` tokens at positions ``start[r] ..`` through the model. A DRAFT row reads the
    ``sel_count`` listed pages and everything from ``tail_page`` on; the others read their whole context.

    A step may be planned while the one before runs. A row that verifies a draft there begins up to ``slack`` tokens
    after ``start``, and its page list may be longer; `Scheduler.update` of that step sets the three right, in place.
    ``features`` keep what was known when the step was planned.
    """

    step: int
    slots: Ints
    modes: Ints
    query_tokens: Ints
    start: Ints  # position of the first query token = KV tokens before it
    drafted: Ints  # draft tokens held before this step
    slack: Ints  # 0 where ``start`` is exact
    samples: NDArray[np.bool_]  # whether the row yields tokens (all but unfinished prefill chunks)
    sel_count: Ints
    tail_page: Ints
    new_pages: Ints  # [n, 3]: (slot, logical page, physical page) entries to add to the block tables
    requests: tuple[str, ...]  # request id of each row
    tenancy: Ints  # number of the stay in its slot: tells a request from another that moved in since
    preempted: tuple[str, ...]  # requests sent back to the queue by this step
    features: StepFeatures
    selects: bool = True  # rows that verify (or end their prefill) get page lists
    lossy: bool = False  # rows that verify read their page lists too

    @property
    def num_rows(self) -> int:
        """Rows in the step."""
        return len(self.slots)

    @property
    def num_query_tokens(self) -> int:
        """Tokens through the GEMMs, before padding."""
        return int(self.query_tokens.sum())

    @property
    def sparse(self) -> NDArray[np.bool_]:
        """Mask [rows] of the rows that read their page lists."""
        draft = self.modes == Mode.DRAFT
        return np.asarray(draft | (self.modes == Mode.VERIFY) if self.lossy else draft)

    def rows_of(self, mode: Mode) -> NDArray[np.bool_]:
        """Mask [rows] of the rows in ``mode``."""
        return np.asarray(self.modes == mode)


@dataclass(frozen=True)
class StepOutcome:
    """What the executor saw, row by row of the plan. All arrays are [rows]."""

    accepted: Ints  # accepted draft tokens (0 where the row did not verify a draft)
    committed: Ints  # tokens added to the request: accepted + 1, or fewer where a stop cut the run; 0 for drafts
    finish: Ints  # FinishReason; NONE where the request goes on
    margin: NDArray[np.float64]  # of the token drafted in this step; NaN elsewhere
    seconds: float = float("nan")  # measured step time, where known
