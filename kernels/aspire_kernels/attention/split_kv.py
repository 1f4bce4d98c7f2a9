"""The attention kernel: each program walks its share of ``(job, kv head, KV tile)`` units and keeps a running softmax.

Bytes: K and V of every unit once, ``2 * BLOCK_N * head_dim`` elements a unit, whatever the number of query rows. All
query rows that share the KV head (query tokens x group heads) form one matrix operand of BLOCK_M rows.
Softmax runs in base 2: scores are multiplied by ``scale * log2(e)`` inside the exponential's fused multiply-add.
An item that a share boundary cuts leaves one part per program; the program that arrives last merges them.
"""

from __future__ import annotations

from aspire_kernels._triton import (  # noqa: F401
    NATIVE_MATH,
    begin_beside,
    end_beside,
    exp2,
    log2,
    tl,
    triton,
    wait_for_inputs,
)


@triton.jit
def _page_of(place, pages, table, list_, sel_count, tail, SPARSE: tl.constexpr):
    """Physical pages at the places ``place`` of the reading order; 0 past ``pages`` (never read from)."""
    there = place < pages
    if SPARSE:
        listed = place < sel_count
        chosen = tl.load(list_ + place, mask=there & listed, other=0)
        return chosen + tl.load(table + (tail - sel_count) + place, mask=there & (place >= sel_count), other=0)
    return tl.load(table + place, mask=there, other=0)


