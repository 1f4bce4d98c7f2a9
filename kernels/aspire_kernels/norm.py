"""RMS norm, with the residual addition in front of it.

Floor: ``rms_norm`` reads and writes ``tokens * hidden`` elements once each; ``add_rms_norm`` reads two and writes two.
"""

from __future__ import annotations

from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis of ``x [tokens, hidden]``, in float32, rounded once to
    x's type."""
    wide = x.float()
    scaled = wide * (wide.pow(2).mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (scaled * weight.float()).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual += x`` in place (rounded to its type), then the norm of it; returns ``(normed, residual)``."""
    residual.add_(x)
    return rms_norm_reference(residual, weight, eps), residual
