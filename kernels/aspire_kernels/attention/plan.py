"""Work lists of a forward's attention, computed on the device: no host wait, fixed launch shapes, true lengths at
replay.

Rows fall into three classes, each with its own launch and tile: *sparse* (draft rows), *verify* (full rows of few query
tokens: decode and verification) and *prefill*; with ``AttentionBatch.mass_at_end`` the last token of a prefill row is a
row of the verify class. A *job* is one query tile of a row; its work is counted in KV tiles of
BLOCK_N tokens, for each KV head. All units ``(job, kv head, tile)`` of a class form one line, which is cut into equal
shares, one per program, wherever the cuts fall. So few long rows and many short ragged ones fill the chip alike. To
begin an item takes as long as some tiles do; where items are short (the first query tiles of a prompt) these count as
well. Where the items are of about equal length each is cut into the same number of chunks instead, one per program. A
program that gets part of an item writes a partial result; the one that arrives last merges them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_kernels._triton import LAUNCH, cdiv, next_power_of_2, tl, triton, wait_for_inputs
from aspire_kernels.attention.interface import PAGE_SIZE, AttentionBatch
from aspire_kernels.attention.tuning import PREFILL, SPARSE, START_UNITS, VERIFY, Tile

DESC = 8
"""Integers of a job's descriptor: slot, first query token, query tokens, KV tokens, selected pages (of a full row: its
query tokens before the job's first), tail page, query tile, row."""


