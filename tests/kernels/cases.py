"""Random forwards for the attention tests: every page that must not be read is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from aspire_kernels import PAGE_SIZE, AttentionBatch
from aspire_kernels._triton import INTERPRETED

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="the interpreter runs where there is no GPU")),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
    ),
]
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
"""Largest allowed ||out - ref|| / ||ref|| by type of the operands."""


@dataclass
class Row:
    """One row of a forward: query tokens (0 = padded), KV tokens, selected pages (None = full row), recent pages."""

    q_len: int
    kv_len: int
    selected: int | None = None
    recent: int = 3


@dataclass
class Case:
    """Inputs of one paged attention call."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: AttentionBatch

    @property
    def scale(self) -> float:
        """The usual softmax scale."""
        return float(self.q.shape[2]) ** -0.5

    def wide(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v in float32."""
        return self.q.float(), self.k_cache.float(), self.v_cache.float()


def make_case(
    rows: list[Row],
    *,
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Random q, K and V on ``device``; page 0, unused pages and the tail of each last page are NaN."""
    rng = torch.Generator().manual_seed(seed)
    slots, live = len(rows) + 2, [row for row in rows if row.q_len]
    max_pages = max(-(-row.kv_len // PAGE_SIZE) for row in live) + 1
    pages = slots * max_pages + 1
    shape = (pages, kv_heads, PAGE_SIZE, head_dim)
    k, v = torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)
    table = (torch.randperm(pages - 1, generator=rng) + 1).view(slots, max_pages).int()
    slot_of = torch.randperm(slots, generator=rng)[: len(rows)].int()
    width = max([1] + [row.selected or 0 for row in rows])
    lists = torch.zeros(slots, width, dtype=torch.int32)
    count, tail = torch.zeros(slots, dtype=torch.int32), torch.zeros(slots, dtype=torch.int32)
    readable = torch.zeros(pages, PAGE_SIZE, dtype=torch.bool)
    starts, tokens = [], 0
    for row, slot in zip(rows, slot_of.tolist(), strict=True):
        starts.append(tokens)
        tokens += row.q_len
        if row.q_len == 0:
            continue
        used = -(-row.kv_len // PAGE_SIZE)
        first = 0
        if row.selected is not None:
            first = max(0, used - row.recent)
            picked = torch.randperm(first, generator=rng)[: row.selected]
            count[slot], tail[slot] = len(picked), first
            lists[slot, : len(picked)] = table[slot, picked]
            readable[lists[slot, : len(picked)].long()] = True
        readable[table[slot, first:used].long()] = True
        if row.kv_len % PAGE_SIZE:
            readable[int(table[slot, used - 1]), row.kv_len % PAGE_SIZE :] = False
    for cache in (k, v):
        cache.masked_fill_(~readable[:, None, :, None], float("nan"))
    full = [row.kv_len for row in live if row.selected is None]
    sparse = [row for row in live if row.selected is not None]
    batch = AttentionBatch(
        row_slot=slot_of.to(device),
        q_start=_int32(starts, device),
        q_len=_int32([row.q_len for row in rows], device),
        kv_len=_int32([row.kv_len for row in rows], device),
        sparse=_int32([int(row.selected is not None) for row in rows], device),
        block_table=table.to(device),
        sel_pages=lists.to(device),
        sel_count=count.to(device),
        tail_page=tail.to(device),
        max_q_len=max(row.q_len for row in rows),
        max_full_kv=max(full, default=0),
        max_sparse_kv=max([(row.selected or 0) + row.recent for row in sparse], default=0) * PAGE_SIZE,
    )
    q = torch.randn((tokens, kv_heads * group, head_dim), generator=rng)
    return Case(q.to(device, dtype), k.to(device, dtype), v.to(device, dtype), batch)


def _int32(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def relative_error(out: Tensor, reference: Tensor) -> float:
    """``||out - ref|| / ||ref||`` in float64; NaN if either holds one."""
    out, reference = out.double(), reference.double()
    return float((out - reference).norm() / reference.norm())
