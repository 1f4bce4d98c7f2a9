"""RMS norm, with the residual addition in front of it.

Floor: ``rms_norm`` reads and writes ``tokens * hidden`` elements once each; ``add_rms_norm`` reads two and writes two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aspire_kernels import counters
from aspire_kernels._triton import LAUNCH, next_power_of_2, tl, triton, wait_for_inputs


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis of ``x [tokens, hidden]``, in float32, rounded once to
    x's type; without a weight, ones."""
    wide = x.float()
    scaled = wide * (wide.pow(2).mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (scaled if weight is None else scaled * weight.float()).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """``residual += x`` in place (rounded to its type), then the norm of it; returns ``(normed, residual)``."""
    residual.add_(x)
    return rms_norm_reference(residual, weight, eps), residual


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, hidden, stride_x, eps, ADD: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr, PDL:
    tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    real = column < hidden
    value = tl.load(x + row * stride_x + column, mask=real, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(residual + row * hidden + column, mask=real, other=0.0)).to(value.dtype)
        tl.store(residual + row * hidden + column, value, mask=real)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
    if WEIGHT:
        wide = wide * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, wide.to(out.dtype.element_ty), mask=real)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float) -> Tensor:
    hidden = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = next_power_of_2(hidden)
    _rms_norm_kernel[(x.shape[0],)](
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        out,
        hidden,
        x.stride(0),
        eps,
        ADD=residual is not None,
        WEIGHT=weight is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **LAUNCH,
    )
    counters.count("norm.triton")
    return out


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Kernel form of `rms_norm_reference`: ``x [tokens, hidden]``, last axis contiguous."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Kernel form of `add_rms_norm_reference`: ``residual`` (contiguous) is updated in place and returned."""
    return _launch(x, residual, weight, eps), residual
