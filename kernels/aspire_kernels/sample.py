"""Sampling with shared Gumbel noise: token = argmax(filtered logits / T + gumbel(seed, position, token)); T = 0 is
plain argmax.

Floor: the logits are read once, ``rows * vocab`` elements. Filters follow the order and meaning of Hugging Face and
vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from aspire_kernels.noise import gumbel_reference


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
    floor = torch.where(min_p > 0, min_p.clamp(min=1e-38).log(), float("-inf"))
    return kept.masked_fill_(kept < best + floor[:, None], float("-inf"))


def sample_reference(logits: Tensor, params: SamplingRows) -> Sampled:
    """Sample one token per row of ``logits [rows, vocab]`` (any float type; -inf = banned). Rows do not influence each
    other."""
    raw = logits.float()
    hot = params.temperature > 0
    scaled = raw / torch.where(hot, params.temperature, 1.0)[:, None]
    if bool(hot.any()):
        filtered = filter_reference(scaled, params.top_k, params.top_p, params.min_p)
        noise = gumbel_reference(params.seed, params.position, raw.shape[1])
        scaled = torch.where(hot[:, None], filtered + noise, scaled)
    best = scaled.topk(min(2, scaled.shape[1]), dim=1)
    # equal scores: the smaller token id, as the kernel decides
    token = (scaled == best.values[:, :1]).to(torch.int8).argmax(dim=1)
    logprob = raw.gather(1, token[:, None])[:, 0] - raw.logsumexp(dim=1)
    margin = best.values[:, 0] - best.values[:, 1] if scaled.shape[1] > 1 else torch.full_like(logprob, float("inf"))
    return Sampled(token=token.to(torch.int32), margin=margin, logprob=logprob)
