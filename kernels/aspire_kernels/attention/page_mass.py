"""Page mass from the page scores that the attention kernel leaves behind.

A score is ``log2 sum_{t in page} 2^(x_t)`` of one query row and head; with the row's log-sum-exp it becomes the
softmax mass of the page. Bytes: ``2 * heads * pages`` float32 scores a chosen row written and read once, against ``2 *
16 * kv_heads * head_dim`` elements of K and V a page.
"""

from __future__ import annotations

from aspire_kernels._triton import NATIVE_MATH, exp2, tl, triton, wait_for_inputs  # noqa: F401


@triton.jit
def page_mass_kernel(
    page_mass,  # [rows, max_pages] float32, written for chosen rows
    mass_rows,  # [rows, 2] int32
    score_ptr,  # [rows, 2, heads, score_pages] float32
    lse_ptr,  # [tokens, heads] float32, base 2
    q_start,
    q_len,
    kv_len,
    sparse,
    max_pages,
    score_pages,
    stride_mass,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    EARLY: tl.constexpr,  # rows and what is chosen of them were written before the launch that precedes the attention
    PDL: tl.constexpr,
):
    """Grid: (rows, pages / BLOCK_P). ``mass = mean over chosen queries of max over heads of 2^(score - lse)``."""
    if not EARLY:
        wait_for_inputs(PDL)
    row = tl.program_id(0)
    # loads are issued before the first branch, so that their latencies overlap
    first = tl.load(mass_rows + row * 2)
    last = tl.load(mass_rows + row * 2 + 1)
    start = tl.load(q_start + row)
    length = tl.load(q_len + row)
    is_sparse = tl.load(sparse + row)
    tokens = tl.load(kv_len + row)
    if EARLY:
        wait_for_inputs(PDL)
    if (length == 0) | (is_sparse != 0) | ((first < 0) & (last < 0)):
        return
    pages = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    there = pages * PAGE < tokens
    mass = tl.zeros([BLOCK_P], tl.float32)
    chosen = 0
    for which in tl.static_range(2):
        offset = first if which == 0 else last
        # both offsets may name one query row; its scores stand in place 0
        place = tl.where(offset == first, 0, which)
        if offset >= 0:
            best = tl.zeros([BLOCK_P], tl.float32)
            for h0 in range(0, HEADS, BLOCK_H):
                heads = h0 + tl.arange(0, BLOCK_H)
                real = heads < HEADS
                lse = tl.load(lse_ptr + (start + offset) * HEADS + heads, mask=real, other=0.0)
                line = ((row.to(tl.int64) * 2 + place) * HEADS + heads) * score_pages
                score = tl.load(
                    score_ptr + line[:, None] + pages[None, :],
                    mask=real[:, None] & there[None, :],
                    other=float("-inf"),
                )
                best = tl.maximum(best, tl.max(exp2(score - lse[:, None]), 0))
            mass += best
            chosen += 1
    mass = mass / chosen
    tl.store(page_mass + row.to(tl.int64) * stride_mass + pages, mass, mask=pages < max_pages)
