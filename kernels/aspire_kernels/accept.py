"""Acceptance of drafts: the longest prefix equal to the target's tokens, then the bonus token."""

from __future__ import annotations

import torch
from torch import Tensor

from aspire_kernels import counters
from aspire_kernels._triton import LAUNCH, cdiv, next_power_of_2, tl, triton, wait_for_inputs


def accept_reference(
    draft: Tensor,  # [rows, width] int32 drafted tokens
    drafted: Tensor,  # [rows] int32 number of drafted tokens d
    target: Tensor,  # [rows, width + 1] int32 target tokens of the d + 1 query tokens
    computed: Tensor,  # [rows] int32 tokens with full KV before this step
    live: Tensor | None = None,  # [rows] int32, 0 = padded row: accepted 0, committed 0, length unchanged
) -> tuple[Tensor, Tensor, Tensor]:
    """``accepted [rows]`` a = longest prefix of drafts equal to targets, ``committed [rows, width + 1]`` (a drafts and
    the bonus token, then -1), ``new_computed [rows]`` = computed + a + 1."""
    width = draft.shape[1]
    index = torch.arange(width, device=draft.device)
    equal = (draft == target[:, :width]) & (index[None, :] < drafted[:, None])
    accepted = equal.to(torch.int32).cumprod(dim=1).sum(dim=1).to(torch.int32)
    taken = accepted + 1
    if live is not None:
        accepted, taken = accepted * (live > 0), taken * (live > 0)
    place = torch.arange(width + 1, device=draft.device)
    committed = torch.where(place[None, :] < taken[:, None], target, torch.full_like(target, -1))
    return accepted.to(torch.int32), committed, (computed + taken).to(torch.int32)


@triton.jit
def _accept_kernel(
    draft, drafted, target, computed, live, accepted_out, committed_out, computed_out, rows, width,
    HAS_LIVE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < rows
    place = tl.arange(0, BLOCK_W)
    count = tl.load(drafted + row, mask=real, other=0)
    inside = real[:, None] & (place < width)[None, :]
    guess = tl.load(draft + row[:, None] * width + place[None, :], mask=inside, other=-1)
    answers = real[:, None] & (place <= width)[None, :]
    truth = tl.load(target + row[:, None] * (width + 1) + place[None, :], mask=answers, other=-1)
    equal = (guess == truth) & (place[None, :] < count[:, None]) & (place < width)[None, :]
    accepted = tl.min(tl.where(equal, BLOCK_W, place[None, :] + tl.zeros_like(guess)), 1)
    taken = accepted + 1
    if HAS_LIVE:
        alive = tl.load(live + row, mask=real, other=0) > 0
        accepted = tl.where(alive, accepted, 0)
        taken = tl.where(alive, taken, 0)
    tl.store(accepted_out + row, accepted, mask=real)
    committed = tl.where(place[None, :] < taken[:, None], truth, -1)
    tl.store(committed_out + row[:, None] * (width + 1) + place[None, :], committed, mask=answers)
    tl.store(computed_out + row, tl.load(computed + row, mask=real, other=0) + taken, mask=real)


def accept(
    draft: Tensor, drafted: Tensor, target: Tensor, computed: Tensor, live: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel form of `accept_reference`; all inputs int32 and contiguous."""
    rows, width = draft.shape
    accepted, new_computed = torch.empty_like(computed), torch.empty_like(computed)
    committed = torch.empty_like(target)
    block_r = 16
    _accept_kernel[(cdiv(rows, block_r),)](
        draft,
        drafted,
        target,
        computed,
        computed if live is None else live,
        accepted,
        committed,
        new_computed,
        rows,
        width,
        HAS_LIVE=live is not None,
        BLOCK_R=block_r,
        BLOCK_W=next_power_of_2(width + 1),
        num_warps=1,
        **LAUNCH,
    )
    counters.count("accept.triton")
    return accepted, committed, new_computed
