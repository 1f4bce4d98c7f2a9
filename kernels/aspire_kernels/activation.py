"""SwiGLU gate: ``silu(gate) * up`` on the fused projection. Floor: reads ``2 * tokens * inner`` elements, writes half
of that."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate_up [tokens, 2 * inner]`` (gate first), in float32, rounded once: ``[tokens,
    inner]``."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
