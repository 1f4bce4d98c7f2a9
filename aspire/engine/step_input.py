"""A `StepPlan` as the flat int32 arrays of a forward: one host buffer, one upload, fixed offsets for CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aspire.engine.sequences import Sequences
from aspire.scheduler import PAGE_TOKENS, Mode, StepPlan
from aspire.scheduler.pages import PageTable

TOKEN_FIELDS = ("input_ids", "positions", "slot_mapping")
ROW_FIELDS = (
    "row_slot",
    "q_start",
    "q_len",
    "kv_len",
    "sparse",
    "drafted",
    "sample_start",  # index of the row's first sampled token
    "accept_base",  # KV tokens before acceptance: the new length is accept_base + accepted + 1
    "finds",  # 1 = the row ends with target tokens (verification, last prefill chunk)
    "mass_first",  # query offsets whose page mass is taken at verification; -1 = none
    "mass_last",
    "mass_draft",  # the same in layers that drafting rows read in full
)
SAMPLE_FIELDS = ("logit_row", "sample_slot", "sample_position")
SLOT_FIELDS = ("sel_count", "tail_page")
PAGE_FIELDS = ("page_slot", "page_logical", "page_physical")  # new block-table entries; padded ones go to a spare row


@dataclass(frozen=True)
class Shape:
    """Sizes of a forward, padding included."""

    tokens: int
    rows: int
    samples: int
    slots: int
    pages: int  # new block-table entries

    @property
    def size(self) -> int:
        """int32 elements of the buffer."""
        return (
            len(TOKEN_FIELDS) * self.tokens
            + len(ROW_FIELDS) * self.rows
            + len(SAMPLE_FIELDS) * self.samples
            + len(SLOT_FIELDS) * self.slots
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
            (SLOT_FIELDS, shape.slots),
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

    def fill(self, plan: StepPlan, sequences: Sequences, pages: PageTable, selects: bool) -> None:
        """Write ``plan`` into the (host) buffer. Padded tokens go to the trash page, padded rows have no query."""
        view = self._views
        rows, tokens = plan.num_rows, plan.num_query_tokens
        query = plan.query_tokens
        starts = np.cumsum(query) - query
        owner = np.repeat(np.arange(rows), query)
        positions = plan.start[owner] + np.arange(tokens) - starts[owner]
        slots = plan.slots[owner]
        view["input_ids"][:tokens] = sequences.tokens[slots, positions]
        view["positions"][:tokens] = positions
        view["slot_mapping"][:tokens] = (
            pages.table[slots, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        )
        for name in TOKEN_FIELDS:
            view[name][tokens:] = 0
        draft, verify = plan.modes == Mode.DRAFT, plan.modes == Mode.VERIFY
        finds = plan.samples & ~draft
        sampled = np.where(draft, 1, np.where(verify, query, plan.samples))
        sample_start = np.cumsum(sampled) - sampled
        chosen = finds & selects
        fields = {
            "row_slot": plan.slots,
            "q_start": starts,
            "q_len": query,
            "kv_len": plan.start + query,
            "sparse": draft,
            "drafted": np.where(verify, plan.drafted, 0),
            "sample_start": sample_start,
            "accept_base": plan.start + query - 1 - np.where(verify, plan.drafted, 0),
            "finds": finds,
            "mass_first": np.where(chosen, np.where(verify, 0, query - 1), -1),
            "mass_last": np.where(chosen & verify & (query > 1), query - 1, -1),
            "mass_draft": np.where(draft, 0, -1),
        }
        for name in ROW_FIELDS:
            view[name][:rows] = fields[name]
            view[name][rows:] = -1 if name.startswith("mass") else 0
        count = int(sampled.sum())
        source = np.repeat(np.arange(rows), sampled)
        # the last `sampled` query tokens of a row are those that yield tokens
        logit_row = (starts + query - sampled)[source] + np.arange(count) - sample_start[source]
        view["logit_row"][:count] = logit_row
        view["sample_slot"][:count] = plan.slots[source]
        view["sample_position"][:count] = positions[logit_row] + 1
        for name in SAMPLE_FIELDS:
            view[name][count:] = 0
        new = len(plan.new_pages)
        for column, (name, padding) in enumerate(zip(PAGE_FIELDS, (self.shape.slots, 0, 0), strict=True)):
            view[name][:new] = plan.new_pages[:, column]
            view[name][new:] = padding
        view["sel_count"][plan.slots] = plan.sel_count
        view["tail_page"][plan.slots] = plan.tail_page


def count_samples(plan: StepPlan) -> int:
    """Tokens that a step samples: one a draft, drafts + 1 a verification, one a finished prefill."""
    verify = plan.modes == Mode.VERIFY
    return int(np.where(verify, plan.query_tokens, plan.samples).sum())


def host_buffer(size: int, pinned: bool) -> tuple[Tensor, np.ndarray]:
    """A host tensor (page-locked where a GPU reads it) and the numpy view of its memory."""
    tensor = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
    return tensor, tensor.numpy()
