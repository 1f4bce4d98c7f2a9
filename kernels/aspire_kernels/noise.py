"""Counter-based Gumbel noise: a function of (seed, position, token) alone, so every schedule sees the same noise.

Philox4x32-10 (Salmon et al., SC 2011): key = 64-bit seed (low word, high word), counter = (token // 4, position, 0, 0),
and lane token % 4 of the output is the 32-bit word x. u = (x + 0.5) * 2^-32, gumbel = -log(-log(u)). u is not rounded
to float32 on the way (that would make the largest noises, which decide, coarse): the kernel computes -log(u) from 1 - u
where u >= 1/2. Kernel and reference agree to a few units in the last place of float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aspire_kernels._triton import tl, triton

PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10
_MASK = 0xFFFFFFFF


def _mul_high_low(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32-bit words of ``a * constant`` for int64 tensors that hold 32-bit words (no overflow of int64)."""
    low_part = a * (constant & 0xFFFF)  # < 2^48
    high_part = a * (constant >> 16)  # < 2^48
    middle = high_part + (low_part >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low_part & 0xFFFF)


def _philox_rounds(seed: Tensor, position: Tensor, block: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four output words for counters ``(block, position, 0, 0)``; ``seed, position [rows, 1]``, ``block [rows, n]``."""
    key0, key1 = seed.long() & _MASK, (seed.long() >> 32) & _MASK
    c0, c1 = block, (position.long() & _MASK).expand_as(block)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _mul_high_low(c0, PHILOX_M0)
        high1, low1 = _mul_high_low(c2, PHILOX_M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + PHILOX_W0) & _MASK, (key1 + PHILOX_W1) & _MASK
    return c0, c1, c2, c3


def philox_reference(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """32-bit words (in int64) of rows ``seed, position [rows]`` for tokens 0..vocab-1: ``[rows, vocab]``."""
    blocks = torch.arange(-(-vocab // 4), device=seed.device).expand(seed.shape[0], -1)
    words = torch.stack(_philox_rounds(seed[:, None], position[:, None], blocks), dim=-1)
    return words.reshape(seed.shape[0], -1)[:, :vocab]


def philox_at_reference(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """32-bit words (in int64) of the given tokens only: ``token [rows, n]`` int64 -> ``[rows, n]``."""
    words = torch.stack(_philox_rounds(seed[:, None], position[:, None], token // 4), dim=-1)
    return words.gather(-1, (token % 4)[..., None])[..., 0]


def gumbel_of_words(words: Tensor) -> Tensor:
    """Gumbel noise (float32, computed in float64) of 32-bit words."""
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()


def gumbel_reference(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Gumbel noise ``[rows, vocab]`` float32 of ``seed [rows]`` int64 and ``position [rows]`` (index of the token being
    sampled)."""
    return gumbel_of_words(philox_reference(seed, position, vocab))


@triton.jit
def gumbel_of_words_kernel(x):
    """Gumbel noise (float32) of uint32 words."""
    # 1 - u, exact to float32's relative precision even where u rounds to 1
    w = ((x ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # -log(1 - w) = 2 atanh(w / (2 - w)), a short series for w <= 1/2
    s = w / (2.0 - w)
    z = s * s
    series = 1.0 / 13.0
    series = series * z + 1.0 / 11.0
    series = series * z + 1.0 / 9.0
    series = series * z + 1.0 / 7.0
    series = series * z + 1.0 / 5.0
    series = series * z + 1.0 / 3.0
    near_one = 2.0 * s * (series * z + 1.0)
    u = (x.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponential = tl.where(w < 0.5, near_one, -tl.log(u))
    return -tl.log(exponential)


@triton.jit
def gumbel_block(seed, position, first_block, BLOCKS: tl.constexpr):
    """Noise of the ``4 * BLOCKS`` tokens from ``4 * first_block`` on, as one vector in token order."""
    c0 = first_block + tl.arange(0, BLOCKS)
    zero = tl.zeros_like(c0)
    x0, x1, x2, x3 = tl.philox(seed, c0, zero + position, zero, zero)
    # join interleaves the last axis: [block, i, j] = word 2 i + j
    words = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    return gumbel_of_words_kernel(tl.reshape(words, (4 * BLOCKS,)))


@triton.jit
def gumbel_at(seed, position, token):
    """Noise of arbitrary tokens (a vector of int32)."""
    zero = tl.zeros_like(token)
    x0, x1, x2, x3 = tl.philox(seed, token // 4, zero + position, zero, zero)
    lane = token % 4
    low = tl.where(lane == 0, x0, x1)
    high = tl.where(lane == 2, x2, x3)
    return gumbel_of_words_kernel(tl.where(lane < 2, low, high))