# run-time integers wherever the speed allows: a forward of another size needs no new compilation
@triton.jit(
    do_not_specialize=["rows", "max_verify_q", "programs", "min_share", "query_tiles", "block_m", "block_n", "steps"]
)
def plan_kernel(
    row_slot,
    q_start,
    q_len,
    kv_len,
    sparse,
    sel_count,
    tail_page,
    header,  # [4]: jobs, share, units, chunks (parts of every item, or 0: items are cut where shares end)
    desc,  # [jobs, DESC]
    first_unit,  # [jobs + 1] units before each job (of one KV head)
    prog,  # [programs, 4]: job, kv head, place in its item of each program's first unit; its number of units
    rows,
    max_verify_q,
    programs,
    min_share,
    query_tiles,
    block_m,
    block_n,
    steps,  # of the search: 2^steps > jobs
    KIND: tl.constexpr,
    PEEL: tl.constexpr,  # the last query token of a prefill row is a job of the verify class
    SPLIT: tl.constexpr,
    START: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: list the live jobs of one class, then cut their units into shares."""
    wait_for_inputs(PDL)
    jobs = 0
    units_before = 0
    longest = 0
    shortest = 0x7FFFFFFF
    for j0 in range(0, rows * query_tiles, BLOCK_J):
        j = j0 + tl.arange(0, BLOCK_J)
        row = j // query_tiles
        query_tile = j % query_tiles
        inside = row < rows
        length = tl.load(q_len + row, mask=inside, other=0)
        is_sparse = tl.load(sparse + row, mask=inside, other=0)
        tokens = tl.load(kv_len + row, mask=inside, other=0)
        slot = tl.load(row_slot + row, mask=inside, other=0)
        start = tl.load(q_start + row, mask=inside, other=0)
        if KIND == 0:
            mine = (length > 0) & (is_sparse != 0)
            count = tl.load(sel_count + slot, mask=mine, other=0)
            tail = tl.load(tail_page + slot, mask=mine, other=0)
            tokens = (count - tail) * PAGE + tokens
            visible = tokens
        else:
            mine = (length > 0) & (is_sparse == 0)
            count = tl.zeros_like(length)
            tail = tl.zeros_like(length)
            prefill = length > max_verify_q
            if KIND == 1 and PEEL:
                count = tl.where(prefill, length - 1, 0)
                start += count
                length -= count
            elif KIND == 1:
                mine = mine & (prefill == 0)
            else:
                mine = mine & prefill
                if PEEL:
                    length -= 1
                    tokens -= 1
            mine = mine & (query_tile * block_m < length * GROUP)
            # the newest query token of this tile decides how far it reads
            last = tl.minimum(length, ((query_tile + 1) * block_m - 1) // GROUP + 1)
            visible = tokens - length + last
        tiles = tl.where(mine, (visible + block_n - 1) // block_n, 0)
        live = mine.to(tl.int32)
        place = jobs + tl.cumsum(live, 0) - 1
        length_units = tiles + START * live
        before = units_before + tl.cumsum(length_units, 0) - length_units
        tl.store(first_unit + place, before, mask=mine)
        tl.store(desc + place * 8 + 0, slot, mask=mine)
        tl.store(desc + place * 8 + 1, start, mask=mine)
        tl.store(desc + place * 8 + 2, length, mask=mine)
        tl.store(desc + place * 8 + 3, tokens, mask=mine)
        tl.store(desc + place * 8 + 4, count, mask=mine)
        tl.store(desc + place * 8 + 5, tail, mask=mine)
        tl.store(desc + place * 8 + 6, query_tile, mask=mine)
        tl.store(desc + place * 8 + 7, row, mask=mine)
        longest = tl.maximum(longest, tl.max(tiles, 0))
        shortest = tl.minimum(shortest, tl.min(tl.where(mine, tiles, 0x7FFFFFFF), 0))
        jobs += tl.sum(live, 0)
        units_before += tl.sum(length_units, 0)
    tl.store(first_unit + jobs, units_before)
    units = units_before * KV_HEADS
    share = tl.maximum((units + programs - 1) // programs, min_share)
    # a few long items: whoever arrives last merges all parts of one, which takes about a fifth of a tile's time each;
    # share + parts / 5 is least at the square root
    share = tl.maximum(share, tl.ceil(tl.sqrt(longest.to(tl.float32) / 5.0)).to(tl.int32))
    share = tl.maximum(share, START + 1)
    # items of about equal length: the same number of chunks of each, if that costs at most a 16th of balance or one
    # tile (to cut anywhere makes twice as many parts, which is dearer)
    items = jobs * KV_HEADS
    chunks = tl.minimum(programs // tl.maximum(items, 1), (longest + share - 1) // share)
    fits = (items > 0) & (chunks > 0) & (shortest >= chunks)
    chunk_tiles = (longest + chunks - 1) // tl.maximum(chunks, 1)
    fits = fits & ((chunk_tiles * 16 <= share * 17) | (chunk_tiles <= share + 1))
    chunks = tl.where(fits, chunks, 0)
    tl.store(header + 0, jobs)
    tl.store(header + 1, share)
    tl.store(header + 2, units)
    tl.store(header + 3, chunks)
    if SPLIT:
        tl.debug_barrier()  # first_unit was written by other threads of this program
        for g0 in range(0, programs, BLOCK_G):
            g = g0 + tl.arange(0, BLOCK_G)
            real = g < programs
            # 0 for a program without work
            if chunks > 0:
                item = g // chunks
                chunk = g % chunks
                busy = real & (item < items)
                job = tl.where(busy, item // KV_HEADS, 0)
                head = tl.where(busy, item % KV_HEADS, 0)
                begin = tl.load(first_unit + job, mask=busy, other=0)
                tiles = tl.load(first_unit + job + 1, mask=busy, other=START) - begin - START
                tile = chunk * tiles // chunks
                count = (chunk + 1) * tiles // chunks - tile + tl.where((tile == 0) & busy, START, 0)
                at = tile + tl.where(tile > 0, START, 0)
            else:
                unit = g * share
                busy = real & (unit < units)
                low = tl.zeros([BLOCK_G], tl.int32)
                high = tl.zeros([BLOCK_G], tl.int32) + tl.maximum(jobs - 1, 0)
                for _ in range(steps):
                    middle = (low + high + 1) // 2
                    reached = tl.load(first_unit + middle, mask=busy, other=0) * KV_HEADS <= unit
                    low = tl.where(reached, middle, low)
                    high = tl.where(reached, high, middle - 1)
                begin = tl.load(first_unit + low, mask=busy, other=0)
                length_units = tl.maximum(tl.load(first_unit + low + 1, mask=busy, other=1) - begin, 1)
                offset = unit - begin * KV_HEADS
                job = tl.where(busy, low, 0)
                head = tl.where(busy, offset // length_units, 0)
                at = tl.where(busy, offset % length_units, 0)
                count = tl.where(busy, tl.minimum(units - unit, share), 0)
            tl.store(prog + g * 4 + 0, job, mask=real)
            tl.store(prog + g * 4 + 1, head, mask=real)
            tl.store(prog + g * 4 + 2, at, mask=real)
            tl.store(prog + g * 4 + 3, count, mask=real)


@triton.jit
def settle_kernel(header, PDL: tl.constexpr):
    """Does nothing but end after every launch before it."""
    wait_for_inputs(PDL)


@dataclass
class ClassPlan:
    """Work list of one class of rows and the launch that fits it."""

    kind: int
    tile: Tile
    block_m: int
    split: bool  # items may be cut; else one program per item and no combine
    programs: int  # grid of the attention kernel
    header: Tensor  # [4] int32
    desc: Tensor  # [jobs + 1, DESC] int32
    first_unit: Tensor  # [jobs + 1] int32
    prog: Tensor  # [programs, 4] int32
    settled: bool = False  # written before the launch that precedes the attention's, see `paged.prepare`


def query_block(max_queries: int, group: int, limit: int) -> int:
    """BLOCK_M for rows of up to ``max_queries`` query tokens: 16 (the smallest matrix tile), or a power of two from 64
    to ``limit``.

    Not 32: a Hopper warpgroup multiplies 64 rows at once, and page mass of 17 to 32 rows is cheaper that way.
    """
    packed = max_queries * group
    return 16 if packed <= 16 else min(limit, max(64, next_power_of_2(packed)))


def make_plan(
    batch: AttentionBatch,
    kind: int,
    tile: Tile,
    *,
    group: int,
    kv_heads: int,
    multiprocessors: int,
    max_queries: int,
    tokens: int,
) -> ClassPlan:
    """Allocate and compute the work list of class ``kind`` (one launch). ``max_queries`` bounds its query tokens per
    row, ``tokens`` those of all rows."""
    rows, device = batch.rows, batch.row_slot.device
    query_tiles = cdiv(max_queries * group, tile.block_m)
    job_bound = rows * query_tiles
    if kind == PREFILL:
        longer = min(rows, tokens // (int(batch.max_verify_q or 0) + 1))  # rows of this class
        job_bound = min(job_bound, cdiv(tokens * group, tile.block_m) + longer)
    programs = max(1, multiprocessors * tile.per_sm) if tile.split else job_bound * kv_heads
    sizes = (4, (job_bound + 1) * DESC, job_bound + 1, programs * 4 if tile.split else 4)
    offsets = [sum(cdiv(s, 4) * 4 for s in sizes[:i]) for i in range(5)]
    memory = torch.empty(offsets[4], dtype=torch.int32, device=device)
    parts = [memory[offsets[i] : offsets[i] + sizes[i]] for i in range(4)]
    plan = ClassPlan(
        kind=kind,
        tile=tile,
        block_m=tile.block_m,
        split=tile.split,
        programs=programs,
        header=parts[0],
        desc=parts[1].view(-1, DESC),
        first_unit=parts[2],
        prog=parts[3].view(-1, 4),
    )
    plan_kernel[(1,)](
        batch.row_slot,
        batch.q_start,
        batch.q_len,
        batch.kv_len,
        batch.sparse,
        batch.sel_count,
        batch.tail_page,
        plan.header,
        plan.desc,
        plan.first_unit,
        plan.prog,
        rows,
        int(batch.max_verify_q or 0),
        programs,
        max(1, tile.min_share),
        query_tiles,
        tile.block_m,
        tile.block_n,
        max(1, job_bound.bit_length()),
        KIND=kind,
        PEEL=batch.mass_at_end,
        SPLIT=tile.split,
        START=START_UNITS[kind],
        GROUP=group,
        KV_HEADS=kv_heads,
        PAGE=PAGE_SIZE,
        BLOCK_J=128 if job_bound <= 128 else 1024,
        BLOCK_G=512,
        num_warps=8,
        **LAUNCH,
    )
    return plan


def class_queries(batch: AttentionBatch, kind: int) -> int:
    """Bound of the query tokens per row of class ``kind``."""
    if kind == SPARSE:
        return 1
    return int(batch.max_verify_q or 1) if kind == VERIFY else batch.max_q_len
