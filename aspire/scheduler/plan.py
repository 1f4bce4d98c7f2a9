"""What a step does (`StepPlan`) and what came of it (`StepOutcome`): all that scheduler and executor exchange."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler.features import StepFeatures
from aspire.scheduler.once import once
from aspire.scheduler.slots import index_of

Ints = NDArray[np.int64]


class Mode(IntEnum):
    """What a row does in a step. An autoregressive row verifies a draft of length 0."""

    IDLE = 0
    PREFILL = 1  # tokens that the request brought, from the host
    DRAFT = 2
    VERIFY = 3


# plain numbers: an attribute of an IntEnum costs as much as a small numpy operation
_DRAFT, _VERIFY = int(Mode.DRAFT), int(Mode.VERIFY)


@dataclass(eq=False)  # not frozen, as `StepOutcome`: these are made at every step, and freezing doubles what it takes
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
    departures: int  # `Slots.departures` when the step was planned: while it is the same, nobody moved
    preempted: tuple[str, ...]  # requests sent back to the queue by this step
    features: StepFeatures
    selects: bool = True  # rows that verify (or end their prefill) get page lists
    lossy: bool = False  # rows that verify read their page lists too

    @property
    def num_rows(self) -> int:
        """Rows in the step."""
        return len(self.slots)

    @once
    def num_query_tokens(self) -> int:
        """Tokens through the GEMMs, before padding."""
        return int(np.add.reduce(self.query_tokens))

    # What follows is asked for several times a step and never changes: `Scheduler.update` touches none of its sources.

    @once
    def at(self) -> Ints | slice:
        """``slots`` as an index of arrays over slots."""
        return index_of(self.slots)

    @once
    def draft(self) -> NDArray[np.bool_]:
        """Mask [rows] of the rows that draft."""
        return np.asarray(self.modes == _DRAFT)

    @once
    def verify(self) -> NDArray[np.bool_]:
        """Mask [rows] of the rows that verify a draft of any length, 0 included."""
        return np.asarray(self.modes == _VERIFY)

    @once
    def prefill(self) -> NDArray[np.bool_]:
        """Mask [rows] of the rows with tokens of a prompt."""
        return np.asarray(~(self.draft | self.verify))

    @once
    def finds(self) -> NDArray[np.bool_]:
        """Mask [rows] of the rows that find tokens of the output: verifications and prompts that end."""
        return self.samples & ~self.draft if self.num_drafts else self.samples

    @once
    def pending(self) -> Ints:
        """[rows] drafts that each row holds and adds one to."""
        return self.drafted * self.draft

    @once
    def judged(self) -> Ints:
        """[rows] drafts that each row verifies."""
        return self.drafted - self.pending

    @once
    def num_drafts(self) -> int:
        """Rows that draft."""
        return int(np.count_nonzero(self.draft))

    @once
    def num_prefills(self) -> int:
        """Rows with tokens of a prompt."""
        return self.num_rows - self.num_drafts - int(np.count_nonzero(self.verify))

    @once
    def single(self) -> bool:
        """Whether every row has one query token and samples one token: each drafts or decodes autoregressively."""
        return self.num_query_tokens == self.num_rows and not self.num_prefills

    @once
    def sampled(self) -> Ints:
        """[rows] tokens that each row samples: one a draft, drafts + 1 a verification, one a finished prefill."""
        if not self.num_prefills:
            return self.query_tokens
        return np.where(self.verify, self.query_tokens, self.samples)

    @once
    def sample_start(self) -> Ints:
        """[rows] place of each row's first sample among all."""
        return np.asarray(np.arange(self.num_rows) if self.single else np.cumsum(self.sampled) - self.sampled)

    @once
    def num_samples(self) -> int:
        """Tokens that the step samples."""
        return self.num_query_tokens if not self.num_prefills else int(np.add.reduce(self.sampled))

    @property
    def sparse(self) -> NDArray[np.bool_]:
        """Mask [rows] of the rows that read their page lists."""
        return self.draft | self.verify if self.lossy else self.draft

    def rows_of(self, mode: Mode) -> NDArray[np.bool_]:
        """Mask [rows] of the rows in ``mode``."""
        return np.asarray(self.modes == mode)


@dataclass(eq=False)
class StepOutcome:
    """What the executor saw, row by row of the plan. All arrays are [rows]."""

    accepted: Ints  # accepted draft tokens (0 where the row did not verify a draft)
    committed: Ints  # tokens added to the request: accepted + 1, or fewer where a stop cut the run; 0 for drafts
    finish: Ints  # FinishReason; NONE where the request goes on
    margin: NDArray[np.float64]  # of the token drafted in this step; NaN elsewhere
    seconds: float = float("nan")  # measured step time, where known
