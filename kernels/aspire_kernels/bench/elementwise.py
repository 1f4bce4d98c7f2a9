"""Times of the kernels beside attention, each with the bytes it must move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from aspire_kernels.backend import get_backend
from aspire_kernels.bench.timing import measure
from aspire_kernels.sample import SamplingRows
from aspire_kernels.select import PageBudget


def _rows(rows: int, temperature: float, top_k: int, top_p: float) -> SamplingRows:
    params = SamplingRows.greedy(rows, "cuda")
    params.seed = torch.arange(rows, device="cuda")
    params.temperature.fill_(temperature)
    params.top_k.fill_(top_k)
    params.top_p.fill_(top_p)
    return params


def elementwise_results(bandwidth: float) -> list[dict[str, Any]]:
    """One result per kernel and shape: microseconds, and the floor at ``bandwidth`` bytes per second in its detail."""
    ops = get_backend("triton", "cuda")
    cases: list[tuple[str, Sequence[Callable[[], Any]], int]] = []

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    x, w, residual = random(128, 576), random(576), random(128, 576)
    cases.append(("add_rms_norm_128x576", [lambda: ops.add_rms_norm(x, residual, w, 1e-5)], 4 * x.numel() * 2))
    gate = random(128, 3072)
    cases.append(("silu_mul_128x1536", [lambda: ops.silu_mul(gate)], 3 * 128 * 1536 * 2))
    qkv = random(128, 15 * 64)
    q, k, v = (t.view(128, -1, 64) for t in qkv.split([576, 192, 192], dim=1))
    positions = torch.arange(128, dtype=torch.int32, device="cuda")
    slots = (torch.randperm(1600, device="cuda")[:128] + 16).int()
    angle = torch.rand(200, 32, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    caches = [random(101, 3, 16, 64) for _ in range(2)]
    cases.append(
        (
            "rope_and_kv_write_128_smol",
            [lambda: ops.rope_and_kv_write(q, k, v, positions, slots, cos, sin, *caches)],
            2 * qkv.numel() * 2,
        )
    )
    for rows, vocab in ((128, 49152), (256, 151936)):
        several = [torch.randn(rows, vocab, device="cuda") * 3 for _ in range(8 if rows == 128 else 4)]
        for name, setting in (
            ("greedy", (0.0, 0, 1.0)),
            ("t1", (1.0, 0, 1.0)),
            ("k50_p09", (0.7, 50, 0.9)),
            ("p095", (0.6, 0, 0.95)),
        ):
            params = _rows(rows, *setting)
            calls = [partial(ops.sample, logits, params) for logits in several]
            cases.append((f"sample_{rows}x{vocab}_{name}", calls, rows * vocab * 4))
    pages, slots_count = 450, 128
    mass = torch.rand(30, 128, pages, device="cuda")
    numbers = torch.arange(128, dtype=torch.int32, device="cuda")
    lengths = torch.full((128,), 7200, dtype=torch.int32, device="cuda")
    table = torch.arange(128 * pages, dtype=torch.int32, device="cuda").view(128, pages)
    lists = torch.zeros(30, slots_count, 24, dtype=torch.int32, device="cuda")
    counts = torch.zeros(2, slots_count, dtype=torch.int32, device="cuda")
    ones = torch.ones_like(numbers)
    budget = PageBudget()
    cases.append(
        (
            "select_30_layers_128x450",
            [lambda: ops.select_pages(mass, numbers, lengths, ones, table, lists, counts[0], counts[1], budget)],
            mass.numel() * 4,
        )
    )
    results = []
    for name, timed, floor_bytes in cases:
        timing = measure(timed, repeats=5, target_ms=1.0)
        results.append(
            {
                "id": f"kernel.time_{name}",
                "value": timing.seconds * 1e6,
                "unit": "us",
                "n": len(timing.samples),
                "spread": timing.spread,
                "detail": {"floor_us": floor_bytes / bandwidth * 1e6, "floor_bytes": floor_bytes},
            }
        )
    return results
