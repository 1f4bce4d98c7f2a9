"""Sampling with shared Gumbel noise: token = argmax(filtered logits / T + gumbel(seed, position, token)); T = 0 is
plain argmax.

Floor: the logits are read once, ``rows * vocab`` elements. Filters follow the order and meaning of Hugging Face and
vLLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from aspire_kernels import counters
from aspire_kernels._triton import LAUNCH, cdiv, next_power_of_2
from aspire_kernels.noise import gumbel_of_words, gumbel_reference, philox_at_reference
from aspire_kernels.sample_kernel import finish_kernel, scan_kernel


@dataclass
class SamplingRows:
    """Sampling parameters by row of logits, device tensors of fixed shape. Neutral values switch a filter off."""

    seed: Tensor  # [rows] int64
    position: Tensor  # [rows] int32: index in the sequence of the token being sampled
    temperature: Tensor  # [rows] float32; 0 = argmax
    top_k: Tensor  # [rows] int32; <= 0 = off
    top_p: Tensor  # [rows] float32 in (0, 1]; 1 = off
    min_p: Tensor  # [rows] float32 in [0, 1]; 0 = off

    @staticmethod
    def greedy(rows: int, device: torch.device | str) -> SamplingRows:
        """Rows of T = 0 with every filter off."""
        return SamplingRows(
            seed=torch.zeros(rows, dtype=torch.int64, device=device),
            position=torch.zeros(rows, dtype=torch.int32, device=device),
            temperature=torch.zeros(rows, device=device),
            top_k=torch.zeros(rows, dtype=torch.int32, device=device),
            top_p=torch.ones(rows, device=device),
            min_p=torch.zeros(rows, device=device),
        )

    def at(self, rows: Tensor | slice) -> SamplingRows:
        """The parameters of the given rows."""
        return SamplingRows(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass
class Sampled:
    """Outcome by row."""

    token: Tensor  # [rows] int32
    margin: Tensor  # [rows] float32: best minus second best perturbed score (T = 0: logit); inf if one token was left
    logprob: Tensor  # [rows] float32: log softmax of the raw logits (no temperature, no filter) at the token


def filter_reference(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits divided by T, with the filtered tokens at -inf: top-k, then top-p, then min-p. ``scaled [rows, vocab]``
    float32.

    Top-k keeps every token not below the k-th largest. Top-p keeps the smallest set of most likely tokens whose
    probability (softmax after top-k) reaches p, and every token tied with the last of them. Min-p keeps tokens with at
    least min_p times the largest probability. The most likely token always stays.
    """
    kept = scaled.clone()
    vocab = scaled.shape[1]
    limit = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long()
    ordered = kept.sort(dim=1, descending=True).values
    kth = ordered.gather(1, (limit - 1)[:, None])
    kept.masked_fill_(kept < kth, float("-inf"))
    ordered = ordered.masked_fill(ordered < kth, float("-inf"))
    probability = torch.softmax(ordered, dim=1)
    before = probability.cumsum(dim=1) - probability  # mass of the strictly better places
    inside = ((before < top_p[:, None]) | (top_p >= 1.0)[:, None]) & (ordered > float("-inf"))
    count = inside.sum(dim=1).clamp(min=1)
    last = ordered.gather(1, (count - 1)[:, None])
    kept.masked_fill_(kept < last, float("-inf"))
    best = ordered[:, :1]
    floor = torch.where(min_p > 0, min_p.clamp(min=1e-30).log(), float("-inf"))
    return kept.masked_fill_(kept < best + floor[:, None], float("-inf"))


def _sample_few(scaled: Tensor, params: SamplingRows, width: int) -> tuple[Tensor, Tensor]:
    """Token and margin of rows whose top-k is at most ``width``: filter and noise on the ``width`` best tokens only."""
    value, index = scaled.topk(width, dim=1)
    kept = filter_reference(value, params.top_k, params.top_p, params.min_p)
    noise = gumbel_of_words(philox_at_reference(params.seed, params.position, index))
    score = kept + noise
    best = score.topk(2, dim=1).values
    # no score equals the best where logits are NaN; the token must stay one of the vocabulary
    token = torch.where(score == best[:, :1], index, scaled.shape[1] - 1).amin(dim=1)
    return token, best[:, 0] - best[:, 1]


def _sample_all(scaled: Tensor, params: SamplingRows, noisy: bool) -> tuple[Tensor, Tensor]:
    """Token and margin over the whole vocabulary."""
    score = scaled
    if noisy:
        score = filter_reference(scaled, params.top_k, params.top_p, params.min_p)
        score = score + gumbel_reference(params.seed, params.position, scaled.shape[1])
    if scaled.shape[1] == 1:
        return torch.zeros_like(score[:, 0], dtype=torch.long), torch.full_like(score[:, 0], float("inf"))
    best = score.topk(2, dim=1).values
    # equal scores: the smaller token id, as the kernel decides
    token = (score == best[:, :1]).to(torch.int8).argmax(dim=1)
    return token, best[:, 0] - best[:, 1]


