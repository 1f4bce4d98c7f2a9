"""Counter-based Gumbel noise: a function of (seed, position, token) alone, so every schedule sees the same noise.

Philox4x32-10 (Salmon et al., SC 2011): key = 64-bit seed (low word, high word), counter = (token // 4, position, 0,
0), and lane token % 4 of the output is the 32-bit word x. u = (x + 0.5) * 2^-32, gumbel = -log(-log(u)), in float32
with u rounded to float32 and kept below 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10
_MASK = 0xFFFFFFFF
LARGEST_U = 1.0 - 2.0**-24
"""Largest float32 below 1: words that round up to u = 1 are held here, else the noise would be infinite."""


def _mul_high_low(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32-bit words of ``a * constant`` for int64 tensors that hold 32-bit words (no overflow of int64)."""
    low_part = a * (constant & 0xFFFF)  # < 2^48
    high_part = a * (constant >> 16)  # < 2^48
    middle = high_part + (low_part >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low_part & 0xFFFF)


def philox_reference(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """32-bit words (in int64) of rows ``seed, position [rows]`` for tokens 0..vocab-1: ``[rows, vocab]``."""
    blocks = -(-vocab // 4)
    key0, key1 = (seed.long() & _MASK)[:, None], ((seed.long() >> 32) & _MASK)[:, None]
    c0 = torch.arange(blocks, device=seed.device).expand(seed.shape[0], blocks)
    c1 = (position.long() & _MASK)[:, None].expand_as(c0)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _mul_high_low(c0, PHILOX_M0)
        high1, low1 = _mul_high_low(c2, PHILOX_M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + PHILOX_W0) & _MASK, (key1 + PHILOX_W1) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1).reshape(seed.shape[0], blocks * 4)[:, :vocab]


def gumbel_reference(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Gumbel noise ``[rows, vocab]`` float32 of ``seed [rows]`` int64 and ``position [rows]`` (index of the token
    being sampled)."""
    words = philox_reference(seed, position, vocab)
    # float32(x) + 0.5 in float32, as the kernel does it
    uniform = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=LARGEST_U)
    return -torch.log(-torch.log(uniform))
