"""Search of tile choices: every candidate is compiled by worker processes first, then timed on the real workload."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from aspire_kernels._triton import multiprocessors
from aspire_kernels.attention import tuning
from aspire_kernels.attention.plan import query_block
from aspire_kernels.attention.tuning import KIND_NAMES, PREFILL, SPARSE, VERIFY, Tile, TunedPoint
from aspire_kernels.bench.timing import Captured
from aspire_kernels.bench.workloads import LLAMA, SMOL, Heads, Workload

_SHARED_BYTES = 225 * 1024  # shared memory of a multiprocessor that programs can use (sm_90)


@dataclass(frozen=True)
class Point:
    """A workload to tune."""

    shape: Heads
    rows: int
    kv_tokens: int
    q_len: int = 1
    pages: int = 0

    @property
    def kind(self) -> int:
        """Class of its rows."""
        return SPARSE if self.pages else VERIFY if self.q_len <= 17 else PREFILL

    @property
    def block_m(self) -> int:
        """BLOCK_M that its rows get."""
        return query_block(self.q_len, self.shape.heads // self.shape.kv_heads, 16 if self.pages else 128)

    @property
    def label(self) -> str:
        """Short name for progress lines."""
        what = f"{self.pages}p" if self.pages else f"{self.kv_tokens}"
        return f"{KIND_NAMES[self.kind]} {self.shape.name} {self.rows}x{what} q{self.q_len}"


POINTS = (
    Point(SMOL, 128, 7200),
    Point(SMOL, 32, 7200),
    Point(SMOL, 256, 512),
    Point(LLAMA, 32, 16384),
    Point(LLAMA, 8, 100_000),
    Point(LLAMA, 32, 16384, q_len=9),
    Point(SMOL, 128, 7200, q_len=9),
    Point(SMOL, 128, 7200, q_len=17),
    Point(LLAMA, 32, 16384, q_len=17),
    Point(SMOL, 128, 7200, pages=32),
    Point(SMOL, 256, 7200, pages=32),
    Point(SMOL, 32, 7200, pages=32),
    Point(LLAMA, 32, 16384, pages=72),
    Point(LLAMA, 8, 100_000, pages=438),
    Point(SMOL, 1, 8192, q_len=2048),
    Point(LLAMA, 1, 8192, q_len=2048),
)


def candidates(point: Point, wide: bool) -> Iterator[Tile]:
    """Tiles worth trying for a point; shared memory bounds the depth."""
    row_bytes = 2 * max(64, point.shape.head_dim) * 2
    m = point.block_m
    if not wide:  # what wide searches on an H200 ever chose
        tries = [(32, 1), (32, 2), (64, 2), (64, 4)] if m == 16 else [(32, 4), (64, 4), (128, 4)]
        tries = [(64, 4), (64, 8), (128, 8)] if m == 128 else tries
        tries += [(128, 4)] if point.kind == SPARSE else []
        depths: tuple[int, ...] = (2, 3, 4) if point.kind == SPARSE else (3, 4)
    else:
        warp_counts = (1, 2, 4) if m == 16 else (4, 8)
        tries = [(n, w) for n in (32, 64, 128) for w in warp_counts]
        depths = (2, 3, 4, 5) if m <= 32 else (2, 3, 4)
    for block_n, warps in tries:
        for stages in depths:
            shared = row_bytes * block_n * (stages - 1 if m <= 32 else stages) + m * row_bytes // 2
            fit = _SHARED_BYTES // (shared + 1024)
            if fit < 1 or (block_n >= 128 and warps == 1):
                continue
            if m == 16:
                counts = {c for c in (1, 2, 3, 4, 6, 8, 12) if c <= 2 * fit}
            else:
                counts = {c for c in (1, 2, 3, 4) if c <= 2 * fit}
            for per_sm in sorted(counts):
                yield Tile(m, block_n, warps, stages, per_sm)
            if point.kind == SPARSE:  # lengths of full rows differ: uncut, the longest would decide
                yield Tile(m, block_n, warps, stages, 1, split=False)


def _small(point: Point) -> Workload:
    """A tiny workload whose launches need the same binaries as the point's."""
    pages = min(point.pages, 9)
    return Workload(point.shape, [max(256, point.q_len)] * 2, q_len=point.q_len, pages=pages, sets_bytes=1)


