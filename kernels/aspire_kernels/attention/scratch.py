"""How much scratch attention can take: `paged` allocates it when first needed, a KV pool is sized before that."""

from __future__ import annotations

from aspire_kernels._triton import cdiv, next_power_of_2
from aspire_kernels.attention.interface import MAX_VERIFY_QUERIES, PAGE_SIZE
from aspire_kernels.attention.plan import query_block
from aspire_kernels.attention.tuning import KIND_NAMES, PREFILL, SPARSE, VERIFY, default_tile, load_table

_QUERIES = {SPARSE: (1,), VERIFY: tuple(range(1, MAX_VERIFY_QUERIES + 1)), PREFILL: (MAX_VERIFY_QUERIES + 1, 128)}
_KEPT = 2  # outgrown scratch is kept for the graphs that point into it: sizes of 1, 2, 4 .. n add up to 2 n


def scratch_bytes(
    gpu: str,
    multiprocessors: int,
    *,
    rows: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_kv: int,
    itemsize: int,
) -> int:
    """Bound of the bytes of all `paged` scratch on the GPU called ``gpu``, for forwards of up to ``rows`` rows,
    ``tokens`` query tokens and ``max_kv`` KV tokens a row, with page mass taken."""
    block_d = max(16, next_power_of_2(head_dim))
    elements = tokens * heads + rows * 2 * heads * cdiv(max_kv, PAGE_SIZE)  # log-sum-exps, scores of page mass
    for kind in (SPARSE, VERIFY, PREFILL):
        widths = {query_block(queries, heads // kv_heads, 16 if kind == SPARSE else 128) for queries in _QUERIES[kind]}
        elements += max(
            multiprocessors * per_sm * (2 * block_m * block_d + 4 * block_m + 1)
            for block_m in widths
            for per_sm in _programs_per_sm(gpu, multiprocessors, kind, head_dim, itemsize, block_m)
        )
    return _KEPT * 4 * elements


def _programs_per_sm(gpu: str, multiprocessors: int, kind: int, head_dim: int, itemsize: int, block_m: int) -> set[int]:
    """Programs on a multiprocessor in each tile that may be chosen and leaves partial results; {0} if none does."""
    shape = (KIND_NAMES[kind], head_dim, itemsize, block_m)
    measured = [
        point.tile()
        for point in load_table(gpu)
        if (point.kind, point.head_dim, point.itemsize, point.block_m) == shape
    ]
    # few long items: where the default cuts most
    tiles = measured or [default_tile(kind, head_dim, itemsize, block_m, 1, 1 << 20, multiprocessors)]
    return {tile.per_sm for tile in tiles if tile.split} or {0}
