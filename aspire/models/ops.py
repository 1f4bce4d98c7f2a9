"""The elementwise operations of the decoder behind one small interface, so that fused kernels can take their place."""

from __future__ import annotations

from typing import Protocol, overload

import torch
from torch import Tensor


class Ops(Protocol):
    """What the decoder needs besides matrix products. All run without host synchronisation."""

    @overload
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...

    @overload
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> object:
        """``x`` [..., width] over its root mean square (last dimension), times ``weight`` [width]; dtype of ``x``.

        With ``residual`` (shape of ``x``): returns (norm of x + residual, x + residual); both may be overwritten.
        Without: returns the norm alone, and ``x`` is left as it is; it may be a strided view whose last dimension is
        contiguous (the heads of a fused qkv projection).
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for ``gate_up`` [tokens, 2 * width] = gate beside up; returns [tokens, width]."""
        ...


class TorchOps:
    """The reference: plain torch, any device and dtype, same rounding points as Hugging Face's modules."""

    @overload
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...

    @overload
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> object:
        if residual is not None:
            x = x + residual
        wide = x.float()
        normed = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
        return normed if residual is None else (normed, x)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
