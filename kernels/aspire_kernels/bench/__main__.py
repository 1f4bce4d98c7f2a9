"""``python -m aspire_kernels.bench [--quick] [--sweep] [--table FILE] --out FILE.json``: targets of the kernels,
measured.

Every figure stands beside its floor: the bytes that must move, over the copy bandwidth measured in the same run. With
``--sweep`` tile choices are searched first, written to ``--table``, and used for the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from aspire.errors import AspireError
from aspire.evidence import write_evidence
from aspire.fileio import write_json_atomic
from aspire_kernels._triton import LAUNCH, plain_launches
from aspire_kernels.attention import tuning
from aspire_kernels.attention.tuning import Tile, point_dict, table_name
from aspire_kernels.bench.elementwise import elementwise_results
from aspire_kernels.bench.layers import layer_results
from aspire_kernels.bench.library import library_seconds
from aspire_kernels.bench.sweep import POINTS, compile_all, sweep
from aspire_kernels.bench.timing import Timing, copy_bandwidth, measure, measure_ratio
from aspire_kernels.bench.workloads import LLAMA, SMOL, Heads, Workload

GOALS = {
    "kernel.attn_full_smol_128x7k": 0.95,
    "kernel.attn_full_smol_32x7k": 0.85,
    "kernel.attn_full_llama8b_32x16k": 1.0,
    "kernel.attn_full_llama8b_8x100k": 1.0,
    "kernel.attn_sparse_smol_128x32p": 0.75,
    "kernel.attn_sparse_smol_256x32p": 0.80,
    "kernel.verify9_over_decode1": 1.10,
    "kernel.ragged_over_uniform": 1.10,
    "kernel.page_mass_1row": 1.10,
    "kernel.page_mass_verify_all_layers": 1.12,
}
BANDWIDTH_CASES: tuple[tuple[str, Heads, int, int, int], ...] = (
    ("kernel.attn_full_smol_128x7k", SMOL, 128, 7200, 0),
    ("kernel.attn_full_smol_32x7k", SMOL, 32, 7200, 0),
    ("kernel.attn_full_smol_256x512", SMOL, 256, 512, 0),
    ("kernel.attn_full_llama8b_32x16k", LLAMA, 32, 16384, 0),
    ("kernel.attn_full_llama8b_8x100k", LLAMA, 8, 100_000, 0),
    ("kernel.attn_sparse_smol_128x32p", SMOL, 128, 7200, 32),
    ("kernel.attn_sparse_smol_256x32p", SMOL, 256, 7200, 32),
)


def say(text: str) -> None:
    """A progress line on stderr."""
    print(text, file=sys.stderr, flush=True)


def tile_text(tile: Tile) -> str:
    """Tile choice in short."""
    cut = "cut" if tile.split else "whole"
    return f"m{tile.block_m} n{tile.block_n} w{tile.warps} s{tile.stages} x{tile.per_sm} {cut}"


def bandwidth_result(
    identifier: str, shape: Heads, rows: int, tokens: int, pages: int, copy: Timing, repeats: int, libraries: bool
) -> dict[str, Any]:
    """One attention shape as a share of copy bandwidth."""
    work = Workload(shape, [tokens] * rows, pages=pages)
    work.prepare()
    timing = measure(work.calls(), repeats=repeats)
    rate = work.floor_bytes / timing.seconds
    detail: dict[str, Any] = {
        "us": timing.seconds * 1e6,
        "floor_us": work.floor_bytes / copy.seconds * 1e6,
        "bytes": work.floor_bytes,
        "tb_per_s": rate / 1e12,
        "copy_tb_per_s": copy.seconds / 1e12,
        "relative_error": work.check(),
        "tile": tile_text(work.batch.plan["classes"][0].tile),
    }
    del work
    torch.cuda.empty_cache()
    if libraries:
        flex = identifier == "kernel.attn_full_smol_128x7k"  # its compilation takes many seconds
        detail["library_seconds"] = library_seconds(shape, rows, pages * 16 or tokens, flex=flex)
        torch.cuda.empty_cache()
    return {
        "id": identifier,
        "value": rate / copy.seconds,
        "unit": "of copy bandwidth",
        "n": len(timing.samples),
        "spread": timing.spread,
        "detail": detail,
    }


def ratio_result(identifier: str, pairs: Sequence[tuple[str, Any, Any]], repeats: int) -> dict[str, Any]:
    """The largest of the ratios of some pairs of call lists, each measured by turns."""
    detail: dict[str, Any] = {}
    worst: list[float] = [0.0]
    for name, above, below in pairs:
        up, down, ratios = measure_ratio(above, below, repeats)
        middle = statistics.median(ratios)
        detail[name] = {"us": up.seconds * 1e6, "base_us": down.seconds * 1e6, "ratio": middle}
        if middle > statistics.median(worst):
            worst = ratios
    value = statistics.median(worst)
    spread = (max(worst) - min(worst)) / value
    return {"id": identifier, "value": value, "unit": "x", "n": len(worst), "spread": spread, "detail": detail}


def prepared(shape: Heads, lengths: Sequence[int], **options: Any) -> Workload:
    """A checked workload with its work lists computed."""
    work = Workload(shape, lengths, **options)
    work.prepare()
    work.check()
    return work


def ratio_results(repeats: int) -> list[dict[str, Any]]:
    """Verification against decode, ragged against uniform, page mass against none."""
    results = []
    one, nine = prepared(LLAMA, [16384] * 32), prepared(LLAMA, [16384] * 32, q_len=9)
    results.append(ratio_result("kernel.verify9_over_decode1", [("llama8b", nine.calls(), one.calls())], repeats))
    llama_mass = [("llama8b_32x16k", one.calls(one.offsets(0)), one.calls())]
    llama_all = [("llama8b_32x16k_q9", nine.calls(nine.offsets(0, 8)), nine.calls())]
    small, small9 = prepared(SMOL, [7200] * 128), prepared(SMOL, [7200] * 128, q_len=9)
    smol_mass = [("smol_128x7k", small.calls(small.offsets(0)), small.calls())]
    smol_all = [("smol_128x7k_q9", small9.calls(small9.offsets(0, 8)), small9.calls())]
    results.append(ratio_result("kernel.page_mass_1row", smol_mass + llama_mass, repeats))
    results.append(ratio_result("kernel.page_mass_verify_all_layers", smol_all + llama_all, repeats))
    extra = [("smol_128x7k", small9.calls(), small.calls())]
    results.append(ratio_result("kernel.verify9_over_decode1_smol", extra, repeats))
    mixed = prepared(SMOL, [7200] * 128, q_len=2)
    mixed.batch.q_len[1:] = 1
    mixed.prepare()
    pairs = [
        ("with_page_mass", mixed.calls(mixed.offsets(0)), small.calls(small.offsets(0))),
        ("without", mixed.calls(), small.calls()),
    ]
    results.append(ratio_result("kernel.one_row_of_two_queries_over_none", pairs, repeats))
    del one, nine, small, small9, mixed
    torch.cuda.empty_cache()
    lengths = [1024 + round(i * 15360 / 31) for i in range(32)]
    lengths = [lengths[(i * 13) % 32] for i in range(32)]
    ragged, uniform = prepared(LLAMA, lengths), prepared(LLAMA, [sum(lengths) // 32] * 32)
    pairs = [("llama8b_32_rows", ragged.calls(), uniform.calls())]
    results.append(ratio_result("kernel.ragged_over_uniform", pairs, repeats))
    return results


def launch_results(repeats: int) -> list[dict[str, Any]]:
    """Short attention calls launched plainly against launched with programmatic dependent launch."""
    if not LAUNCH["PDL"]:
        return []
    results = []
    for name, work in (
        ("smol_128x32p", prepared(SMOL, [7200] * 128, pages=32)),
        ("smol_32x7k", prepared(SMOL, [7200] * 32)),
    ):
        early = measure(work.calls(), repeats=repeats)
        with plain_launches():
            plain = measure(work.calls(), repeats=repeats)
        results.append(
            {
                "id": f"kernel.plain_launch_{name}",
                "value": plain.seconds / early.seconds,
                "unit": "x",
                "n": len(plain.samples),
                "spread": plain.spread,
                "detail": {"plain_us": plain.seconds * 1e6, "dependent_us": early.seconds * 1e6},
            }
        )
    return results


def prefill_results(repeats: int) -> list[dict[str, Any]]:
    """Prefill chunks of 2,048 tokens beside the library's causal attention; TFLOP/s of the visible half."""
    results = []
    for shape, tokens in ((SMOL, 2048), (SMOL, 8192), (LLAMA, 2048), (LLAMA, 8192)):
        work = prepared(shape, [tokens], q_len=2048)
        timing = measure(work.calls(), repeats=repeats)
        seen = 2048 * (tokens - 2048) + 2048 * 2049 // 2
        flops = 4 * shape.heads * shape.head_dim * seen
        results.append(
            {
                "id": f"kernel.prefill_{shape.name}_2048of{tokens}",
                "value": flops / timing.seconds / 1e12,
                "unit": "TFLOP/s",
                "n": len(timing.samples),
                "spread": timing.spread,
                "detail": {"us": timing.seconds * 1e6, "tile": tile_text(work.batch.plan["classes"][0].tile)},
            }
        )
    return results


