"""Rotary position embedding: inverse frequencies of the four kinds, cos/sin tables, and the reference rotation.

Halves layout (Hugging Face, "neox"): element i of a head is rotated together with element i + head_dim / 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aspire.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """(inv_freq [head_dim / 2] float32 on the CPU in radians per token, factor that multiplies cos and sin)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, config), _yarn_attention_factor(scaling)
    return plain, 1.0


def rope_tables(config: ModelConfig, max_positions: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """(cos, sin), each [max_positions, head_dim / 2] float32, the attention factor of the rope kind included."""
    inv_freq, factor = inverse_frequencies(config)
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * inv_freq.to(device)[None, :]
    return angles.cos() * factor, angles.sin() * factor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` [tokens, heads, head_dim] by ``cos``, ``sin`` [tokens, head_dim / 2]; the dtype of ``x`` is kept.

    The rotation is done in float32, whatever the dtype: bfloat16 cos and sin cost accuracy at far positions.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a linear blend between (Llama 3.1)."""
    if scaling.divisors:
        return plain / torch.tensor(scaling.divisors, dtype=torch.float32)
    wavelengths = 2 * math.pi / plain
    turns = scaling.original_max_positions / wavelengths  # full turns within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _yarn(plain: Tensor, config: ModelConfig) -> Tensor:
    """Interpolated and original frequencies blended over a ramp of dimensions (YaRN, arXiv 2309.00071, section 3.2)."""
    scaling, dim = config.rope_scaling, config.head_dim

    def dimension_of(turns: float) -> float:
        ratio = scaling.original_max_positions / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp; avoids 0 / 0
    interpolate = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / scaling.factor * interpolate + plain * (1 - interpolate)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """Temperature correction of YaRN (section 3.4): 0.1 ln(factor) + 1 unless the model states its own."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
