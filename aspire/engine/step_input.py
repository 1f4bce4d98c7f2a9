"""A `StepPlan` as the flat int32 arrays of a forward: one host buffer, one upload, fixed offsets for CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from aspire.engine.sequences import Sequences
from aspire.scheduler import Mode, StepPlan
from aspire_kernels import StepRows

TOKEN_FIELDS = ("token_ids", "token_row")
ROW_FIELDS = (
    "row_slot",
    "q_start",
    "q_len",
    "first",
    "pending_at",
    "drafting",
    "sparse",  # 1 = the row reads its page list
    "drafted",
    "sample_start",
    "finds",
    "forced",
    "mass_first",  # query offsets whose page mass is taken at verification; -1 = none
    "mass_last",
    "mass_draft",  # the same in layers that drafting rows read in full
)
SAMPLE_FIELDS = ("logit_row", "sample_slot")
PAGE_FIELDS = ("page_slot", "page_logical", "page_physical")  # new block-table entries; padded ones go to a spare row
_STATE_FIELDS = tuple(field.name for field in fields(StepRows))


@dataclass(frozen=True)
class Shape:
    """Sizes of a forward, padding included."""

    tokens: int
    rows: int
    samples: int
    pages: int  # new block-table entries

    @property
    def size(self) -> int:
        """int32 elements of the buffer."""
        return (
            len(TOKEN_FIELDS) * self.tokens
            + len(ROW_FIELDS) * self.rows
            + len(SAMPLE_FIELDS) * self.samples
            + len(PAGE_FIELDS) * self.pages
        )


class StepInput:
    """Named views of one flat int32 buffer, on the host (numpy) or the device (torch)."""

    def __init__(self, shape: Shape, buffer: np.ndarray | Tensor) -> None:
        self.shape = shape
        self.buffer = buffer
        self._views: dict[str, np.ndarray | Tensor] = {}
        offset = 0
        groups = (
            (TOKEN_FIELDS, shape.tokens),
            (ROW_FIELDS, shape.rows),
            (SAMPLE_FIELDS, shape.samples),
            (PAGE_FIELDS, shape.pages),
        )
        for names, length in groups:
            for name in names:
                self._views[name] = buffer[offset : offset + length]
                offset += length

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self._views[name]  # type: ignore[return-value]
        except KeyError:
            raise AttributeError(name) from None

    def clear(self, spare_slot: int) -> None:
        """Make the (host) buffer that of a step without rows."""
        self.buffer[:] = 0
        for name in ("token_row", *(field for field in ROW_FIELDS if field.startswith("mass"))):
            self._views[name][:] = -1
        self._views["page_slot"][:] = spare_slot

    def step_rows(self) -> StepRows:
        """What `aspire_kernels.step_state` reads of the (device) buffer."""
        return StepRows(**{name: self._views[name] for name in _STATE_FIELDS})  # type: ignore[arg-type]

    def fill(
        self, plan: StepPlan, sequences: Sequences, selects: bool, forced: np.ndarray | None, spare_slot: int
    ) -> None:
        """Write ``plan`` into the (host) buffer; padded rows have no query, padded pages go to ``spare_slot``.

        ``forced`` [rows]: drafts to accept in place of what the tokens say.
        """
        view = self._views
        rows, tokens = plan.num_rows, plan.num_query_tokens
        query = plan.query_tokens
        starts = np.cumsum(query) - query
        owner = np.repeat(np.arange(rows), query)
        view["token_row"][:tokens] = owner
        view["token_row"][tokens:] = -1
        draft, verify = plan.modes == Mode.DRAFT, plan.modes == Mode.VERIFY
        prefill = ~(draft | verify)
        if prefill.any():
            given = prefill[owner]
            at = owner[given]
            positions = plan.start[at] + np.flatnonzero(given) - starts[at]
            view["token_ids"][:tokens][given] = sequences.tokens[plan.slots[at], positions]
        sparse = plan.sparse
        finds = plan.samples & ~draft
        sampled = np.where(verify, query, plan.samples)
        sample_start = np.cumsum(sampled) - sampled
        chosen = finds & selects
        columns = {
            "row_slot": plan.slots,
            "q_start": starts,
            "q_len": query,
            "first": np.where(plan.slack > 0, -1, plan.start),
            "pending_at": np.where(draft, plan.drafted, np.where(verify, 0, -1)),
            "drafting": draft,
            "sparse": sparse,
            "drafted": np.where(verify, plan.drafted, 0),
            "sample_start": sample_start,
            "finds": finds,
            "forced": -1 if forced is None else forced,
            "mass_first": np.where(chosen, np.where(verify, 0, query - 1), -1),
            "mass_last": np.where(chosen & verify & (query > 1), query - 1, -1),
            "mass_draft": np.where(sparse, 0, -1),
        }
        for name in ROW_FIELDS:
            view[name][:rows] = columns[name]
            view[name][rows:] = -1 if name.startswith("mass") else 0
        count = int(sampled.sum())
        source = np.repeat(np.arange(rows), sampled)
        # the last `sampled` query tokens of a row are those that yield tokens
        view["logit_row"][:count] = (starts + query - sampled)[source] + np.arange(count) - sample_start[source]
        view["sample_slot"][:count] = plan.slots[source]
        for name in SAMPLE_FIELDS:
            view[name][count:] = 0
        new = len(plan.new_pages)
        for column, (name, padding) in enumerate(zip(PAGE_FIELDS, (spare_slot, 0, 0), strict=True)):
            view[name][:new] = plan.new_pages[:, column]
            view[name][new:] = padding


def count_samples(plan: StepPlan) -> int:
    """Tokens that a step samples: one a draft, drafts + 1 a verification, one a finished prefill."""
    verify = plan.modes == Mode.VERIFY
    return int(np.where(verify, plan.query_tokens, plan.samples).sum())


def host_buffer(size: int, pinned: bool) -> tuple[Tensor, np.ndarray]:
    """A host tensor (page-locked where a GPU reads it) and the numpy view of its memory."""
    tensor = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
    return tensor, tensor.numpy()
