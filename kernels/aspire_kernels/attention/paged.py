"""Launches of paged attention: work lists, the attention kernel per class of rows, combine, page mass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aspire.errors import UsageError
from aspire_kernels import counters
from aspire_kernels._triton import LAUNCH, cdiv, multiprocessors, next_power_of_2
from aspire_kernels.attention.interface import PAGE_SIZE, AttentionBatch
from aspire_kernels.attention.page_mass import page_mass_kernel
from aspire_kernels.attention.plan import ClassPlan, class_queries, make_plan, query_block, settle_kernel
from aspire_kernels.attention.split_kv import attention_kernel
from aspire_kernels.attention.tuning import (
    KIND_NAMES,
    PREFILL,
    SPARSE,
    START_UNITS,
    VERIFY,
    Tile,
    choose_tile,
    gpu_name,
)

_BLOCK_M_LIMIT = {SPARSE: 16, VERIFY: 128, PREFILL: 128}
_workspaces: dict[tuple[torch.device, str], list[Tensor]] = {}


def _workspace(device: torch.device, purpose: str, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeroed scratch shared by all forwards of a device. Outgrown ones are kept: captured graphs may point into
    them."""
    kept = _workspaces.setdefault((device, purpose), [])
    if not kept or kept[-1].numel() < elements:
        kept.append(torch.zeros(elements, dtype=dtype, device=device))
    return kept[-1]


def workspace_bytes() -> int:
    """Bytes held in scratch by attention on all devices, for the account of device memory."""
    return sum(4 * tensor.numel() for kept in _workspaces.values() for tensor in kept)


def classes_of(batch: AttentionBatch) -> list[int]:
    """Classes of rows that the batch's host bounds allow, those of long items first.

    Classes run beside each other. The programs of the first are spread evenly over the multiprocessors; those of the
    next go where there is room, and programs that share long work equally must not crowd on some of them.
    """
    present = []
    if batch.has_prefill:
        present.append(PREFILL)
    if batch.has_full and (int(batch.max_verify_q or 0) > 0 or (batch.has_prefill and batch.mass_at_end)):
        present.append(VERIFY)
    if batch.has_sparse:
        present.append(SPARSE)
    return present


def plan_classes(
    batch: AttentionBatch,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    tokens: int,
    tiles: dict[int, Tile] | None = None,
) -> list[ClassPlan]:
    """Work lists of every class; ``tiles`` overrides the tuned choice by class."""
    device = batch.row_slot.device
    group, sms = heads // kv_heads, multiprocessors(device)
    plans = []
    for kind in classes_of(batch):
        # a forward of `tokens` query tokens has no longer row
        queries = min(class_queries(batch, kind), max(1, tokens))
        block_m = query_block(queries, group, _BLOCK_M_LIMIT[kind])
        bound = batch.max_sparse_kv if kind == SPARSE else batch.max_full_kv
        tile = (tiles or {}).get(kind) or choose_tile(
            gpu_name(device), sms, kind, head_dim, dtype.itemsize, block_m, batch.rows * kv_heads, bound
        )
        plans.append(
            make_plan(
                batch,
                kind,
                tile,
                group=group,
                kv_heads=kv_heads,
                multiprocessors=sms,
                max_queries=queries,
                tokens=tokens,
            )
        )
    return plans


def prepare(
    batch: AttentionBatch,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    tokens: int,
    tiles: dict[int, Tile] | None = None,
) -> None:
    """Compute the work lists once for all layers of a forward (else every `paged_attention` computes its own).

    They hold for the values in the batch's tensors at this moment: call it again (inside the captured graph) when
    lengths, slots or selections' counts have changed. Another layer's ``sel_pages`` needs no new call. Block table and
    page lists may change between layers, but some other launch must lie between that and the next attention, which
    reads them while the launch before it still runs (in a forward rope and the KV write always do).
    """
    plans = plan_classes(
        batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, tokens=tokens, tiles=tiles
    )
    for plan in plans:
        # a launch between the work lists and their first reader, so that the reader may begin before its predecessor
        # has ended
        plan.settled = True
    if plans:
        settle_kernel[(1,)](plans[0].header, num_warps=1, **LAUNCH)
    batch.plan["classes"] = plans


