"""Rotary embedding of q and k (after an optional per-head norm of each, as in Qwen3) and the write of k, v into KV
pages.

Floor: q, k, v are read once, q written once, k and v written once into their pages.
Rotation pairs element i with i + rotary/2 (the layout of Hugging Face weights): x1' = x1 cos - x2 sin, x2' = x2 cos +
x1 sin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aspire_kernels import counters
from aspire_kernels._triton import LAUNCH, next_power_of_2, tl, triton, wait_for_inputs
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


@triton.jit
def _rope_heads(
    x, stride_head, out, stride_out, heads, weight, eps, cos, sin, HALF: tl.constexpr, REST: tl.constexpr, NORM:
    tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Normed and rotated heads of one token: first half, second half ``[BLOCK_H, BLOCK_HALF]`` and the unrotated
    rest."""
    h = tl.arange(0, BLOCK_H)[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    real = (h < heads) & (i < HALF)
    x1 = tl.load(x + h * stride_head + i, mask=real, other=0.0).to(tl.float32)
    x2 = tl.load(x + h * stride_head + HALF + i, mask=real, other=0.0).to(tl.float32)
    r = tl.arange(0, BLOCK_REST)[None, :]
    rest = tl.load(x + h * stride_head + 2 * HALF + r, mask=(h < heads) & (r < REST), other=0.0).to(tl.float32)
    if NORM:
        total = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1) + tl.sum(rest * rest, 1)
        scale = tl.rsqrt(total / (2 * HALF + REST) + eps)[:, None]
        dtype = x.dtype.element_ty
        w1 = tl.load(weight + i, mask=i < HALF, other=0.0).to(tl.float32)
        w2 = tl.load(weight + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        w3 = tl.load(weight + 2 * HALF + r, mask=r < REST, other=0.0).to(tl.float32)
        # rounded as the separate norm would round it
        x1 = (x1 * scale * w1).to(dtype).to(tl.float32)
        x2 = (x2 * scale * w2).to(dtype).to(tl.float32)
        rest = (rest * scale * w3).to(dtype).to(tl.float32)
    c = tl.load(cos + i, mask=i < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + i, mask=i < HALF, other=0.0).to(tl.float32)
    out_type = out.dtype.element_ty
    tl.store(out + h * stride_out + i, (x1 * c - x2 * s).to(out_type), mask=real)
    tl.store(out + h * stride_out + HALF + i, (x2 * c + x1 * s).to(out_type), mask=real)
    if REST > 0:
        tl.store(out + h * stride_out + 2 * HALF + r, rest.to(out_type), mask=(h < heads) & (r < REST))


@triton.jit
def _rope_kernel(
    q,
    k,
    v,
    q_out,
    k_cache,
    v_cache,
    positions,
    slot_mapping,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_page,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (tokens, 2); the second axis does q, or k and v."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    c, s = cos + position * HALF, sin + position * HALF
    if tl.program_id(1) == 0:
        _rope_heads(
            q + token * stride_qt, stride_qh, q_out + token * (HEADS * HEAD_DIM), HEAD_DIM, HEADS, q_weight, eps, c, s,
            HALF, REST, Q_NORM, BLOCK_Q, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        where = tl.load(slot_mapping + token).to(tl.int64)
        offset = where // PAGE * stride_page + where % PAGE * HEAD_DIM
        h = tl.arange(0, BLOCK_KV)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        real = (h < KV_HEADS) & (d < HEAD_DIM)
        value = tl.load(v + token * stride_vt + h * stride_vh + d, mask=real, other=0.0)
        tl.store(v_cache + offset + h * (PAGE * HEAD_DIM) + d, value.to(v_cache.dtype.element_ty), mask=real)
        _rope_heads(
            k + token * stride_kt, stride_kh, k_cache + offset, PAGE * HEAD_DIM, KV_HEADS, k_weight, eps, c, s, HALF,
            REST, K_NORM, BLOCK_KV, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


def rope_and_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Kernel form of `rope_and_kv_write_reference`; q, k, v may be views of one fused projection."""
    tokens, heads, head_dim = q.shape
    kv_heads, half = k.shape[1], cos.shape[1]
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    rest = head_dim - 2 * half
    _rope_kernel[(tokens, 2)](
        q,
        k,
        v,
        out,
        k_cache,
        v_cache,
        positions,
        slot_mapping,
        cos,
        sin,
        q if q_weight is None else q_weight,
        k if k_weight is None else k_weight,
        eps,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        REST=rest,
        HEAD_DIM=head_dim,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        PAGE=k_cache.shape[2],
        BLOCK_Q=next_power_of_2(heads),
        BLOCK_KV=next_power_of_2(kv_heads),
        BLOCK_HALF=next_power_of_2(half),
        BLOCK_REST=next_power_of_2(max(1, rest)),
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=4 if heads * head_dim > 1024 else 2,
        **LAUNCH,
    )
    counters.count("rope.triton")
    return out
