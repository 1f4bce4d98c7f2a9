"""What one forward asks of attention: rows of query tokens, and which KV pages each row reads.

A *row* is a request's share of the forward: ``q_len`` query tokens that follow each other in the sequence. A full row
reads every KV token up to its own position (prefill, autoregressive decode, verification); a sparse row has one query
token and reads a list of pages and then a contiguous tail.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aspire.errors import UsageError

PAGE_SIZE = 16
"""KV tokens of a page. Page 0 is the trash page: padded tokens write there and no live row lists it."""

MAX_VERIFY_QUERIES = 17
"""Largest ``q_len`` of a full row that is treated as decode or verification; longer rows are prefill chunks."""


@dataclass
class AttentionBatch:
    """Rows of one forward. All tensors int32 on one device, of fixed shape, so that a CUDA graph can hold them.

    Sparse rows read ``sel_pages[slot, :sel_count[slot]]`` (whole pages) and then logical pages ``tail_page[slot]`` ..
    up to token ``kv_len - 1`` through the block table. Selected pages lie before the tail; order does not matter (RoPE
    is in K).

    The ``max_*`` fields are host-known bounds; they decide which launches happen and their shapes, so under a CUDA
    graph they are constants of the graph. A bound of 0 promises that no such row exists (that launch is left out).
    With ``mass_at_end`` the last query token of a prefill row may be computed apart from the others: these need no mass
    then, which makes their scores cost nearly half as much again.
    """

    row_slot: Tensor  # [rows] slot of each row (any valid slot for padded rows)
    q_start: Tensor  # [rows] first flattened query token
    q_len: Tensor  # [rows] query tokens; 0 = padded row, nothing is read or written
    kv_len: Tensor  # [rows] KV tokens that the LAST query token sees, itself included
    sparse: Tensor  # [rows] 1 = reads its page list (q_len == 1), 0 = reads everything
    block_table: Tensor  # [max_slots, max_pages] logical -> physical page
    sel_pages: Tensor  # [max_slots, K] physical pages, of the layer at hand
    sel_count: Tensor  # [max_slots]
    tail_page: Tensor  # [max_slots] first logical page of the tail
    max_q_len: int  # bound of q_len over all rows
    max_full_kv: int  # bound of kv_len over full rows; 0 = no full rows
    max_sparse_kv: int = 0  # bound of the tokens that a sparse row reads; 0 = no sparse rows
    max_verify_q: int | None = None  # bound of q_len over full rows that are not prefill; default min(max_q_len, 17)
    mass_at_end: bool = False  # promise: page mass of prefill rows, where any is taken, is that of their last token
    plan: dict[str, Any] = field(default_factory=dict, repr=False)  # work lists of a back end, see `Backend.prepare`

    def __post_init__(self) -> None:
        """Fill ``max_verify_q``; check shapes and types always, values only on the CPU (a GPU check would wait for the
        device)."""
        if self.max_verify_q is None:
            self.max_verify_q = min(self.max_q_len, MAX_VERIFY_QUERIES)
        rows, slots = self.row_slot.shape[0], self.block_table.shape[0]
        for name, shape in (
            ("row_slot", (rows,)),
            ("q_start", (rows,)),
            ("q_len", (rows,)),
            ("kv_len", (rows,)),
            ("sparse", (rows,)),
            ("block_table", (slots, self.block_table.shape[-1])),
            ("sel_pages", (slots, self.sel_pages.shape[-1])),
            ("sel_count", (slots,)),
            ("tail_page", (slots,)),
        ):
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != torch.int32:
                raise UsageError(
                    f"AttentionBatch.{name} is {tensor.dtype} {tuple(tensor.shape)}; "
                    f"it must be torch.int32 of shape {shape}"
                )
        if self.row_slot.device.type == "cpu":
            self._check_values()

    def with_selection(self, sel_pages: Tensor) -> AttentionBatch:
        """The same rows with another layer's page list (shares every other tensor and the plan); no checks, no
        copies."""
        other = object.__new__(AttentionBatch)
        other.__dict__.update(self.__dict__)
        other.sel_pages = sel_pages
        return other

    @property
    def rows(self) -> int:
        """Rows, padded ones included."""
        return self.row_slot.shape[0]

    @property
    def has_sparse(self) -> bool:
        """Whether sparse rows may exist."""
        return self.max_sparse_kv > 0

    @property
    def has_full(self) -> bool:
        """Whether full rows may exist."""
        return self.max_full_kv > 0

    @property
    def has_prefill(self) -> bool:
        """Whether full rows with more query tokens than ``max_verify_q`` may exist."""
        return self.has_full and self.max_q_len > int(self.max_verify_q or 0)

    def _check_values(self) -> None:
        live = self.q_len > 0
        if not bool(live.any()):
            return
        slot, q_len, kv_len, sparse = (t[live] for t in (self.row_slot, self.q_len, self.kv_len, self.sparse))
        bad = (slot < 0) | (slot >= self.block_table.shape[0])
        if bool(bad.any()):
            raise UsageError(
                f"row_slot {int(slot[bad][0])} is outside the {self.block_table.shape[0]} slots of the block table"
            )
        if bool((kv_len < q_len).any()):
            raise UsageError("kv_len must count the row's own query tokens (kv_len >= q_len)")
        if int(q_len.max()) > self.max_q_len:
            raise UsageError(f"q_len {int(q_len.max())} exceeds max_q_len {self.max_q_len}")
        if bool(((sparse == 1) & (q_len != 1)).any()):
            raise UsageError("a sparse row has exactly one query token")
        full = sparse == 0
        if bool(full.any()) and int(kv_len[full].max()) > self.max_full_kv:
            raise UsageError(f"kv_len {int(kv_len[full].max())} of a full row exceeds max_full_kv {self.max_full_kv}")
        if int(kv_len.max()) > self.block_table.shape[1] * PAGE_SIZE:
            raise UsageError(
                f"kv_len {int(kv_len.max())} exceeds the {self.block_table.shape[1]} pages of the block table"
            )
        if bool((~full).any()):
            count, tail = self.sel_count[slot.long()][~full], self.tail_page[slot.long()][~full]
            reads = count * PAGE_SIZE + kv_len[~full] - tail * PAGE_SIZE
            if int(reads.max()) > self.max_sparse_kv:
                raise UsageError(
                    f"a sparse row reads {int(reads.max())} tokens, more than max_sparse_kv {self.max_sparse_kv}"
                )
            if bool((kv_len[~full] <= tail * PAGE_SIZE).any()) or bool((count > self.sel_pages.shape[1]).any()):
                raise UsageError("a sparse row's tail must hold its newest token, and sel_count must fit sel_pages")
