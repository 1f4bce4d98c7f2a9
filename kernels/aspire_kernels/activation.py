"""SwiGLU gate: ``silu(gate) * up`` on the fused projection. Floor: reads ``2 * tokens * inner`` elements, writes half
of that."""

from __future__ import annotations

import torch
from torch import Tensor

from aspire_kernels import counters
from aspire_kernels._triton import LAUNCH, cdiv, tl, triton, wait_for_inputs


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate_up [tokens, 2 * inner]`` (gate first), in float32, rounded once: ``[tokens,
    inner]``."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@triton.jit
def _silu_mul_kernel(gate_up, out, inner, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < inner
    gate = tl.load(gate_up + row * stride + column, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + inner + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * inner + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=real)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Kernel form of `silu_mul_reference`."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    grid = (rows, cdiv(inner, block))
    _silu_mul_kernel[grid](gate_up, out, inner, gate_up.stride(0), BLOCK=block, num_warps=4, **LAUNCH)
    counters.count("silu_mul.triton")
    return out
