"""Rotary embedding of q and k (after an optional per-head norm of each, as in Qwen3) and the write of k, v into KV
pages.

Floor: q, k, v are read once, q written once, k and v written once into their pages.
Rotation pairs element i with i + rotary/2 (the layout of Hugging Face weights): x1' = x1 cos - x2 sin, x2' = x2 cos +
x1 sin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aspire_kernels.norm import rms_norm_reference


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x [tokens, heads, head_dim]`` by ``cos, sin [tokens, rotary / 2]``; elements past ``rotary`` pass
    through."""
    half = cos.shape[1]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    c, s = cos[:, None, :].float(), sin[:, None, :].float()
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1).to(x.dtype)


def rope_and_kv_write_reference(
    q: Tensor,  # [tokens, heads, head_dim]
    k: Tensor,  # [tokens, kv_heads, head_dim]
    v: Tensor,  # [tokens, kv_heads, head_dim]
    positions: Tensor,  # [tokens] int32: index in the sequence
    slot_mapping: Tensor,  # [tokens] int32: physical page * page_size + offset; padded tokens 0..15 (trash page 0)
    cos: Tensor,  # [max_positions, rotary / 2] float32
    sin: Tensor,  # [max_positions, rotary / 2] float32
    k_cache: Tensor,  # [num_pages, kv_heads, page, head_dim], written
    v_cache: Tensor,  # [num_pages, kv_heads, page, head_dim], written
    *,
    q_weight: Tensor | None = None,  # [head_dim] of the q norm, or None
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Write rotated k and v to their pages; return the rotated q ``[tokens, heads, head_dim]`` (contiguous)."""
    if q_weight is not None:
        q = rms_norm_reference(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm_reference(k, k_weight, eps)
    where = positions.long()
    c, s = cos[where], sin[where]
    page, offset = slot_mapping.long() // k_cache.shape[2], slot_mapping.long() % k_cache.shape[2]
    k_cache[page, :, offset] = _rotate(k, c, s).to(k_cache.dtype)
    v_cache[page, :, offset] = v.to(v_cache.dtype)
    return _rotate(q, c, s)
