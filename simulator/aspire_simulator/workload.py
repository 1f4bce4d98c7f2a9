"""Workloads: when requests arrive and how long they are, as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import UsageError, check_choice
from aspire.scheduler.prefix_links import links_among, names_from_links

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    """Requests ordered by arrival."""

    name: str
    arrival_s: Floats  # [requests], from 0, not decreasing
    prompt_tokens: Ints  # [requests], >= 1
    output_tokens: Ints  # [requests], >= 1
    prefix_of: Ints | None = None  # [requests]: an earlier request with the longest equal prefix; -1 = none has one
    prefix_tokens: Ints | None = None  # [requests]: of that prefix, prompt and output
    detail: dict[str, Any] = field(default_factory=dict)  # how it was made; goes into provenance

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __post_init__(self) -> None:
        if not len(self.arrival_s) == len(self.prompt_tokens) == len(self.output_tokens):
            raise UsageError("a workload needs as many arrivals as prompt and output lengths")
        if len(self) and (self.prompt_tokens.min() < 1 or self.output_tokens.min() < 1):
            raise UsageError("every request of a workload needs at least one prompt token and one output token")
        if len(self) and not (np.isfinite(self.arrival_s).all() and self.arrival_s.min() >= 0):
            raise UsageError("arrival times must be finite and not negative")

    def ordered(self) -> Workload:
        """The same requests in order of arrival (stable)."""
        return self.take(np.argsort(self.arrival_s, kind="stable"))

    def take(self, which: Any) -> Workload:
        """The requests ``which`` (indices, mask or slice), in that order. Who shared a prefix with one that is left
        out, or now comes later, shares none."""
        kept = replace(
            self,
            arrival_s=self.arrival_s[which],
            prompt_tokens=self.prompt_tokens[which],
            output_tokens=self.output_tokens[which],
        )
        if self.prefix_of is None or self.prefix_tokens is None:
            return kept
        prefix_of, tokens = links_among(np.arange(len(self))[which], self.prefix_of, self.prefix_tokens)
        return replace(kept, prefix_of=prefix_of, prefix_tokens=tokens)

    def page_names(self, *, linked_only: bool = False) -> list[Sequence[int]]:
        """Names of the full pages of each request, equal where prefixes are. ``linked_only``: none for those that share
        no prefix with any other."""
        nobody = np.zeros(len(self), dtype=np.int64)
        prefix_of = nobody - 1 if self.prefix_of is None else self.prefix_of
        tokens = nobody if self.prefix_tokens is None else self.prefix_tokens
        linked = prefix_of >= 0
        linked[prefix_of[linked]] = True
        if linked_only and not linked.any():
            return [()] * len(self)
        names = names_from_links(prefix_of, tokens, self.prompt_tokens + self.output_tokens)
        return [own if keep or not linked_only else () for own, keep in zip(names, linked.tolist(), strict=True)]

    def scaled(self, *, time_scale: float = 1.0, length_scale: float = 1.0, limit: int | None = None) -> Workload:
        """First ``limit`` requests, arrival times and lengths multiplied (2.0 = arrivals half as dense, twice as
        long).
        """
        for name, value in (("time_scale", time_scale), ("length_scale", length_scale)):
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} {value} must be a positive number")
        if limit is not None and limit < 1:
            raise UsageError(f"limit {limit} must be at least 1 request")
        kept = self.take(slice(limit))
        prefix = kept.prefix_tokens
        detail = {**self.detail, "time_scale": time_scale, "length_scale": length_scale, "limit": limit}
        return replace(
            kept,
            arrival_s=kept.arrival_s * time_scale,
            prompt_tokens=_scaled(kept.prompt_tokens, length_scale, 1),
            output_tokens=_scaled(kept.output_tokens, length_scale, 1),
            prefix_tokens=None if prefix is None else _scaled(prefix, length_scale, 0),
            detail=detail,
        )


def _scaled(tokens: Ints, scale: float, least: int) -> Ints:
    return np.asarray(np.maximum(np.rint(tokens * scale).astype(np.int64), least))


# --- arrivals -------------------------------------------------------------------------------------------------------


def arrivals(count: int, request_rate: float = math.inf, burstiness: float = 1.0, seed: int = 0) -> Floats:
    """[count] arrival times. Rate infinite: all at once. Burstiness 1: Poisson; other: Gamma gaps of that shape.

    As vLLM's ``--request-rate`` and ``--burstiness``: gaps ~ Gamma(shape=burstiness, mean=1/rate), so the coefficient
    of variation of a gap is 1/sqrt(burstiness): below 1 burstier than Poisson, above 1 more even.
    """
    if count < 1:
        raise UsageError(f"number of requests {count} must be at least 1")
    if not request_rate > 0:
        raise UsageError(f"request rate {request_rate} must be positive (requests a second), or inf for all at once")
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise UsageError(f"burstiness {burstiness} must be a positive number (1 = Poisson)")
    if math.isinf(request_rate):
        return np.zeros(count)
    gaps = np.random.default_rng([seed, 1]).gamma(burstiness, 1.0 / (request_rate * burstiness), size=count)
    return np.asarray(np.cumsum(gaps) - gaps[0])


# --- lengths --------------------------------------------------------------------------------------------------------


def _fixed(rng: np.random.Generator, count: int, tokens: float) -> Floats:
    return np.full(count, tokens)


def _uniform(rng: np.random.Generator, count: int, low: float, high: float) -> Floats:
    return rng.integers(int(low), int(high) + 1, size=count).astype(np.float64)


def _lognormal(rng: np.random.Generator, count: int, mean: float, cv: float, longest: float = math.inf) -> Floats:
    sigma2 = math.log1p(cv * cv)
    return np.minimum(rng.lognormal(math.log(mean) - sigma2 / 2, math.sqrt(sigma2), size=count), longest)


def _zipf(rng: np.random.Generator, count: int, exponent: float, low: float, high: float) -> Floats:
    """P(n) ~ n^-exponent on low..high, by inversion of the continuous law."""
    u = rng.random(count)
    if abs(exponent - 1) < 1e-9:
        return np.asarray(low * (high / low) ** u)
    power = 1 - exponent
    return np.asarray((low**power + u * (high**power - low**power)) ** (1 / power))


_LENGTHS: dict[str, tuple[Callable[..., Floats], int, int, str]] = {
    "fixed": (_fixed, 1, 1, "fixed:TOKENS"),
    "uniform": (_uniform, 2, 2, "uniform:LOW:HIGH"),
    "lognormal": (_lognormal, 2, 3, "lognormal:MEAN:CV[:MAX]"),
    "zipf": (_zipf, 3, 3, "zipf:EXPONENT:LOW:HIGH"),
}


def lengths(spec: str | int, count: int, seed: int = 0) -> Ints:
    """[count] lengths in tokens, each at least 1.

    ``spec``: a number, ``fixed:512``, ``uniform:100:900``, ``lognormal:MEAN:CV[:MAX]`` (CV = standard deviation /
    mean),
    ``zipf:EXPONENT:LOW:HIGH``. Raises `UsageError` for anything else.
    """
    text = str(spec)
    if text.isdigit():
        text = f"fixed:{text}"
    kind, *words = text.split(":")
    check_choice("length distribution", kind, _LENGTHS)
    draw, least, most, form = _LENGTHS[kind]
    try:
        values = [float(word) for word in words]
    except ValueError as error:
        raise UsageError(f"length distribution '{spec}': {error}; write {form}") from error
    if not least <= len(values) <= most or not all(math.isfinite(value) and value > 0 for value in values):
        raise UsageError(f"length distribution '{spec}' needs positive numbers: write {form}")
    if kind in ("uniform", "zipf") and values[-2] > values[-1]:
        raise UsageError(f"length distribution '{spec}': the lower bound is above the upper one")
    return np.maximum(np.rint(draw(np.random.default_rng([seed, 2]), count, *values)).astype(np.int64), 1)


def synthetic(
    num_prompts: int,
    input_len: str | int = 1024,
    output_len: str | int = 128,
    *,
    request_rate: float = math.inf,
    burstiness: float = 1.0,
    seed: int = 0,
) -> Workload:
    """A workload of drawn lengths and arrivals. The same seed gives the same requests."""
    return Workload(
        name="synthetic",
        arrival_s=arrivals(num_prompts, request_rate, burstiness, seed),
        prompt_tokens=lengths(input_len, num_prompts, 2 * seed),
        output_tokens=lengths(output_len, num_prompts, 2 * seed + 1),
        detail={
            "num_prompts": num_prompts,
            "input_len": str(input_len),
            "output_len": str(output_len),
            "request_rate": request_rate,
            "burstiness": burstiness,
            "seed": seed,
        },
    )


def trace_stats(workload: Workload) -> dict[str, float]:
    """What a workload looks like: size, rate, burstiness, lengths.

    ``burstiness`` is 1 / CV^2 of the gaps between arrivals: the Gamma shape that vLLM's ``--burstiness`` would need.
    """
    if not len(workload):
        raise UsageError(f"workload {workload.name} has no requests")
    gaps = np.diff(workload.arrival_s)
    span_s = float(workload.arrival_s[-1] - workload.arrival_s[0])
    stats: dict[str, float] = {"requests": float(len(workload)), "duration_s": span_s}
    if span_s > 0:
        variation = float(gaps.std() / gaps.mean())
        stats["request_rate"] = (len(workload) - 1) / span_s
        stats["gap_cv"] = variation
        stats["burstiness"] = 1 / variation**2 if variation > 0 else math.inf
        stats["input_tokens_per_s"] = float(workload.prompt_tokens.sum()) / span_s
        stats["output_tokens_per_s"] = float(workload.output_tokens.sum()) / span_s
    for name, values in (("prompt_tokens", workload.prompt_tokens), ("output_tokens", workload.output_tokens)):
        stats[f"mean_{name}"] = float(values.mean())
        for percent in (50, 90, 99):
            stats[f"p{percent}_{name}"] = float(np.percentile(values, percent))
        stats[f"max_{name}"] = float(values.max())
    if workload.prefix_tokens is not None:
        stats["shared_prefix_share"] = float(workload.prefix_tokens.sum() / workload.prompt_tokens.sum())
    return stats