@triton.jit
def _walk(
    acc,
    m_i,
    l_i,
    page,  # [BLOCK_N] physical page of each token of tile t0
    q,
    k_base,
    v_base,
    table,
    list_,
    sel_count,
    tail,
    limit,  # tokens that exist for this job
    sees,  # [BLOCK_M] tokens that each query row sees
    score_out,  # [BLOCK_M] pointers of the page scores' rows
    score_mask,  # [BLOCK_M]
    stride_page,
    scale_log2,
    t0,
    t1,
    SPARSE: tl.constexpr,
    MASKED: tl.constexpr,
    MASS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Running softmax over KV tiles t0..t1-1. MASKED: some query row may not see every token of a tile."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    pages = (limit + PAGE - 1) // PAGE
    place = t0 * (BLOCK_N // PAGE) + offs_n // PAGE
    in_page = (offs_n % PAGE) * HEAD_DIM
    for t in range(t0, t1):
        n = t * BLOCK_N + offs_n
        # page ids are fetched one tile ahead, so that no KV load waits for its address
        row = page.to(tl.int64) * stride_page + in_page
        place += BLOCK_N // PAGE
        page = _page_of(place, pages, table, list_, sel_count, tail, SPARSE)
        there = (n < limit)[:, None] if BLOCK_D == HEAD_DIM else (n < limit)[:, None] & (offs_d < HEAD_DIM)[None, :]
        k = tl.load(k_base + row[:, None] + offs_d[None, :], mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            s = tl.where(n[None, :] < sees[:, None], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1) * scale_log2)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        p = exp2(s * scale_log2 - m_safe[:, None])
        alpha = exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = tl.load(v_base + row[:, None] + offs_d[None, :], mask=there, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m_i = m_new
        if MASS:
            sums = tl.sum(tl.reshape(p, (BLOCK_M, BLOCK_N // PAGE, PAGE)), 2)
            logical = t * (BLOCK_N // PAGE) + tl.arange(0, BLOCK_N // PAGE)
            stored = score_mask[:, None] & (logical < pages)[None, :]
            tl.store(score_out[:, None] + logical[None, :], log2(sums) + m_safe[:, None], mask=stored)
    return acc, m_i, l_i, page


@triton.jit
def _descriptor(desc, job):
    """Slot, first query token, query tokens, KV tokens, selected pages (of a full row: its query tokens before the
    job), tail page, query tile and row of a job."""
    d = desc + job * 8
    return (
        tl.load(d).to(tl.int64),
        tl.load(d + 1),
        tl.load(d + 2),
        tl.load(d + 3),
        tl.load(d + 4),
        tl.load(d + 5),
        tl.load(d + 6),
        tl.load(d + 7).to(tl.int64),
    )


@triton.jit
def _merge(
    part_acc,
    part_ml,
    before,
    parts,
    rows,  # [ROWS] places of query rows in the tile
    count,  # query rows that exist in the tile
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Sum of an item's parts, those of programs ``before .. before + parts - 1``: accumulator, maximum, denominator.

    The loads of PARTS parts are in flight at once, since each waits for L2. They are unrolled because one load of all
    of them, reduced over the parts, lays the parts out over warps and spills.
    """
    offs_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    for p0 in range(0, parts, PARTS):
        for u in tl.static_range(PARTS):
            i = p0 + u
            # of its first program it is the last item (place 1), of the others the first (place 0)
            part = (2 * (before + i) + tl.where(i == 0, 1, 0)).to(tl.int64)
            there = rows < tl.where(i < parts, count, 0)
            ml_at = part_ml + part * (2 * BLOCK_M) + rows
            # not from L1: other multiprocessors wrote them
            m_p = tl.load(ml_at, mask=there, other=float("-inf"), cache_modifier=".cg")
            l_p = tl.load(ml_at + BLOCK_M, mask=there, other=0.0, cache_modifier=".cg")
            at = part * (BLOCK_M * BLOCK_D) + rows[:, None] * BLOCK_D + offs_d[None, :]
            acc_p = tl.load(part_acc + at, mask=there[:, None], other=0.0, cache_modifier=".cg")
            m_new = tl.maximum(m_i, m_p)
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            weight = exp2(m_p - m_safe)
            keep = exp2(m_i - m_safe)
            l_i = l_i * keep + weight * l_p
            acc = acc * keep[:, None] + weight[:, None] * acc_p
            m_i = m_new
    return acc, m_i, l_i


@triton.jit(do_not_specialize=["score_pages", "stride_table", "stride_list"])
def attention_kernel(
    q_ptr,  # [tokens, heads, head_dim]
    k_ptr,  # [num_pages, kv_heads, page, head_dim]
    v_ptr,
    out_ptr,  # [tokens, heads, head_dim]
    block_table,
    sel_pages,
    header,
    desc,
    prog,
    arrivals,  # [programs] int32, zero before and after: parts of a cut item that are written, at its first program
    part_acc,  # [2 * programs, BLOCK_M, BLOCK_D] float32
    part_ml,  # [2 * programs, 2, BLOCK_M] float32
    lse_ptr,  # [tokens, heads] float32 (MASS)
    score_ptr,  # [rows, 2, heads, score_pages] float32 (MASS)
    mass_rows,  # [rows, 2] int32 (MASS)
    score_pages,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_page,
    stride_table,
    stride_list,
    scale_log2,
    SPARSE: tl.constexpr,
    SPLIT: tl.constexpr,
    START: tl.constexpr,  # units before the first tile of an item
    CAUSAL: tl.constexpr,  # rows may hold more than one query token
    MASS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
    TWO_LOOPS: tl.constexpr,  # mask only the tiles that need it
    MERGE_ROWS: tl.constexpr,  # query rows merged at once, a power of two
    MERGE_PARTS: tl.constexpr,  # parts merged at once
    EARLY: tl.constexpr,  # work lists and pages were written before the launch that precedes this one
    BESIDE: tl.constexpr,  # that launch attends for other rows: this one runs beside it
    PDL: tl.constexpr,
):
    """Grid: programs (SPLIT) or jobs * kv heads."""
    if BESIDE:
        begin_beside(PDL)
    elif not EARLY:
        wait_for_inputs(PDL)
    pid = tl.program_id(0)
    # loads are issued before the first branch, so that their latencies overlap
    if SPLIT:
        share = tl.load(header + 1)
        chunks = tl.load(header + 3)
        job = tl.load(prog + pid * 4)
        head = tl.load(prog + pid * 4 + 1)
        at = tl.load(prog + pid * 4 + 2)  # units of the item before this program's
        remaining = tl.load(prog + pid * 4 + 3)
        remaining = tl.where(at + remaining > START, remaining, 0)  # the program after this one begins the item
        tile = tl.maximum(at - START, 0)
        unit = pid * share
        slot, start, length, tokens, sel_count, tail, query_tile, row = _descriptor(desc, job)
    else:
        job = pid // KV_HEADS
        head = pid % KV_HEADS
        at = 0
        tile = 0
        jobs = tl.load(header)
        slot, start, length, tokens, sel_count, tail, query_tile, row = _descriptor(desc, job)
        remaining = tl.where(job < jobs, 1, 0)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    places = tl.arange(0, BLOCK_N) // PAGE
    held = tl.where(remaining > 0, (tokens + PAGE - 1) // PAGE, 0)  # no job: nothing is read
    table = block_table + slot * stride_table
    list_ = sel_pages + slot * stride_list
    page = _page_of(tile * (BLOCK_N // PAGE) + places, held, table, list_, sel_count, tail, SPARSE)
    if EARLY and not BESIDE:
        # whatever the launch before this one wrote is read below here only: q, and K and V of the newest tokens
        wait_for_inputs(PDL)
    while remaining > 0:
        first_m = query_tile * BLOCK_M
        query = (first_m + offs_m) // GROUP
        member = (first_m + offs_m) % GROUP
        valid = query < length
        if CAUSAL:
            last = tl.minimum(length, (first_m + BLOCK_M - 1) // GROUP + 1)
            limit = tokens - length + last
            sees = tl.where(valid, tokens - length + 1 + query, limit)
        else:
            limit = tokens
            sees = tl.zeros([BLOCK_M], tl.int32) + limit
        tiles = (limit + BLOCK_N - 1) // BLOCK_N
        end = tl.minimum(tiles, at + remaining - START) if SPLIT else tiles
        in_head = head * GROUP + member
        q_mask = valid[:, None] if HEAD_DIM == BLOCK_D else valid[:, None] & (offs_d < HEAD_DIM)[None, :]
        q_at = q_ptr + (start + query).to(tl.int64)[:, None] * stride_qt + in_head[:, None] * stride_qh
        q = tl.load(q_at + offs_d[None, :], mask=q_mask, other=0.0)
        score_at = score_ptr + in_head.to(tl.int64)
        score_mask = valid
        if MASS:
            first_row = tl.load(mass_rows + row * 2) - sel_count
            last_row = tl.load(mass_rows + row * 2 + 1) - sel_count
            which = tl.where(query == first_row, 0, 1)
            score_mask = valid & ((query == first_row) | (query == last_row))
            score_at = score_ptr + ((row * 2 + which) * HEADS + in_head) * score_pages
        k_base = k_ptr + head * (PAGE * HEAD_DIM)
        v_base = v_ptr + head * (PAGE * HEAD_DIM)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        if TWO_LOOPS:
            # the first query row of the tile sees the fewest tokens
            whole = tl.maximum(tile, tl.minimum(end, (tokens - length + 1 + first_m // GROUP) // BLOCK_N))
            acc, m_i, l_i, page = _walk(
                acc, m_i, l_i, page, q, k_base, v_base, table, list_, sel_count, tail, limit, sees, score_at,
                score_mask, stride_page, scale_log2, tile, whole, SPARSE, False, MASS, HEAD_DIM, BLOCK_D, BLOCK_M,
                BLOCK_N, PAGE, PRECISION,
            )  # fmt: skip
            acc, m_i, l_i, page = _walk(
                acc, m_i, l_i, page, q, k_base, v_base, table, list_, sel_count, tail, limit, sees, score_at,
                score_mask, stride_page, scale_log2, whole, end, SPARSE, True, MASS, HEAD_DIM, BLOCK_D, BLOCK_M,
                BLOCK_N, PAGE, PRECISION,
            )  # fmt: skip
        else:
            acc, m_i, l_i, page = _walk(
                acc, m_i, l_i, page, q, k_base, v_base, table, list_, sel_count, tail, limit, sees, score_at,
                score_mask, stride_page, scale_log2, tile, end, SPARSE, True, MASS, HEAD_DIM, BLOCK_D, BLOCK_M,
                BLOCK_N, PAGE, PRECISION,
            )  # fmt: skip
        entire = (tile == 0) & (end == tiles)
        if entire:
            out = acc / l_i[:, None]
            out_at = out_ptr + (start + query).to(tl.int64)[:, None] * stride_ot + in_head[:, None] * stride_oh
            tl.store(out_at + offs_d[None, :], out.to(out_ptr.dtype.element_ty), mask=q_mask)
            if MASS:
                tl.store(lse_ptr + (start + query) * HEADS + in_head, m_i + log2(l_i), mask=valid)
        if SPLIT:
            if entire == 0:
                # at most two parts a program: place 0 of an item begun before it, 1 of one that goes on after it
                part = 2 * pid.to(tl.int64) + tl.where(tile == 0, 1, 0)
                part_at = part_acc + part * (BLOCK_M * BLOCK_D) + offs_m[:, None] * BLOCK_D + offs_d[None, :]
                tl.store(part_at, acc, mask=valid[:, None])
                tl.store(part_ml + part * (2 * BLOCK_M) + offs_m, m_i, mask=valid)
                tl.store(part_ml + part * (2 * BLOCK_M) + BLOCK_M + offs_m, l_i, mask=valid)
                tl.debug_barrier()  # all threads' stores come before the arrival of this program
                first = unit - at + START
                before = first // share
                parts = (first + tiles - 1) // share - before + 1
                if chunks > 0:
                    before = pid // chunks * chunks
                    parts = chunks
                if tl.atomic_add(arrivals + before, 1, sem="acq_rel") == parts - 1:
                    tl.store(arrivals + before, 0)
                    count = tl.minimum(length * GROUP - first_m, BLOCK_M)
                    for r0 in range(0, count, MERGE_ROWS):
                        rows = r0 + tl.arange(0, MERGE_ROWS)
                        query_r = (first_m + rows) // GROUP
                        head_r = head * GROUP + (first_m + rows) % GROUP
                        valid_r = rows < count
                        acc_r, m_r, l_r = _merge(
                            part_acc, part_ml, before, parts, rows, count, BLOCK_D, BLOCK_M, MERGE_ROWS, MERGE_PARTS
                        )
                        at_r = (start + query_r).to(tl.int64)[:, None] * stride_ot + head_r[:, None] * stride_oh
                        stored = valid_r[:, None] & (offs_d < HEAD_DIM)[None, :]
                        out = (acc_r / l_r[:, None]).to(out_ptr.dtype.element_ty)
                        tl.store(out_ptr + at_r + offs_d[None, :], out, mask=stored)
                        if MASS:
                            tl.store(lse_ptr + (start + query_r) * HEADS + head_r, m_r + log2(l_r), mask=valid_r)
            done = end + START - at
            unit += done
            remaining -= done
            remaining = tl.where(remaining > START, remaining, 0)
            at = 0
            tile = 0
            head += 1
            if head == KV_HEADS:
                head = 0
                job += 1
                slot, start, length, tokens, sel_count, tail, query_tile, row = _descriptor(desc, job)
                table = block_table + slot * stride_table
                list_ = sel_pages + slot * stride_list
            held = tl.where(remaining > 0, (tokens + PAGE - 1) // PAGE, 0)
            page = _page_of(places, held, table, list_, sel_count, tail, SPARSE)
        else:
            remaining = 0
    if BESIDE:
        end_beside(PDL)