def _compile(job: tuple[Point, list[Tile]]) -> int:
    """Worker: build the binaries of some tiles into Triton's disk cache; tiles that cannot be built are skipped."""
    point, tiles = job
    small, built = _small(point), 0
    for tile in tiles:
        try:
            small.prepare({point.kind: tile})
            small.calls()[0]()
            if point.kind == VERIFY:
                small.calls(small.offsets(0, point.q_len - 1))[0]()
            torch.cuda.synchronize()
            built += 1
        except Exception:  # out of shared memory or registers: the timing run reports it again
            continue
    return built


def compile_all(points: tuple[Point, ...], wide: bool, workers: int) -> None:
    """Compile every candidate of every point in ``workers`` processes."""
    binaries = {}
    for point in points:
        for tile in candidates(point, wide):
            binary = (point.shape, point.kind, point.q_len > 1, tile.block_m, tile.block_n, tile.warps, tile.stages)
            binaries.setdefault((*binary, tile.split), (point, tile))
    wanted: dict[Point, list[Tile]] = {}
    for point, tile in binaries.values():
        wanted.setdefault(point, []).append(tile)
    jobs = [(point, tiles[i::8]) for point, tiles in wanted.items() for i in range(8) if tiles[i::8]]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(_compile, jobs, chunksize=1)


def _time(workload: Workload, kind: int, tile: Tile, with_mass: bool = False) -> float:
    workload.prepare({kind: tile})
    calls = workload.calls(workload.offsets(0, workload.q_len - 1) if with_mass else None)
    captured = Captured(calls, 1 if len(calls) > 2 else 3)
    captured.replay_seconds()
    return min(captured.replay_seconds() for _ in range(3))


def sweep(
    points: tuple[Point, ...], *, wide: bool, say: Callable[[str], None], budget_s: float
) -> tuple[list[TunedPoint], list[dict[str, object]]]:
    """Best tile of each point (in time order of trials, within ``budget_s``) and every trial's time."""
    end, best, trials = time.monotonic() + budget_s, [], []
    sms = multiprocessors(torch.device("cuda"))
    for number, point in enumerate(points):
        limit = time.monotonic() + (end - time.monotonic()) / (len(points) - number)
        workload = Workload(point.shape, [point.kv_tokens] * point.rows, q_len=point.q_len, pages=point.pages)
        results: list[tuple[float, Tile]] = []
        tried = list(candidates(point, wide))
        random.Random(0).shuffle(tried)  # a search cut short has still seen every kind
        for tile in tried:
            if results and time.monotonic() > limit:
                break
            try:
                results.append((_time(workload, point.kind, tile), tile))
            except Exception as error:  # a tile that does not fit the chip is no candidate
                say(f"{point.label}: {tile} cannot run: {str(error).splitlines()[0][:80]}")
        if not results:
            say(f"{point.label}: no tile could be timed")
            continue
        results.sort(key=lambda pair: pair[0])
        seconds, tile = results[0]
        mass = float("nan")
        if point.kind == VERIFY:
            # of the tiles that are about as fast, the one that also computes page mass fastest
            slack = 1.015 if point.q_len == 1 else 1.08
            both: list[tuple[float, float, Tile]] = []
            for s, t in results:
                if both and (s > slack * seconds or len(both) == 16):
                    break
                with suppress(Exception):  # page mass may need more shared memory than there is
                    both.append((s + _time(workload, point.kind, t, with_mass=True), s, t))
            total, seconds, tile = min(both, key=lambda entry: entry[0])
            mass = total - seconds
        workload.prepare({point.kind: tile})
        workload.check()
        bound = workload.batch.max_sparse_kv if point.pages else point.kv_tokens
        items = point.rows * point.shape.kv_heads
        best.append(
            TunedPoint(
                KIND_NAMES[point.kind], point.shape.head_dim, 2, tile.block_m, items, bound, tile.block_n, tile.warps,
                tile.stages, tile.per_sm, tile.split,
            )
        )  # fmt: skip
        plain = tuning.default_tile(point.kind, point.shape.head_dim, 2, tile.block_m, items, bound, sms)
        plain_us = {t: s for s, t in results}.get(plain, float("nan")) * 1e6
        say(
            f"{point.label}: {seconds * 1e6:.1f} us, {workload.floor_bytes / seconds / 1e12:.2f} TB/s with "
            f"n{tile.block_n} w{tile.warps} s{tile.stages} x{tile.per_sm} {'cut' if tile.split else 'whole'}"
            f" (default {plain_us:.1f} us; with mass {mass * 1e6:.1f} us; {len(results)} tried)"
        )
        trials += [
            {"point": point.label, "seconds": s, **{k: getattr(t, k) for k in t.__dataclass_fields__}}
            for s, t in results
        ]
        del workload
        torch.cuda.empty_cache()
    return best, trials
