"""Decode-step times of the whole engine beside their byte floor: ``python -m aspire.engine.step_bench --out FILE``.

Random weights of the named shape and random KV; nothing depends on their values. The floor is what must move (weights
once, the KV that is read) over the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch

from aspire.engine.config import EngineConfig
from aspire.engine.llm_engine import LLMEngine
from aspire.engine.timing import StepTimer
from aspire.evidence import write_evidence
from aspire.scheduler import PolicySpec, SelectorSpec
from aspire_calibration import Cell, RowGroup


@dataclass(frozen=True)
class Case:
    """One step to time."""

    id: str
    model: str
    rows: int
    context: int
    kind: str = "ar"  # ar | draft | verify


CASES = (
    Case("step.ar_smol_256x7.9k_ms", "smollm2-135m", 256, 7900),
    Case("step.ar_smol_128x7.9k_ms", "smollm2-135m", 128, 7900),
    Case("step.draft_smol_128_ms", "smollm2-135m", 128, 7200, "draft"),
    Case("step.verify6_smol_128x7.2k_ms", "smollm2-135m", 128, 7200, "verify"),
    Case("step.ar_llama8b_32x16k_ms", "llama-3.1-8b", 32, 16384),
    Case("step.ar_llama8b_8x98k_ms", "llama-3.1-8b", 8, 98304),
)


def copy_bandwidth(device: torch.device, size_bytes: int = 4 << 30, repeats: int = 5) -> float:
    """Bytes a second of a large device-to-device copy, read and written bytes counted; median of ``repeats``."""
    source = torch.randn(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    rates = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        rates.append(2 * size_bytes / (start.elapsed_time(end) * 1e-3))
    return statistics.median(rates[1:])


def cell_of(case: Case, sparse_tokens: int) -> Cell:
    """The profiling cell of a case."""
    if case.kind == "draft":
        return Cell((RowGroup("draft", case.rows, 1, case.context, sparse_tokens),))
    if case.kind == "verify":
        return Cell((RowGroup("verify", case.rows, 6, case.context, select=True),))
    return Cell((RowGroup("verify", case.rows, 1, case.context),))


def weight_bytes(engine: LLMEngine) -> int:
    """Bytes of the weights that a step reads: all matrices once (of a tied head and embedding, one)."""
    weights = engine.loaded.model.weights
    tensors = [tensor for layer in weights.layers for tensor in vars(layer).values() if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*tensors, weights.lm_head, weights.norm))


def measure(cases: list[Case], selector: str, repeats: int) -> list[dict[str, Any]]:
    """Results of ``cases``; cases of one model and size share an engine."""
    results: list[dict[str, Any]] = []
    bandwidth = copy_bandwidth(torch.device("cuda"))
    torch.cuda.empty_cache()
    results.append({"id": "step.copy_bandwidth", "value": bandwidth / 1e12, "unit": "TB/s", "n": 5})
    for model in dict.fromkeys(case.model for case in cases):
        of_model = [case for case in cases if case.model == model]
        policy = PolicySpec(kind="fixed", params={"g": 5}, selector=SelectorSpec(kind=selector))
        for rows in sorted({case.rows for case in of_model}):
            group = [case for case in of_model if case.rows == rows]
            config = EngineConfig(
                model=model,
                load_format="dummy",
                max_num_seqs=rows,
                max_model_len=max(case.context for case in group) + 64 if model != "smollm2-135m" else 8192,
                policy=policy,
                gpu_memory_utilization=0.95,
            )
            engine = LLMEngine(config)
            timer = StepTimer(engine, repeats=repeats, max_seconds=5.0)
            for case in group:
                found = _measure_case(case, engine, timer, bandwidth)
                print("\n".join(_line(row) for row in found), flush=True)
                results += found
            del engine, timer
            gc.collect()  # runner and graphs refer to each other
            torch.cuda.empty_cache()
    return results


def _measure_case(case: Case, engine: LLMEngine, timer: StepTimer, bandwidth: float) -> list[dict[str, Any]]:
    spec = engine.scheduler.policy_spec.selector
    sparse = spec.budget_pages(torch.tensor([-(-case.context // 16)]).numpy())[0] * 16
    cell = cell_of(case, int(sparse))
    timer.time_cell(cell)
    seconds = list(timer.time_cell(cell))
    features = cell.features(engine.scheduler_config.graph_buckets)
    token_bytes = engine.loaded.config.kv_bytes_per_token(engine.loaded.model.dtype.itemsize)
    kv_tokens = float(features.sparse_kv_tokens + features.full_kv_tokens)
    floor = (weight_bytes(engine) + kv_tokens * token_bytes) / bandwidth
    median = statistics.median(seconds)
    gpu = engine.runner.replay_seconds() if engine.runner.uses_graphs else None
    detail = {
        "floor_ms": floor * 1e3,
        "over_floor": median / floor,
        "gpu_ms": None if gpu is None else gpu * 1e3,
        "rows": case.rows,
        "context": case.context,
        "model": case.model,
        "selector": spec.kind,
    }
    spread = (max(seconds) - min(seconds)) * 1e3
    found = [
        {"id": case.id, "value": median * 1e3, "unit": "ms", "n": len(seconds), "spread": spread, "detail": detail}
    ]
    if gpu is not None:
        bubble = max(0.0, 1.0 - gpu / median)
        name = case.id.removesuffix("_ms").replace("step.", "step.host_bubble.")
        found.append({"id": name, "value": bubble, "unit": "of step", "n": len(seconds), "detail": {"of": case.id}})
        if case.id == "step.ar_smol_128x7.9k_ms":
            found.append({**found[-1], "id": "step.host_bubble_smol_128"})
    return found


def main() -> int:
    """Measure and print a table; write the evidence file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--selector", default="verify")
    parser.add_argument("--only", default="", help="measure only ids that contain this")
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("aspire: error: step_bench needs a CUDA GPU; torch sees none", file=sys.stderr)
        return 1
    results = measure([case for case in CASES if options.only in case.id], options.selector, options.repeats)
    write_evidence(options.out, results)
    return 0


def _line(row: dict[str, Any]) -> str:
    detail = row.get("detail", {})
    floor = f"  floor {detail['floor_ms']:8.3f}  gpu {detail['gpu_ms'] or 0:8.3f}" if "floor_ms" in detail else ""
    return f"{row['id']:44s} {row['value']:9.4f} {row['unit']}{floor}"


if __name__ == "__main__":
    sys.exit(main())
