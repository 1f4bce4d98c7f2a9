"""Tile choices: measured ones from ``tuning/<gpu>.json``, a plain default for GPUs and shapes that nobody measured.

A table is a list of measured points ``{kind, head_dim, itemsize, block_m, items, kv_tokens, block_n, warps, stages,
per_sm, split}``; the nearest point (in log items and log kv_tokens) of the same kind, head_dim, itemsize and block_m
decides.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from aspire.errors import InputError, check_keys
from aspire.fileio import read_json
from aspire_kernels._triton import next_power_of_2

SPARSE, VERIFY, PREFILL = 0, 1, 2
"""Classes of rows, see `aspire_kernels.attention.plan`."""

START_UNITS = {SPARSE: 0, VERIFY: 0, PREFILL: 4}
"""KV tiles that take as long as to begin an item and end it, by class; 0 where items are long."""

KIND_NAMES = ("sparse", "verify", "prefill")
TABLE_FOLDER = Path(__file__).parent.parent / "tuning"


@dataclass(frozen=True)
class Tile:
    """Launch choices of one class of rows."""

    block_m: int  # packed query rows (query tokens x group heads) of a tile
    block_n: int  # KV tokens of a tile
    warps: int
    stages: int  # depth of the software pipeline
    per_sm: int  # programs per multiprocessor when items are cut
    split: bool = True  # cut items into equal shares (else one program per item)
    min_share: int = 2  # smallest share, in KV tiles


@dataclass(frozen=True)
class TunedPoint:
    """One measured point of a tuning table."""

    kind: str
    head_dim: int
    itemsize: int
    block_m: int
    items: int  # rows * kv_heads
    kv_tokens: int  # bound of the tokens a row reads
    block_n: int
    warps: int
    stages: int
    per_sm: int
    split: bool

    def tile(self) -> Tile:
        """The launch choices of this point."""
        return Tile(self.block_m, self.block_n, self.warps, self.stages, self.per_sm, self.split)


def table_name(gpu: str) -> str:
    """File stem of a GPU's table: ``NVIDIA H200`` -> ``h200``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "")).strip("-")


def parse_table(data: Any, source: str) -> tuple[TunedPoint, ...]:
    """Points of a table; raises `UsageError` for unknown keys and `InputError` for missing ones."""
    names = [f.name for f in fields(TunedPoint)]
    points = []
    for entry in data["points"]:
        check_keys(f"tuning table {source}", entry, names)
        missing = [n for n in names if n not in entry]
        if missing:
            raise InputError(f"tuning table {source} lacks '{missing[0]}' in an entry; measure it again with the sweep")
        points.append(TunedPoint(**entry))
    return tuple(points)


_measured_now: dict[str, tuple[TunedPoint, ...]] = {}


def use_table(gpu: str, points: Iterable[TunedPoint]) -> None:
    """Use freshly measured points instead of the file of the GPU called ``gpu``, for the rest of this process."""
    _measured_now[gpu] = tuple(points)
    load_table.cache_clear()
    choose_tile.cache_clear()


@functools.cache
def load_table(gpu: str) -> tuple[TunedPoint, ...]:
    """Measured points of the GPU called ``gpu``; empty if there is no table for it."""
    if gpu in _measured_now:
        return _measured_now[gpu]
    path = TABLE_FOLDER / f"{table_name(gpu)}.json"
    return parse_table(read_json(path, "tuning table"), path.name) if path.exists() else ()


def default_tile(kind: int, head_dim: int, itemsize: int, block_m: int, items: int, kv_tokens: int, sms: int) -> Tile:
    """A choice that fits any GPU: about 16 KiB of K and V in a tile, three stages deep, work cut where items are
    few."""
    row_bytes = 2 * max(64, next_power_of_2(head_dim)) * itemsize
    if kind == PREFILL:
        return Tile(block_m, 64 if row_bytes <= 512 else 32, 8 if block_m >= 128 and head_dim >= 128 else 4, 3, 2)
    block_n = max(16, min(64, 32768 // row_bytes))
    if kind == SPARSE:
        return Tile(block_m, block_n, 4, 3, 4, split=items < 2 * sms and kv_tokens > 1024)
    warps = 8 if block_m >= 128 and head_dim >= 128 else 4
    return Tile(block_m, block_n, warps, 3, 2 if block_m > 32 else 4)


def _distance(point: TunedPoint, items: int, kv_tokens: int) -> float:
    return abs(math.log(point.items / max(1, items))) + abs(math.log(point.kv_tokens / max(1, kv_tokens)))


@functools.cache
def choose_tile(
    gpu: str, sms: int, kind: int, head_dim: int, itemsize: int, block_m: int, items: int, kv_tokens: int
) -> Tile:
    """The tile for ``items`` (rows * kv_heads) of up to ``kv_tokens`` each on the GPU called ``gpu``."""
    same = [
        point
        for point in load_table(gpu)
        if (point.kind, point.head_dim, point.itemsize, point.block_m)
        == (KIND_NAMES[kind], head_dim, itemsize, block_m)
    ]
    if not same:
        return default_tile(kind, head_dim, itemsize, block_m, items, kv_tokens, sms)
    return min(same, key=lambda point: _distance(point, items, kv_tokens)).tile()


def gpu_name(device: torch.device) -> str:
    """Name of the device that tables are keyed by; ``cpu`` for the interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def point_dict(point: TunedPoint) -> dict[str, Any]:
    """JSON form of a point."""
    return asdict(point)
