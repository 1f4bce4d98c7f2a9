"""Choice of the KV pages that drafting reads: sinks and the newest pages always, the rest by page mass.

Floor: the mass of each candidate page is read once (4 bytes a page), the list written once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.errors import UsageError
from aspire_kernels import counters
from aspire_kernels._triton import LAUNCH, next_power_of_2, tl, triton, wait_for_inputs
from aspire_kernels.attention.interface import PAGE_SIZE


@dataclass(frozen=True)
class PageBudget:
    """How many pages a drafting row may read: ``max(min_pages, ceil(ratio * pages))``, counting recent, sink and
    chosen pages."""

    ratio: float = 0.07
    min_pages: int = 32
    sinks: int = 1
    recent: int = 8

    def __post_init__(self) -> None:
        """Check the ranges; raises `UsageError`."""
        if not 0.0 <= self.ratio <= 1.0:
            raise UsageError(f"budget ratio is {self.ratio}; it must lie in 0..1")
        if self.min_pages < 1 or self.sinks < 0 or self.recent < 1:
            raise UsageError(
                "budget needs min_pages >= 1, sinks >= 0, recent >= 1; "
                f"given {self.min_pages}, {self.sinks}, {self.recent}"
            )

    def pages(self, kv_pages: int) -> int:
        """Pages read of a context of ``kv_pages`` pages (never more than it has)."""
        # the same float32 product as on the device, so that host and device never disagree by one page
        wanted = int(torch.ceil(torch.tensor(self.ratio, dtype=torch.float32) * kv_pages))
        return min(kv_pages, max(self.min_pages, wanted, self.recent))

    def list_width(self, max_kv_pages: int) -> int:
        """Entries K that a page list needs for contexts of up to ``max_kv_pages`` pages."""
        return max(1, self.pages(max_kv_pages) - min(self.recent, max_kv_pages))


def select_pages_reference(
    page_mass: Tensor,  # [layers, rows, max_pages] (or [rows, max_pages]) float32, see `paged_attention`
    row_slot: Tensor,  # [rows] int32
    kv_len: Tensor,  # [rows] int32 tokens of the context, pending and drafted ones included
    chosen: Tensor,  # [rows] int32, 0 = leave this row's list as it is
    block_table: Tensor,  # [max_slots, max_pages] int32
    sel_pages: Tensor,  # [layers, max_slots, K] (or [max_slots, K]) int32, written
    sel_count: Tensor,  # [max_slots] int32, written
    tail_page: Tensor,  # [max_slots] int32, written
    budget: PageBudget,
) -> None:
    """Write the page lists of the chosen rows, in place.

    The tail is the newest ``recent`` pages, the page of the newest token included. Before it: the first ``sinks``
    pages, then the pages of largest mass (ties: the older page) until the budget is used or K entries are. Listed in
    ascending logical order. Short contexts are covered whole, so that sparse attention equals full attention there.
    Entries past ``sel_count`` are left undefined.
    """
    mass = page_mass if page_mass.dim() == 3 else page_mass[None]
    lists = sel_pages if sel_pages.dim() == 3 else sel_pages[None]
    for row in range(row_slot.shape[0]):
        if int(chosen[row]) == 0 or int(kv_len[row]) <= 0:
            continue
        slot, pages = int(row_slot[row]), -(-int(kv_len[row]) // PAGE_SIZE)
        tail = max(0, pages - budget.recent)
        count = min(tail, max(0, budget.pages(pages) - (pages - tail)), lists.shape[2])
        tail_page[slot], sel_count[slot] = tail, count
        if count == 0:
            continue
        score = mass[:, row, :tail].clone()
        score[:, : budget.sinks] = float("inf")
        best = torch.sort(score, dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
        lists[:, slot, :count] = block_table[slot, best]


@triton.jit
def _select_kernel(
    page_mass,
    row_slot,
    kv_len,
    chosen,
    block_table,
    sel_pages,
    sel_count,
    tail_page,
    max_pages,
    width,
    stride_mass_layer,
    stride_mass_row,
    stride_table,
    stride_list_layer,
    stride_list,
    ratio,
    min_pages,
    sinks,
    recent,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (rows, layers). The n-th largest mass is found bit by bit: the bits of non-negative floats sort as
    integers."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    tokens = tl.load(kv_len + row)
    if tl.load(chosen + row) == 0:
        return
    if tokens <= 0:
        return
    slot = tl.load(row_slot + row).to(tl.int64)
    pages = (tokens + PAGE - 1) // PAGE
    tail = tl.maximum(pages - recent, 0)
    wanted = tl.ceil(ratio * pages.to(tl.float32)).to(tl.int32)
    budget = tl.minimum(pages, tl.maximum(tl.maximum(min_pages, wanted), recent))
    count = tl.minimum(tl.minimum(tail, tl.maximum(budget - (pages - tail), 0)), width)
    if layer == 0:
        tl.store(tail_page + slot, tail)
        tl.store(sel_count + slot, count)
    if count > 0:
        p = tl.arange(0, BLOCK)
        mass_at = page_mass + layer * stride_mass_layer + row.to(tl.int64) * stride_mass_row + p
        mass = tl.load(mass_at, mask=p < tl.minimum(tail, max_pages), other=0.0)
        key = mass.to(tl.int32, bitcast=True)
        key = tl.where(p < sinks, 0x7FFFFFFF, key)
        key = tl.where(p < tail, key, -1)
        limit = 0
        for step in range(31):
            trial = limit | (1 << (30 - step))
            enough = tl.sum((key >= trial).to(tl.int32), 0) >= count
            limit = tl.where(enough, trial, limit)
        above = key > limit
        equal = key == limit
        rank = tl.cumsum(equal.to(tl.int32), 0)
        taken = above | (equal & (rank <= count - tl.sum(above.to(tl.int32), 0)))
        place = tl.cumsum(taken.to(tl.int32), 0) - 1
        physical = tl.load(block_table + slot * stride_table + p, mask=taken, other=0)
        tl.store(sel_pages + layer * stride_list_layer + slot * stride_list + place, physical, mask=taken)


def select_pages(
    page_mass: Tensor,
    row_slot: Tensor,
    kv_len: Tensor,
    chosen: Tensor,
    block_table: Tensor,
    sel_pages: Tensor,
    sel_count: Tensor,
    tail_page: Tensor,
    budget: PageBudget,
) -> None:
    """Kernel form of `select_pages_reference`: one launch for all layers and rows."""
    mass = page_mass if page_mass.dim() == 3 else page_mass[None]
    lists = sel_pages if sel_pages.dim() == 3 else sel_pages[None]
    block = max(16, next_power_of_2(min(block_table.shape[1], mass.shape[2])))
    _select_kernel[(row_slot.shape[0], mass.shape[0])](
        mass,
        row_slot,
        kv_len,
        chosen,
        block_table,
        lists,
        sel_count,
        tail_page,
        mass.shape[2],
        lists.shape[2],
        mass.stride(0),
        mass.stride(1),
        block_table.stride(0),
        lists.stride(0),
        lists.stride(1),
        budget.ratio,
        budget.min_pages,
        budget.sinks,
        budget.recent,
        PAGE=PAGE_SIZE,
        BLOCK=block,
        num_warps=min(16, max(1, block // 256)),
        **LAUNCH,
    )
    counters.count("select.triton")
