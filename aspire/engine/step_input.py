"""A `StepPlan` as the flat int32 arrays of a forward: one host buffer, one upload, fixed offsets for CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from aspire.engine.sequences import Sequences
from aspire.scheduler import StepPlan
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
_ROW_PADDING = np.array([[-1 if name.startswith("mass") else 0] for name in ROW_FIELDS], dtype=np.int32)
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
        first = len(TOKEN_FIELDS) * shape.tokens
        self._rows = buffer[first : first + len(ROW_FIELDS) * shape.rows].reshape(len(ROW_FIELDS), shape.rows)
        # tokens, rows, samples, pages that are not known to be padding
        self._filled = (shape.tokens, shape.rows, shape.samples, shape.pages)

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
        view, rows, tokens, count = self._views, plan.num_rows, plan.num_query_tokens, plan.num_samples
        new = len(plan.new_pages)
        self._clear_padding(tokens, rows, count, new, spare_slot)
        query, slots = plan.query_tokens, plan.slots
        if plan.single:
            starts = owner = np.arange(rows)
            view["logit_row"][:count] = owner
            view["sample_slot"][:count] = slots
        else:
            starts = np.cumsum(query) - query
            owner = np.repeat(np.arange(rows), query)
            if count == tokens:
                view["logit_row"][:count] = np.arange(count)
                view["sample_slot"][:count] = slots[owner]
            else:
                source = np.repeat(np.arange(rows), plan.sampled)
                # the last `sampled` query tokens of a row are those that yield tokens
                last = starts + query - plan.sampled - plan.sample_start
                view["logit_row"][:count] = last[source] + np.arange(count)
                view["sample_slot"][:count] = slots[source]
        view["token_row"][:tokens] = owner
        if plan.num_prefills:
            given = plan.prefill[owner]
            at = owner[given]
            positions = plan.start[at] + np.flatnonzero(given) - starts[at]
            view["token_ids"][:tokens][given] = sequences.tokens[slots[at], positions]
        view["row_slot"][:rows] = slots
        view["q_start"][:rows] = starts
        view["q_len"][:rows] = query
        view["first"][:rows] = plan.start
        if np.count_nonzero(plan.slack):
            view["first"][:rows][plan.slack > 0] = -1
        view["sample_start"][:rows] = plan.sample_start
        view["finds"][:rows] = plan.finds
        view["forced"][:rows] = -1 if forced is None else forced
        self._fill_modes(plan, selects)
        if new:
            for column, name in enumerate(PAGE_FIELDS):
                view[name][:new] = plan.new_pages[:, column]

    def _fill_modes(self, plan: StepPlan, selects: bool) -> None:
        """The fields of rows that depend on whether they draft, verify or prefill."""
        view, rows = self._views, plan.num_rows
        view["sparse"][:rows] = plan.sparse
        if plan.num_drafts == rows:
            view["pending_at"][:rows] = plan.drafted
            view["drafting"][:rows] = 1
            view["drafted"][:rows] = 0
            view["mass_first"][:rows] = view["mass_last"][:rows] = -1
            view["mass_draft"][:rows] = 0
            return
        draft, verify, query = plan.draft, plan.verify, plan.query_tokens
        pending = plan.pending
        view["drafted"][:rows] = (plan.drafted - pending) * verify if plan.num_prefills else plan.drafted - pending
        view["pending_at"][:rows] = np.where(draft | verify, pending, -1) if plan.num_prefills else pending
        view["drafting"][:rows] = draft
        if not selects:
            view["mass_first"][:rows] = view["mass_last"][:rows] = -1
        elif plan.num_prefills:
            view["mass_first"][:rows] = np.where(plan.finds, np.where(verify, 0, query - 1), -1)
            view["mass_last"][:rows] = np.where(verify & (query > 1), query - 1, -1)
        else:
            view["mass_first"][:rows] = plan.finds
            view["mass_first"][:rows] -= 1
            view["mass_last"][:rows] = np.where(query > 1, query - 1, -1)
        view["mass_draft"][:rows] = plan.sparse
        view["mass_draft"][:rows] -= 1

    def _clear_padding(self, tokens: int, rows: int, samples: int, pages: int, spare_slot: int) -> None:
        """Make padding of what the fill before wrote beyond these sizes."""
        view, (old_tokens, old_rows, old_samples, old_pages) = self._views, self._filled
        if tokens < old_tokens:
            view["token_row"][tokens:old_tokens] = -1
        if rows < old_rows:
            self._rows[:, rows:old_rows] = _ROW_PADDING
        if samples < old_samples:
            for name in SAMPLE_FIELDS:
                view[name][samples:old_samples] = 0
        if pages < old_pages:
            for name, padding in zip(PAGE_FIELDS, (spare_slot, 0, 0), strict=True):
                view[name][pages:old_pages] = padding
        self._filled = (tokens, rows, samples, pages)


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy of ``values`` on ``device``. From page-locked memory: any other would wait for all that runs there."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def host_buffer(size: int, pinned: bool) -> tuple[Tensor, np.ndarray]:
    """A host tensor (page-locked where a GPU reads it) and the numpy view of its memory."""
    tensor = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
    return tensor, tensor.numpy()
