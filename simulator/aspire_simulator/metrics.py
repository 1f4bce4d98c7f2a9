"""Metrics of a run from its columnar records. The same functions serve simulated and measured runs.

**Decode-only throughput**, defined so that policies can be compared: over the steps in which *no row prefills*,
(tokens committed) / (summed duration). Draft steps that commit nothing count in full, idle time between steps does not.
It does not depend on how prefill is chunked, and a policy cannot gain by hiding decode work in prefill steps, because
neither the tokens nor the time of those steps count. ``decode_only_share`` says which share of all output tokens the
figure rests on; below about one half it says little about the run. ``full_batch_throughput`` is the same over the
steps in which at least 90 % of the run's largest number of requests are under way, those that sit the step out among
them: the steady state, without the tail in which few requests remain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import UsageError, check_choice
from aspire.rundir import Run
from aspire.runlog import DRAFT, PREFILL, VERIFY, RequestTable, StepLog
from aspire.scheduler.features import FEATURES

Floats = NDArray[np.float64]
PERCENTILES: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0)
GOODPUT_METRICS: tuple[str, ...] = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class TokenEvents:
    """One entry per (request, step) that committed tokens, ordered by request, then time."""

    request: NDArray[np.int64]
    time_s: Floats  # end of the step
    tokens: NDArray[np.int64]
    first: NDArray[np.bool_]  # the request's first event

    @classmethod
    def of(cls, steps: StepLog) -> TokenEvents:
        """The events of all requests of a run."""
        committed = steps.column("committed")
        rows = np.flatnonzero(committed > 0)
        request = steps.column("request")[rows].astype(np.int64)
        order = np.argsort(request, kind="stable")
        rows, request = rows[order], request[order]
        end_s = steps.start_s + steps.duration_s
        first = np.ones(len(rows), dtype=bool)
        first[1:] = request[1:] != request[:-1]
        return cls(request, end_s[steps.step_of_row()[rows]], committed[rows].astype(np.int64), first)


@dataclass(frozen=True)
class Latencies:
    """Per-request latencies, NaN where undefined, and the gaps between events."""

    ttft_s: Floats  # [requests] arrival to first token
    tpot_s: Floats  # [requests] (last token - first token) / (tokens - 1)
    e2e_s: Floats  # [requests] arrival to last token, finished requests only
    itl_chunk_s: Floats  # [gaps] time between two steps that gave the request tokens: what a stream shows
    itl_token_s: Floats  # [tokens after the first event] the gap shared equally by the tokens it brought


def latencies(requests: RequestTable, steps: StepLog) -> Latencies:
    """Latencies from the token events. The first event stands whatever happens later: preemption does not move TTFT."""
    events = TokenEvents.of(steps)
    count = len(requests)
    first_s, last_s = np.full(count, np.nan), np.full(count, np.nan)
    first_s[events.request[events.first]] = events.time_s[events.first]
    last_s[events.request] = events.time_s  # ordered by time: the last write is the last event
    tokens = np.bincount(events.request, weights=events.tokens, minlength=count)
    first_tokens = np.zeros(count)
    first_tokens[events.request[events.first]] = events.tokens[events.first]
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot_s = np.where(tokens > 1, (last_s - first_s) / (tokens - 1), np.nan)
    gaps = np.diff(events.time_s, prepend=0.0)[~events.first]
    brought = events.tokens[~events.first]
    finished = ~np.isnan(requests.finish_s)
    return Latencies(
        ttft_s=first_s - requests.arrival_s,
        tpot_s=tpot_s,
        e2e_s=np.where(finished, requests.finish_s - requests.arrival_s, np.nan),
        itl_chunk_s=gaps,
        itl_token_s=np.repeat(gaps / brought, brought),
    )


def parse_goodput(text: str | Sequence[str]) -> dict[str, float]:
    """``"ttft:500 tpot:50"`` (milliseconds, as vLLM's ``--goodput``) -> seconds by metric."""
    parts = text.split() if isinstance(text, str) else [part for item in text for part in item.split()]
    limits: dict[str, float] = {}
    for part in parts:
        name, _, value = part.partition(":")
        check_choice("goodput metric", name, GOODPUT_METRICS)
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = float("nan")
        if not limit_ms > 0:
            raise UsageError(f"goodput limit '{part}' needs a positive number of milliseconds, e.g. {name}:500")
        limits[name] = limit_ms / 1e3
    return limits


def meets(limits: Mapping[str, float], found: Latencies) -> NDArray[np.bool_]:
    """[requests]: finished within every limit. A request of one token has no TPOT and meets that limit."""
    good = ~np.isnan(found.e2e_s)
    values = {"ttft": found.ttft_s, "tpot": np.nan_to_num(found.tpot_s, nan=0.0), "e2el": found.e2e_s}
    for name, limit_s in limits.items():
        with np.errstate(invalid="ignore"):
            good &= values[name] <= limit_s
    return good


def spread(values_s: Floats, name: str, percentiles: Sequence[float] = PERCENTILES) -> dict[str, float]:
    """``mean_<name>_ms``, ``median_``, ``std_`` and percentiles; empty when there is no value."""
    values_ms = values_s[~np.isnan(values_s)] * 1e3
    if not len(values_ms):
        return {}
    found = {f"mean_{name}_ms": float(values_ms.mean()), f"median_{name}_ms": float(np.median(values_ms))}
    found[f"std_{name}_ms"] = float(values_ms.std())
    for percent, value in zip(percentiles, np.percentile(values_ms, percentiles), strict=True):
        found[f"p{percent:g}_{name}_ms"] = float(value)
    return found


def throughput(steps: StepLog) -> dict[str, float]:
    """Decode-only throughput (see the module) and what it rests on."""
    if not len(steps):
        return {}
    committed = _per_step(steps, steps.column("committed"))
    prefill = _per_step(steps, steps.column("mode") == PREFILL) > 0
    running = _running(steps)
    decode = ~prefill
    found = {"decode_only_throughput": 0.0, "decode_only_time_s": float(steps.duration_s[decode].sum())}
    if found["decode_only_time_s"] > 0:
        found["decode_only_throughput"] = float(committed[decode].sum()) / found["decode_only_time_s"]
    total = float(committed.sum())
    found["decode_only_share"] = float(committed[decode].sum()) / total if total else 0.0
    full = decode & (running >= 0.9 * running.max())
    time_s = float(steps.duration_s[full].sum())
    if time_s > 0:
        found["full_batch_throughput"] = float(committed[full].sum()) / time_s
        found["full_batch_time_s"] = time_s
    return found


def acceptance(steps: StepLog) -> dict[str, Any]:
    """Acceptance over verified rounds.

    ``acceptance_length``: mean tokens a round with drafts committed, bonus included; ``acceptance_rate``: accepted /
    drafted.
    ``acceptance_by_position[j]``: rounds with at least j+1 accepted / rounds that *drafted that far*;
    ``conditional_acceptance_by_position[j]``: the same among the rounds whose first j drafts were accepted.
    """
    verify = (steps.column("mode") == VERIFY) & (steps.column("drafted") > 0)
    drafted, accepted = steps.column("drafted")[verify], steps.column("accepted")[verify]
    draft_rows = int((steps.column("mode") == DRAFT).sum())
    found: dict[str, Any] = {"rounds": len(drafted), "draft_tokens": draft_rows, "accepted_tokens": int(accepted.sum())}
    found["wasted_drafts"] = draft_rows - found["accepted_tokens"]
    if not len(drafted):
        return found
    deepest = int(drafted.max())
    far = np.cumsum(np.bincount(drafted, minlength=deepest + 1)[::-1])[::-1][1:]  # rounds that drafted >= j+1
    kept = np.cumsum(np.bincount(accepted, minlength=deepest + 1)[::-1])[::-1]  # rounds with >= j accepted
    reached = np.array([int(((drafted > j) & (accepted >= j)).sum()) for j in range(deepest)])
    found["mean_draft_length"] = float(drafted.mean())
    found["acceptance_length"] = 1.0 + float(accepted.mean())
    found["acceptance_rate"] = float(accepted.sum() / drafted.sum())
    found["acceptance_by_position"] = (kept[1 : deepest + 1] / far).tolist()
    found["conditional_acceptance_by_position"] = (kept[1 : deepest + 1] / np.maximum(reached, 1)).tolist()
    found["rounds_by_position"] = far.tolist()
    return found


def phase_mix(steps: StepLog) -> dict[str, float]:
    """Share of time by kind of step: prefill (alone), draft, verify, autoregressive, or mixed."""
    if not len(steps):
        return {}
    mode, drafted = steps.column("mode"), steps.column("drafted")
    has = {
        "prefill": _per_step(steps, mode == PREFILL) > 0,
        "draft": _per_step(steps, mode == DRAFT) > 0,
        "verify": _per_step(steps, (mode == VERIFY) & (drafted > 0)) > 0,
        "autoregressive": _per_step(steps, (mode == VERIFY) & (drafted == 0)) > 0,
    }
    kinds = np.sum(list(has.values()), axis=0)
    total_s = float(steps.duration_s.sum()) or 1.0
    mix = {name: float(steps.duration_s[flag & (kinds == 1)].sum()) / total_s for name, flag in has.items()}
    return {**mix, "mixed": float(steps.duration_s[kinds > 1].sum()) / total_s}


def kv_traffic(steps: StepLog, kv_bytes_per_token: float | None) -> dict[str, float]:
    """KV tokens read by sparse and by full rows, in bytes where the bytes of a token (all layers) are known."""
    totals = dict(zip(FEATURES, steps.features.sum(axis=0).tolist(), strict=True)) if len(steps) else {}
    sparse, full = totals.get("sparse_kv_tokens", 0.0), totals.get("full_kv_tokens", 0.0)
    found = {"sparse_kv_tokens": sparse, "full_kv_tokens": full}
    if kv_bytes_per_token:
        found["kv_bytes_read"] = (sparse + full) * kv_bytes_per_token
    return found


def summarize(run: Run, *, goodput: Mapping[str, float] | None = None) -> dict[str, Any]:
    """All metrics of ``run``; keys of vLLM's serving benchmark where the meaning is the same.

    ``goodput``: limits in seconds as `parse_goodput` returns them.
    """
    requests, steps = run.requests, run.steps
    found = latencies(requests, steps)
    finished = ~np.isnan(requests.finish_s)
    end_s = float((steps.start_s + steps.duration_s).max()) if len(steps) else 0.0
    duration_s = end_s - (float(requests.arrival_s.min()) if len(requests) else 0.0)
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    output, prompt = int(requests.output_tokens.sum()), int(requests.prompt_tokens[finished].sum())
    summary: dict[str, Any] = {
        "duration": duration_s,
        "num_prompts": len(requests),
        "completed": int(finished.sum()),
        "rejected": requests.status.count("rejected"),
        "total_input_tokens": prompt,
        "total_cached_tokens": int(requests.cached_tokens.sum()),
        "total_output_tokens": output,
        "request_throughput": float(finished.sum()) * per_s,
        "output_throughput": output * per_s,
        "total_token_throughput": (output + prompt) * per_s,
        "steps": len(steps),
        "engine_busy_share": float(steps.duration_s.sum()) * per_s,
        **throughput(steps),
    }
    if "launches" in run.config:  # of kernels, by path: that drafts took the sparse one can be read here
        summary["launches"] = dict(run.config["launches"])
    for name, values in (
        ("ttft", found.ttft_s),
        ("tpot", found.tpot_s),
        ("itl", found.itl_chunk_s),
        ("itl_token", found.itl_token_s),
        ("e2el", found.e2e_s),
    ):
        summary.update(spread(values, name))
    if goodput:
        good = meets(goodput, found)
        summary["request_goodput"] = float(good.sum()) * per_s
        summary["goodput_share"] = float(good.mean()) if len(good) else 0.0
        summary["goodput_limits_ms"] = {name: limit_s * 1e3 for name, limit_s in goodput.items()}
    summary.update(acceptance(steps))
    summary["phase_mix"] = phase_mix(steps)
    summary.update(kv_traffic(steps, run.config.get("kv_bytes_per_token")))
    summary["preemptions"] = int(requests.preemptions.sum())
    if run.config.get("lossy"):
        summary["lossy"] = True
    return summary


def oracle_gap(throughput_tok_s: float, oracle_tok_s: float) -> float:
    """Share of the hindsight oracle's throughput that a policy leaves behind: 1 - policy / oracle."""
    if not oracle_tok_s > 0:
        raise UsageError(
            f"oracle throughput {oracle_tok_s} must be positive; run the oracle policy on the same workload"
        )
    return 1.0 - throughput_tok_s / oracle_tok_s


def _running(steps: StepLog) -> NDArray[np.int64]:
    """[steps]: requests under way, from their first row to their last; a request may have none in a step between."""
    request, step = steps.column("request"), steps.step_of_row()
    first, end = np.zeros((2, int(request.max()) + 1), dtype=np.int64)  # of one without rows both stay 0
    first[request[::-1]] = step[::-1]  # written backwards, the earliest stays
    end[request] = step + 1
    begun, ended = (np.bincount(at, minlength=len(steps) + 1) for at in (first, end))
    return np.cumsum(begun - ended)[: len(steps)]


def _per_step(steps: StepLog, values: NDArray[Any]) -> NDArray[np.int64]:
    """[steps]: sum of a row column over each step's rows."""
    running = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return np.diff(running[steps.row_end], prepend=0)