_FEW = 256
"""Rows with a top-k of at most half of this look at this many best tokens (ties of the k-th included) and no others."""


def sample_reference(logits: Tensor, params: SamplingRows) -> Sampled:
    """Sample one token per row of ``logits [rows, vocab]`` (any float type; -inf = banned). Rows do not influence each
    other."""
    raw = logits.float()
    hot = params.temperature > 0
    inverse = torch.where(hot, 1.0 / params.temperature.clamp(min=1e-30), 1.0)
    scaled = raw * inverse[:, None]
    few = hot & (params.top_k > 0) & (params.top_k <= _FEW // 2) & (raw.shape[1] > _FEW)
    token = torch.zeros(raw.shape[0], dtype=torch.long, device=raw.device)
    margin = torch.zeros(raw.shape[0], device=raw.device)
    for rows, kind in ((few, "few"), (hot & ~few, "all"), (~hot, "greedy")):
        index = rows.nonzero()[:, 0]
        if index.numel() == 0:
            continue
        part = params.at(index)
        if kind == "few":
            token[index], margin[index] = _sample_few(scaled[index], part, _FEW)
        else:
            token[index], margin[index] = _sample_all(scaled[index], part, kind == "all")
    logprob = raw.gather(1, token[:, None])[:, 0] - raw.logsumexp(dim=1)
    counters.count("sample.reference")
    return Sampled(token=token.to(torch.int32), margin=margin, logprob=logprob)


_SIZES = {"cuda": (4096, 64, 2048, 256, 8192, 64), "interpreter": (512, 64, 256, 64, 512, 4)}
"""BLOCK, SUB, CAP, FEW, SEARCH, HOT of the kernels; small ones let small tests reach every path."""
_ALONE = 128
"""Of more rows than this a multiprocessor has two: each takes half of HOT, and half the registers."""


def scratch_bytes(rows: int, vocab: int, device_type: str = "cuda") -> int:
    """Bytes that `sample` allocates beside the logits, its results included."""
    block, sub, cap, *_ = _SIZES["cuda" if device_type == "cuda" else "interpreter"]
    blocks = cdiv(vocab, block)
    return 4 * rows * (6 * blocks + 2 * blocks * (block // sub) + 2 * cap + 3)


def _most_stretches(subs: int, cap: int) -> int:
    """Stretches of SUB tokens that give the candidates where no top-k asks for fewer: of logits without order, as many
    as hold about three quarters of ``cap`` tokens not below the least of their maxima; at most 7/8 of ``subs``."""
    return max(1, min(subs - subs // 8, int(subs * -math.expm1(-0.75 * cap / subs))))


def sample(logits: Tensor, params: SamplingRows) -> Sampled:
    """Kernel form of `sample_reference`: two launches, no host wait; ``logits`` float32, float16 or bfloat16, last axis
    contiguous."""
    rows, vocab = logits.shape
    block, sub, cap, few, search, hot = _SIZES["cuda" if logits.device.type == "cuda" else "interpreter"]
    blocks = cdiv(vocab, block)
    subs = blocks * (block // sub)
    device = logits.device
    stats = torch.empty((rows, blocks, 6), dtype=torch.float32, device=device)
    sub_max = torch.empty((rows, subs), dtype=torch.float32, device=device)
    scratch = torch.empty((rows, subs + 2 * cap), dtype=torch.int32, device=device).view(-1)
    hot_subs, values, tokens = scratch.split([rows * subs, rows * cap, rows * cap])
    out = Sampled(
        token=torch.empty(rows, dtype=torch.int32, device=device),
        margin=torch.empty(rows, dtype=torch.float32, device=device),
        logprob=torch.empty(rows, dtype=torch.float32, device=device),
    )
    filters = (params.seed, params.position, params.temperature, params.top_k, params.top_p, params.min_p)
    scan_kernel[(rows, blocks)](
        logits, logits.stride(0), vocab, blocks, *filters, stats, sub_max, BLOCK=block, SUB=sub, num_warps=8, **LAUNCH
    )
    finish_kernel[(rows,)](
        logits,
        logits.stride(0),
        vocab,
        blocks,
        *filters,
        stats,
        sub_max,
        hot_subs,
        values.view(torch.float32),
        tokens,
        out.token,
        out.margin,
        out.logprob,
        subs,
        _most_stretches(subs, cap),
        BLOCK=block,
        SUB=sub,
        CAP=cap,
        FEW=few,
        BLOCKS=max(2, next_power_of_2(blocks)),
        SUBS=max(2, next_power_of_2(subs)),
        HOT=hot if rows <= _ALONE else hot // 2,
        SEARCH=search,
        num_warps=8,
        **LAUNCH,
    )
    counters.count("sample.triton")
    return out
