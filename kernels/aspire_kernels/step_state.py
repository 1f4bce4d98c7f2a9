"""What the device knows of every slot between two steps: where the request stands, its newest token and drafts, the
size of its page list. So a step can be launched before the host has seen the outcome of the one before.

`resolve` opens a step: tokens and positions of its rows. `advance` closes it: acceptance (the longest prefix of drafts
that equals the target's tokens, then the bonus token) and the state that it leaves. A few KB each; launch-bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_kernels import counters
from aspire_kernels._triton import LAUNCH, cdiv, next_power_of_2, tl, triton, wait_for_inputs
from aspire_kernels.attention.interface import MAX_VERIFY_QUERIES, PAGE_SIZE
from aspire_kernels.select import PageBudget


@dataclass(frozen=True)
class SlotState:
    """State of ``max_slots`` slots, int32, written by `advance`."""

    base: Tensor  # [max_slots] tokens with full KV: the position of the first pending token
    pending: Tensor  # [max_slots, 17] newest token, then the drafts
    sel_count: Tensor  # [max_slots] pages in the list
    tail_page: Tensor  # [max_slots] first page of the tail that a drafting row reads besides

    @classmethod
    def empty(cls, max_slots: int, device: torch.device | str) -> SlotState:
        """Nothing known of any slot."""
        slots = torch.zeros((3, max_slots), dtype=torch.int32, device=device)
        pending = torch.zeros((max_slots, MAX_VERIFY_QUERIES), dtype=torch.int32, device=device)
        return cls(slots[0], pending, slots[1], slots[2])


@dataclass(frozen=True)
class StepRows:
    """Rows of a step as the host gives them, int32 [rows]; padded rows are all zeros, padded tokens have row -1."""

    token_ids: Tensor  # [tokens] of rows whose tokens the host gives
    token_row: Tensor  # [tokens]
    row_slot: Tensor
    q_start: Tensor
    q_len: Tensor
    first: Tensor  # position of the first query token; -1 = the slot's `base`
    pending_at: Tensor  # entry of `pending` that is the first query token; -1 = the host gives the tokens
    drafting: Tensor  # 1 = the row adds a draft
    drafted: Tensor  # drafts to verify
    sample_start: Tensor  # index of the row's first sampled token
    finds: Tensor  # 1 = the row ends with target tokens (verification, last prefill chunk)
    forced: Tensor  # drafts to accept whatever the tokens are (synthetic acceptance); -1 = compare
    logit_row: Tensor  # [samples] the query token behind each sampled token


@dataclass(frozen=True)
class Resolved:
    """Tokens and places of a step, int32."""

    input_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slot_mapping: Tensor  # [tokens] place in the KV pool; padded tokens: 0, in the trash page
    kv_len: Tensor  # [rows] context, query tokens included
    accept_base: Tensor  # [rows] KV tokens before acceptance
    sample_position: Tensor  # [samples] position of the sampled token


def resolve_reference(rows: StepRows, state: SlotState, block_table: Tensor) -> Resolved:
    """Tokens and places of the step ``rows``; ``block_table`` [max_slots, max_pages] int32."""
    slot = rows.row_slot.long()
    start = torch.where(rows.first >= 0, rows.first, state.base[slot])
    real = rows.token_row >= 0
    row = rows.token_row.clamp(min=0).long()
    offset = torch.arange(len(row), device=row.device, dtype=torch.int32) - rows.q_start[row]
    position = torch.where(real, start[row] + offset, 0)
    held = rows.pending_at[row]
    entry = (held + offset).clamp(0, state.pending.shape[1] - 1).long()
    ids = torch.where(held >= 0, state.pending[slot[row], entry], rows.token_ids)
    page = block_table[slot[row], (position // PAGE_SIZE).long()]
    place = page * PAGE_SIZE + position % PAGE_SIZE
    kv_len = start + rows.q_len
    return Resolved(
        input_ids=torch.where(real, ids, 0),
        positions=position,
        slot_mapping=torch.where(real, place, 0),
        kv_len=torch.where(rows.q_len > 0, kv_len, 0),
        accept_base=kv_len - 1 - rows.drafted,
        sample_position=position[rows.logit_row.long()] + 1,
    )


# sizes differ from step to step; a kernel for each that is 1 or a multiple of 16 would be compiled for nothing
@triton.jit(do_not_specialize=["tokens", "rows", "samples", "token_blocks", "row_blocks"])
def _resolve_kernel(
    token_ids, token_row, row_slot, q_start, q_len, first, pending_at, drafted, logit_row,
    base, pending, block_table,
    input_ids, positions, slot_mapping, kv_len, accept_base, sample_position,
    tokens, rows, samples, token_blocks, row_blocks, width, stride_table,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of tokens, then of rows, then of samples."""
    wait_for_inputs(PDL)
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if block < token_blocks:
        t = block * BLOCK + lane
        inside = t < tokens
        row = tl.load(token_row + t, mask=inside, other=-1)
        real = row >= 0
        slot = tl.load(row_slot + row, mask=real, other=0)
        start = tl.load(first + row, mask=real, other=0)
        start = tl.where(start >= 0, start, tl.load(base + slot, mask=real, other=0))
        offset = t - tl.load(q_start + row, mask=real, other=0)
        position = tl.where(real, start + offset, 0)
        held = tl.load(pending_at + row, mask=real, other=-1)
        own = tl.load(pending + slot * width + tl.minimum(held + offset, width - 1), mask=real & (held >= 0), other=0)
        given = tl.load(token_ids + t, mask=real & (held < 0), other=0)
        page = tl.load(block_table + slot.to(tl.int64) * stride_table + position // PAGE, mask=real, other=0)
        tl.store(input_ids + t, tl.where(held >= 0, own, given), mask=inside)
        tl.store(positions + t, position, mask=inside)
        tl.store(slot_mapping + t, tl.where(real, page * PAGE + position % PAGE, 0), mask=inside)
    elif block < token_blocks + row_blocks:
        r = (block - token_blocks) * BLOCK + lane
        inside = r < rows
        slot = tl.load(row_slot + r, mask=inside, other=0)
        start = tl.load(first + r, mask=inside, other=0)
        start = tl.where(start >= 0, start, tl.load(base + slot, mask=inside, other=0))
        queries = tl.load(q_len + r, mask=inside, other=0)
        tl.store(kv_len + r, tl.where(queries > 0, start + queries, 0), mask=inside)
        before = start + queries - 1 - tl.load(drafted + r, mask=inside, other=0)
        tl.store(accept_base + r, before, mask=inside)
    else:
        s = (block - token_blocks - row_blocks) * BLOCK + lane
        inside = s < samples
        t = tl.load(logit_row + s, mask=inside, other=0)
        row = tl.load(token_row + t, mask=inside, other=-1)
        real = row >= 0
        slot = tl.load(row_slot + row, mask=real, other=0)
        start = tl.load(first + row, mask=real, other=0)
        start = tl.where(start >= 0, start, tl.load(base + slot, mask=real, other=0))
        position = start + t - tl.load(q_start + row, mask=real, other=0)
        tl.store(sample_position + s, tl.where(real, position, 0) + 1, mask=inside)


def resolve(rows: StepRows, state: SlotState, block_table: Tensor) -> Resolved:
    """Kernel form of `resolve_reference`: one launch."""
    tokens, count, samples = len(rows.token_row), len(rows.row_slot), len(rows.logit_row)
    out = [
        torch.empty(n, dtype=torch.int32, device=rows.row_slot.device) for n in (*[tokens] * 3, *[count] * 2, samples)
    ]
    block = 128
    token_blocks, row_blocks = cdiv(tokens, block), cdiv(count, block)
    _resolve_kernel[(token_blocks + row_blocks + cdiv(samples, block),)](
        rows.token_ids,
        rows.token_row,
        rows.row_slot,
        rows.q_start,
        rows.q_len,
        rows.first,
        rows.pending_at,
        rows.drafted,
        rows.logit_row,
        state.base,
        state.pending,
        block_table,
        *out,
        tokens,
        count,
        samples,
        token_blocks,
        row_blocks,
        state.pending.shape[1],
        block_table.stride(0),
        PAGE=PAGE_SIZE,
        BLOCK=block,
        num_warps=4,
        **LAUNCH,
    )
    counters.count("resolve.triton")
    return Resolved(*out)


def advance_reference(
    rows: StepRows,
    at: Resolved,
    sampled: Tensor,  # [samples] int32
    state: SlotState,  # written
    budget: PageBudget,
    window: bool,
) -> tuple[Tensor, Tensor]:
    """``(accepted, length)`` [rows]: accepted drafts, and tokens with full KV after the step. Updates ``state``.

    Rows that find target tokens get the size of the page list that begins now (`PageBudget`; ``window``: the whole
    budget lies at the end of the context, but for the sinks).
    """
    width = state.pending.shape[1] - 1
    steps = torch.arange(width, device=sampled.device)
    draft_at = (rows.q_start[:, None] + 1 + steps).clamp(max=len(at.input_ids) - 1).long()
    target_at = (rows.sample_start[:, None] + steps).clamp(max=len(sampled) - 1).long()
    equal = (at.input_ids[draft_at] == sampled[target_at]) & (steps < rows.drafted[:, None])
    accepted = equal.int().cumprod(dim=1).sum(dim=1)
    accepted = torch.where(rows.forced >= 0, torch.minimum(rows.forced, rows.drafted), accepted).int()
    finds = rows.finds > 0
    accepted = accepted * finds
    length = (at.accept_base + torch.where(finds, accepted + 1, 0)).int()
    last = sampled[(rows.sample_start + accepted).clamp(max=len(sampled) - 1).long()]
    found = rows.row_slot[finds].long()
    state.base[found] = length[finds]
    state.pending[found, 0] = last[finds]
    drafts = rows.drafting > 0
    place = (rows.pending_at[drafts] + 1).long()
    state.pending[rows.row_slot[drafts].long(), place] = last[drafts]
    pages = length[finds] // PAGE_SIZE + 1
    wanted = torch.ceil(torch.tensor(budget.ratio, dtype=torch.float32) * pages).int()
    reads = torch.minimum(pages, wanted.clamp(min=max(budget.min_pages, budget.recent)))
    if window:
        tail = torch.maximum(pages - (reads - budget.sinks).clamp(min=1), (pages - 1).clamp(max=budget.sinks))
        listed = tail.clamp(max=budget.sinks)
    else:
        tail = (pages - budget.recent).clamp(min=0)
        listed = torch.minimum(tail, (reads - (pages - tail)).clamp(min=0))
    state.tail_page[found], state.sel_count[found] = tail.int(), listed.int()
    return accepted, length


@triton.jit(do_not_specialize=["rows", "least", "sinks", "recent"])
def _advance_kernel(
    row_slot, q_start, pending_at, drafting, drafted, sample_start, finds, forced,
    input_ids, accept_base, sampled,
    base, pending, sel_count, tail_page, accepted_out, length_out,
    rows, width, ratio, least, sinks, recent,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < rows
    place = tl.arange(0, BLOCK_W)
    slot = tl.load(row_slot + row, mask=real, other=0)
    count = tl.load(drafted + row, mask=real, other=0)
    found = tl.load(finds + row, mask=real, other=0) > 0
    first = tl.load(sample_start + row, mask=real, other=0)
    draft_at = tl.load(q_start + row, mask=real, other=0) + 1
    inside = real[:, None] & (place[None, :] < count[:, None])
    guess = tl.load(input_ids + draft_at[:, None] + place[None, :], mask=inside, other=-1)
    truth = tl.load(sampled + first[:, None] + place[None, :], mask=inside, other=-2)
    accepted = tl.min(tl.where(guess == truth, BLOCK_W, place[None, :] + tl.zeros_like(guess)), 1)
    told = tl.load(forced + row, mask=real, other=-1)
    accepted = tl.where(told >= 0, tl.minimum(told, count), accepted)
    accepted = tl.where(found, accepted, 0)
    length = tl.load(accept_base + row, mask=real, other=0) + tl.where(found, accepted + 1, 0)
    tl.store(accepted_out + row, accepted, mask=real)
    tl.store(length_out + row, length, mask=real)

    drafts = tl.load(drafting + row, mask=real, other=0) > 0
    last = tl.load(sampled + first + accepted, mask=real & (found | drafts), other=0)
    entry = tl.where(drafts, tl.load(pending_at + row, mask=real, other=0) + 1, 0)
    tl.store(pending + slot * width + entry, last, mask=real & (found | drafts))
    tl.store(base + slot, length, mask=real & found)
    pages = length // PAGE + 1
    wanted = tl.ceil(ratio * pages.to(tl.float32)).to(tl.int32)
    reads = tl.minimum(pages, tl.maximum(wanted, least))
    if WINDOW:
        tail = tl.maximum(pages - tl.maximum(reads - sinks, 1), tl.minimum(sinks, pages - 1))
        listed = tl.minimum(sinks, tail)
    else:
        tail = tl.maximum(pages - recent, 0)
        listed = tl.minimum(tail, tl.maximum(reads - (pages - tail), 0))
    tl.store(tail_page + slot, tail, mask=real & found)
    tl.store(sel_count + slot, listed, mask=real & found)


def advance(
    rows: StepRows, at: Resolved, sampled: Tensor, state: SlotState, budget: PageBudget, window: bool
) -> tuple[Tensor, Tensor]:
    """Kernel form of `advance_reference`: one launch."""
    count = len(rows.row_slot)
    accepted, length = torch.empty((2, count), dtype=torch.int32, device=sampled.device)
    width = state.pending.shape[1]
    block_r = 16
    _advance_kernel[(cdiv(count, block_r),)](
        rows.row_slot,
        rows.q_start,
        rows.pending_at,
        rows.drafting,
        rows.drafted,
        rows.sample_start,
        rows.finds,
        rows.forced,
        at.input_ids,
        at.accept_base,
        sampled,
        state.base,
        state.pending,
        state.sel_count,
        state.tail_page,
        accepted,
        length,
        count,
        width,
        budget.ratio,
        max(budget.min_pages, budget.recent),
        budget.sinks,
        budget.recent,
        WINDOW=window,
        PAGE=PAGE_SIZE,
        BLOCK_R=block_r,
        BLOCK_W=next_power_of_2(width),
        num_warps=1,
        **LAUNCH,
    )
    counters.count("advance.triton")
    return accepted, length