def print_table(results: list[dict[str, Any]]) -> None:
    """Short table on stdout, goals marked."""
    for result in results:
        goal = GOALS.get(result["id"])
        detail = result["detail"]
        mark = ""
        if goal is not None:
            met = result["value"] >= goal if result["unit"].startswith("of") else result["value"] <= goal
            mark = f"goal {goal:<5} {'met' if met else 'MISSED'}"
        us = f"{detail['us']:9.1f} us" if "us" in detail else ""
        floor = f" floor {detail['floor_us']:.1f}" if "floor_us" in detail else ""
        print(
            f"{result['id']:40s} {result['value']:9.3f} {result['unit']:18s} +-{result['spread']:.3f} {us}{floor} "
            f"{detail.get('tile', '')} {mark}"
        )
        for name, value in detail.get("library_seconds", {}).items():
            print(f"    {name:20s} {value * 1e6:.1f} us" if isinstance(value, float) else f"    {name:20s} {value}")
        if result["unit"] == "x":
            print(f"    {json.dumps(detail)}")


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m aspire_kernels.bench", description=__doc__)
    parser.add_argument("--out", required=True, help="evidence file to write")
    parser.add_argument("--quick", action="store_true", help="fewer repeats; no library kernels")
    parser.add_argument("--wide", action="store_true", help="--sweep tries many more tiles")
    parser.add_argument("--no-libraries", action="store_true", help="leave PyTorch's own kernels out")
    parser.add_argument("--sweep", action="store_true", help="search tile choices first")
    parser.add_argument("--table", help="where --sweep writes the tuning table (also printed)")
    parser.add_argument("--budget-seconds", type=float, default=240.0, help="time limit of the sweep's timing runs")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile for the sweep")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("the kernel benchmark needs a CUDA GPU; none is visible", file=sys.stderr)
        return 1
    begun = time.monotonic()
    torch.manual_seed(0)
    repeats = 5 if options.quick else 9
    libraries = not (options.quick or options.no_libraries)
    copy = copy_bandwidth()
    say(f"copy bandwidth {copy.seconds / 1e12:.3f} TB/s")
    if options.sweep:
        compile_all(POINTS, options.wide, options.workers)
        say(f"compiled after {time.monotonic() - begun:.0f} s")
        best, trials = sweep(POINTS, wide=options.wide, say=say, budget_s=options.budget_seconds)
        gpu = torch.cuda.get_device_name()
        table = {"gpu": gpu, "points": [point_dict(point) for point in best]}
        write_json_atomic(options.table or f"{options.out}.table.json", table)
        write_json_atomic(f"{options.out}.trials.json", trials)
        print(f"tuning table for {table_name(gpu)}.json:\n{json.dumps(table)}")
        tuning.use_table(gpu, best)
        say(f"swept after {time.monotonic() - begun:.0f} s")
    results: list[dict[str, Any]] = [
        {
            "id": "kernel.copy_bandwidth",
            "value": copy.seconds / 1e12,
            "unit": "TB/s",
            "n": len(copy.samples),
            "spread": copy.spread,
            "detail": {},
        }
    ]
    for case in BANDWIDTH_CASES:
        results.append(bandwidth_result(*case, copy, repeats, libraries))
        say(f"{results[-1]['id']} {results[-1]['value']:.3f} after {time.monotonic() - begun:.0f} s")
    results += launch_results(repeats)
    results += ratio_results(repeats)
    write_evidence(options.out, results)  # what is measured so far, should the time run out
    say(f"ratios after {time.monotonic() - begun:.0f} s")
    results += prefill_results(repeats)
    results += layer_results(repeats)
    results += elementwise_results(copy.seconds)
    write_evidence(options.out, results)
    print_table(results)
    print(f"wrote {options.out} after {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AspireError as failure:
        print(str(failure), file=sys.stderr)
        sys.exit(failure.exit_code)