def paged_attention(
    q: Tensor,  # [tokens, heads, head_dim], head_dim contiguous
    k_cache: Tensor,  # [num_pages, kv_heads, page, head_dim], contiguous
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    page_mass: Tensor | None = None,  # [rows, max_pages] float32
    mass_rows: Tensor | None = None,  # [rows, 2] int32
    out: Tensor | None = None,
    tiles: dict[int, Tile] | None = None,
) -> Tensor:
    """Same function as `reference.paged_attention`; tokens of no row are left unwritten (not zeroed).

    Raises `UsageError` for layouts or types that the kernel does not read.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    _check(q, k_cache, v_cache, heads, kv_heads, head_dim)
    result = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    plans = batch.plan.get("classes") if tiles is None else None
    if plans is None:
        plans = plan_classes(
            batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=q.dtype, tokens=tokens, tiles=tiles
        )
    with_mass = page_mass is not None and mass_rows is not None
    lse = scores = None
    score_pages = 0
    if with_mass and page_mass is not None:
        score_pages = min(page_mass.shape[1], cdiv(batch.max_full_kv, PAGE_SIZE))
        lse = _workspace(q.device, "lse", tokens * heads)
        scores = _workspace(q.device, "scores", batch.rows * 2 * heads * score_pages)
    for plan in plans:
        mass_here = with_mass and (plan.kind == VERIFY or (plan.kind == PREFILL and not batch.mass_at_end))
        beside = plan is not plans[0]
        _launch_class(
            plan, q, k_cache, v_cache, result, batch, scale, lse, scores, mass_rows, score_pages, mass_here, beside
        )
    if with_mass and page_mass is not None:
        block_p = 64 if q.device.type == "cuda" else 256
        page_mass_kernel[(batch.rows, cdiv(page_mass.shape[1], block_p))](
            page_mass,
            mass_rows,
            scores,
            lse,
            batch.q_start,
            batch.q_len,
            batch.kv_len,
            batch.sparse,
            page_mass.shape[1],
            score_pages,
            page_mass.stride(0),
            HEADS=heads,
            PAGE=PAGE_SIZE,
            BLOCK_H=min(16, next_power_of_2(heads)),
            BLOCK_P=block_p,
            EARLY=all(plan.settled for plan in plans),
            num_warps=4,
            **LAUNCH,
        )
        counters.count("attention.triton.page_mass")
    return result


def _launch_class(
    plan: ClassPlan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    batch: AttentionBatch,
    scale: float,
    lse: Tensor | None,
    scores: Tensor | None,
    mass_rows: Tensor | None,
    score_pages: int,
    with_mass: bool,
    beside: bool,
) -> None:
    _, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    tile, block_d = plan.tile, max(16, next_power_of_2(head_dim))
    part_acc = part_ml = arrivals = plan.header
    if plan.split:
        # of each class its own: classes run beside each other
        name = KIND_NAMES[plan.kind]
        part_acc = _workspace(q.device, f"parts.{name}", 2 * plan.programs * plan.block_m * block_d)
        part_ml = _workspace(q.device, f"part_ml.{name}", 4 * plan.programs * plan.block_m)
        arrivals = _workspace(q.device, f"arrivals.{name}", plan.programs, torch.int32)
    lse = lse if with_mass and lse is not None else plan.header
    queries = class_queries(batch, plan.kind)
    merge_rows, merge_parts = _merge_shape(plan.kind, tile.warps, queries * (heads // kv_heads), block_d)
    attention_kernel[(plan.programs,)](
        q,
        k_cache,
        v_cache,
        out,
        batch.block_table,
        batch.sel_pages,
        plan.header,
        plan.desc,
        plan.prog,
        arrivals,
        part_acc,
        part_ml,
        lse,
        scores if with_mass else plan.header,
        mass_rows if with_mass else plan.header,
        score_pages,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        k_cache.stride(0),
        batch.block_table.stride(0),
        batch.sel_pages.stride(0),
        scale * math.log2(math.e),
        SPARSE=plan.kind == SPARSE,
        SPLIT=plan.split,
        START=START_UNITS[plan.kind],
        CAUSAL=queries > 1,
        MASS=with_mass,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=plan.block_m,
        BLOCK_N=tile.block_n,
        PAGE=PAGE_SIZE,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        TWO_LOOPS=plan.block_m >= 64,
        MERGE_ROWS=merge_rows,
        MERGE_PARTS=merge_parts,
        EARLY=plan.settled,
        BESIDE=beside,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **_register_limit(plan),
        **LAUNCH,
    )
    counters.count(f"attention.triton.{KIND_NAMES[plan.kind]}")


def _merge_shape(kind: int, warps: int, query_rows: int, block_d: int) -> tuple[int, int]:
    """Query rows and parts of a cut item that are merged at once, 64 values a thread: more would spill. Prompts have
    many rows in few parts, verifications few rows in many."""
    rows = min(64 if kind == PREFILL else 32, next_power_of_2(query_rows))
    return rows, max(1, min(8, 64 * 32 * warps // (rows * block_d)))


def _register_limit(plan: ClassPlan) -> dict[str, int]:
    """Registers of a thread such that the programs meant to share a multiprocessor all fit, where that spills next to
    nothing: one that does not fit runs after the others, and they are half or a third of the work."""
    limit = 65536 // (32 * plan.tile.per_sm * plan.tile.warps) // 8 * 8
    return {"maxnreg": limit} if plan.split and 168 <= limit < 255 else {}


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, heads: int, kv_heads: int, head_dim: int) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or k_cache.dtype != q.dtype:
        raise UsageError(
            f"q is {q.dtype} and the KV cache {k_cache.dtype}; both must be the same of float16, bfloat16, float32"
        )
    if heads % kv_heads or heads // kv_heads > 16:
        raise UsageError(f"{heads} query heads over {kv_heads} KV heads: the group must be whole and at most 16")
    if k_cache.shape[2] != PAGE_SIZE or not k_cache.is_contiguous() or not v_cache.is_contiguous():
        raise UsageError(f"the KV cache must be contiguous [num_pages, kv_heads, {PAGE_SIZE}, head_dim]")
    if head_dim > 256 or q.stride(2) != 1 or k_cache.shape[3] != head_dim:
        raise UsageError(f"head_dim {head_dim} must be at most 256, contiguous in q, and equal to the cache's")
