"""Acceptance of drafts: the longest prefix equal to the target's tokens, then the bonus token."""

from __future__ import annotations

import torch
from torch import Tensor


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
