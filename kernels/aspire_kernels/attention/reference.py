"""Reference attention in torch: any device, float32 accumulation; also the production path on the CPU.

Floor: each row reads its KV once, ``2 * kv_tokens * kv_heads * head_dim`` elements, and spends
``4 * q_len * heads * kv_tokens * head_dim`` FLOPs. Query heads that share a KV head are packed as extra query rows, so
K and V are gathered once per row and never expanded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aspire_kernels import counters
from aspire_kernels.attention.interface import PAGE_SIZE, AttentionBatch

_QUERY_BLOCK = 128  # query tokens handled at once: bounds the score matrix of a prefill chunk


def _row_pages(batch: AttentionBatch, slot: int, kv_len: int, sparse: bool) -> tuple[Tensor, int]:
    """Physical pages that a row reads, in reading order, and the number of valid tokens in them."""
    last = -(-kv_len // PAGE_SIZE)
    if not sparse:
        return batch.block_table[slot, :last], kv_len
    count, tail = int(batch.sel_count[slot]), int(batch.tail_page[slot])
    pages = torch.cat((batch.sel_pages[slot, :count], batch.block_table[slot, tail:last]))
    return pages, count * PAGE_SIZE + kv_len - tail * PAGE_SIZE


def _gather(cache: Tensor, pages: Tensor, tokens: int) -> Tensor:
    """``[kv_heads, tokens, head_dim]`` float32 of the listed pages; tokens past the end are never touched."""
    kv_heads, head_dim = cache.shape[1], cache.shape[3]
    chunk = cache[pages.long()]  # [pages, kv_heads, page, head_dim]
    return chunk.permute(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)[:, :tokens].float()


def _page_sums(weights: Tensor, pages: int) -> Tensor:
    """Sum of ``weights [heads, tokens]`` over each page: ``[heads, pages]``."""
    padded = torch.nn.functional.pad(weights, (0, pages * PAGE_SIZE - weights.shape[-1]))
    return padded.view(*weights.shape[:-1], pages, PAGE_SIZE).sum(-1)


def paged_attention(
    q: Tensor,  # [tokens, heads, head_dim]
    k_cache: Tensor,  # [num_pages, kv_heads, page, head_dim]
    v_cache: Tensor,  # [num_pages, kv_heads, page, head_dim]
    batch: AttentionBatch,
    *,
    scale: float,
    page_mass: Tensor | None = None,  # [rows, max_pages] float32, written for chosen rows
    mass_rows: Tensor | None = None,  # [rows, 2] int32: first and last query offset, -1 = none
    out: Tensor | None = None,  # [tokens, heads, head_dim]
) -> Tensor:
    """Attention of every row of ``batch``; returns ``out`` (tokens of no row are zero when ``out`` is not given).

    Page mass of row r, logical page p: for each chosen query offset j (1 or 2 of them, -1 = none) the softmax weights
    of query j are summed inside the page for every query head, the largest head is taken, and the chosen offsets are
    averaged: ``mass[r, p] = mean_j max_h sum_{t in p} softmax(q_jh k_t * scale)_t``. Pages past the row's end get 0.
    Rows of ``page_mass`` whose offsets are both -1, padded rows and sparse rows are left untouched.
    """
    result = torch.zeros_like(q) if out is None else out
    kv_heads = k_cache.shape[1]
    head_dim, group = q.shape[2], q.shape[1] // kv_heads
    rows = zip(
        *(t.tolist() for t in (batch.row_slot, batch.q_start, batch.q_len, batch.kv_len, batch.sparse)), strict=True
    )
    offsets = mass_rows.tolist() if mass_rows is not None and page_mass is not None else None
    for row, (slot, start, length, kv_len, sparse) in enumerate(rows):
        if length == 0:
            continue
        counters.count("attention.reference.sparse" if sparse else "attention.reference.full")
        pages, tokens = _row_pages(batch, slot, kv_len, bool(sparse))
        keys, values = _gather(k_cache, pages, tokens), _gather(v_cache, pages, tokens)
        chosen = [j for j in offsets[row] if j >= 0] if offsets is not None and not sparse else []
        if chosen and page_mass is not None:
            page_mass[row].zero_()
        for first in range(0, length, _QUERY_BLOCK):
            block = min(_QUERY_BLOCK, length - first)
            # the newest query of this block sees `visible` tokens; earlier ones see one less each
            visible = tokens - length + first + block
            queries = q[start + first : start + first + block].view(block, kv_heads, group, head_dim)
            packed = queries.permute(1, 0, 2, 3).reshape(kv_heads, block * group, head_dim).float() * scale
            scores = (packed @ keys[:, :visible].transpose(1, 2)).view(kv_heads, block, group, visible)
            if block > 1:
                ends = torch.arange(visible - block, visible, device=q.device)
                hidden = torch.arange(visible, device=q.device)[None, :] > ends[:, None]
                scores.masked_fill_(hidden[None, :, None, :], float("-inf"))
            weights = torch.softmax(scores, dim=-1)
            mixed = weights.view(kv_heads, block * group, visible) @ values[:, :visible]
            target = result[start + first : start + first + block].view(block, kv_heads, group, head_dim)
            target.copy_(mixed.view(kv_heads, block, group, head_dim).permute(1, 0, 2, 3))
            for j in chosen:
                if page_mass is not None and first <= j < first + block:
                    sums = _page_sums(
                        weights[:, j - first].reshape(kv_heads * group, visible), -(-visible // PAGE_SIZE)
                    )
                    page_mass[row, : sums.shape[1]] += sums.max(dim=0).values / len(chosen)
    return result
