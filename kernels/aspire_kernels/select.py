"""Choice of the KV pages that drafting reads: sinks and the newest pages always, the rest by page mass.

Floor: the mass of each candidate page is read once (4 bytes a page), the list written once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.errors import UsageError
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
