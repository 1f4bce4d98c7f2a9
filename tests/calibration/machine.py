"""A made-up machine whose step times are known exactly: roofline-like, with a launch floor, a staircase and noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from aspire.scheduler.features import Floats, StepFeatures
from aspire_calibration.cells import Cell
from aspire_calibration.plan import PlanLimits, profile_plan
from aspire_calibration.samples import Sample, Samples, SamplesHeader

BUCKETS = (1, 2, 4, *range(8, 257, 8), *range(288, 1025, 32))
LIMITS = PlanLimits(
    max_num_seqs=128,
    max_model_len=32768,
    num_pages=60_000,
    max_num_batched_tokens=4096,
    graph_buckets=BUCKETS,
    d_max=16,
)
AHEAD = replace(LIMITS, async_scheduling=True)
HEADER = SamplesHeader(
    hardware={"name": "made-up GPU"},
    model={"name": "toy", "layers": 30},
    settings={"selector": "verify", "eager": False},
    num_pages=60_000,
    graph_buckets=BUCKETS,
)


def attention_s(kv_tokens: Floats, rows: Floats, bytes_per_token: float = 23e3) -> Floats:
    """Small work is bound by latency, large by bandwidth, with a soft knee and a price per row."""
    floor_s = np.where(rows > 0, 150e-6, 0.0)
    stream_s = kv_tokens * bytes_per_token / 4.2e12 + rows * 0.3e-6
    return (floor_s**4 + stream_s**4) ** 0.25


def true_seconds(f: StepFeatures) -> Floats:
    """GEMM: weights once, then compute. Sparse and full rows apart. Sampling per row of logits. Selection."""
    gemm_s = np.maximum(270e6 / 4.0e12, f.padded_tokens * 2 * 135e6 / 400e12)
    gemm_s = gemm_s + np.ceil(f.padded_tokens / 64) * 3e-6
    logits = f.query_tokens - f.prefill_tokens
    prefill_s = f.prefill_pairs * 4 * 30 * 9 * 64 / 300e12
    select_s = np.where(f.select_rows > 0, 40e-6, 0.0) + f.select_kv_tokens * 0.4e-9
    attention = attention_s(f.full_kv_tokens, f.rows - f.draft_rows) + attention_s(f.sparse_kv_tokens, f.draft_rows)
    return 700e-6 + gemm_s + attention + logits * 0.8e-6 + prefill_s + select_s


def timer(noise: float = 0.01, seed: int = 0, repeats: int = 5, start_s: float = 0.0):  # noqa: ANN201
    """A time_cell for run_profile; ``start_s``: what steps that start from idle take longer."""
    generator = np.random.default_rng(seed)

    def time_cell(cell: Cell) -> Sequence[float]:
        seconds = float(true_seconds(cell.features(BUCKETS))) + start_s * cell.idle
        return list(seconds * np.exp(generator.normal(0.0, noise, repeats)))

    return time_cell


def measured_samples(
    noise: float = 0.01, seed: int = 0, limits: PlanLimits = LIMITS, most: int | None = None, start_s: float = 0.0
) -> Samples:
    """All cells of the plan, timed on the made-up machine."""
    time_cell = timer(noise, seed, start_s=start_s)
    samples = [Sample(c, c.features(BUCKETS), tuple(time_cell(c))) for c in profile_plan(limits, seed=seed)[:most]]
    return Samples(HEADER, {sample.cell.key: sample for sample in samples})
