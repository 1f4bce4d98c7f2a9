"""Paged attention: kernel = reference on every kind of row, nothing else is read, every output is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aspire.errors import UsageError
from aspire_kernels import AttentionBatch, counters, get_backend
from aspire_kernels._triton import multiprocessors
from aspire_kernels.attention import paged
from aspire_kernels.attention.reference import paged_attention as reference
from aspire_kernels.attention.tuning import PREFILL, SPARSE, START_UNITS, VERIFY, Tile
from tests.kernels.cases import BOUNDS, DEVICES, Case, Row, make_case, relative_error

MIXES = {
    "decode": [Row(1, 70), Row(1, 33), Row(1, 1), Row(1, 16)],
    "draft": [Row(1, 170, selected=4), Row(1, 40, selected=4), Row(1, 90, selected=0)],
    "verify": [Row(17, 100), Row(1, 5), Row(0, 50), Row(9, 9)],
    "mixed": [Row(1, 170, selected=4), Row(5, 133), Row(0, 60), Row(1, 200, selected=3), Row(2, 64)],
    "prefill": [Row(40, 100), Row(1, 133), Row(20, 20), Row(1, 77, selected=1)],
}
SHAPES = {"mha": (2, 1, 32), "gqa3": (1, 3, 64), "gqa4-d96": (2, 4, 96), "mqa16": (1, 16, 32)}


def check(case: Case, dtype: torch.dtype, tiles: dict[int, Tile] | None = None) -> None:
    expected = reference(*case.wide(), case.batch, scale=case.scale)
    out = torch.full_like(case.q, float("nan"))
    paged.paged_attention(case.q, case.k_cache, case.v_cache, case.batch, scale=case.scale, out=out, tiles=tiles)
    assert relative_error(out, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mix", MIXES)
def test_equals_reference(mix: str, shape: str, device: str) -> None:
    kv_heads, group, head_dim = SHAPES[shape]
    check(make_case(MIXES[mix], kv_heads=kv_heads, group=group, head_dim=head_dim, device=device), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [1, 3, 1000])
def test_cut_anywhere(share: int, device: str) -> None:
    """Items cut at every tile, sparse ones too; one program that walks many items; items longer than a share."""
    tiles = {
        SPARSE: Tile(16, 16, 4, 3, per_sm=2, split=True, min_share=share),
        VERIFY: Tile(16, 16, 4, 3, per_sm=3, split=True, min_share=share),
    }
    check(make_case(MIXES["mixed"], kv_heads=2, group=3, head_dim=32, device=device), torch.float32, tiles)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", [0, 1, 3, 7])
@pytest.mark.parametrize("per_sm", [1, 2, 5])
def test_prompts_cut_where_items_begin(start: int, per_sm: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short items, whose beginnings count as units: shares end before, in and after them."""
    monkeypatch.setitem(START_UNITS, PREFILL, start)
    rows = [Row(40, 40), Row(1, 50), Row(21, 90), Row(18, 18), Row(33, 130)]
    case = make_case(rows, kv_heads=2, group=3, head_dim=32, device=device)
    check(case, torch.float32, {PREFILL: Tile(64, 16, 4, 3, per_sm=per_sm, min_share=1)})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", [1, 5])
def test_equal_lengths_are_cut_into_chunks(queries: int, device: str) -> None:
    case = make_case(
        [Row(queries, n) for n in (160, 158, 0, 152, 160) if n], kv_heads=2, group=3, head_dim=32, device=device
    )
    programs = 4 if device == "cpu" else multiprocessors(torch.device(device))
    tiles = {VERIFY: Tile(16, 16, 4, 3, per_sm=-(-24 // programs), min_share=1)}
    plan = paged.plan_classes(
        case.batch, heads=6, kv_heads=2, head_dim=32, dtype=case.q.dtype, tokens=case.q.shape[0], tiles=tiles
    )[0]
    assert plan.header[3] == plan.programs // 8 if device == "cpu" else int(plan.header[3]) >= 0
    check(case, torch.float32, tiles)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [VERIFY, PREFILL])
def test_many_query_rows_in_many_parts(kind: int, device: str) -> None:
    """An item's last program merges its parts block by block of rows, and so many parts at a time."""
    queries = 11 if kind == VERIFY else 24
    case = make_case([Row(queries, 640)], kv_heads=1, group=3, head_dim=32, device=device)
    per_sm = 1 if device == "cuda" else 6
    check(case, torch.float32, {kind: Tile(64 if kind == VERIFY else 128, 16, 4, 3, per_sm=per_sm, min_share=1)})


@pytest.mark.parametrize("device", DEVICES)
def test_half_precision(device: str) -> None:
    case = make_case(MIXES["mixed"], kv_heads=2, group=3, head_dim=64, dtype=torch.float16, device=device)
    check(case, torch.float16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [(3, 3, 64), (8, 4, 128), (4, 4, 96), (1, 16, 128)])
@pytest.mark.parametrize("queries", [1, 9, 17, 300])
def test_long_ragged_on_gpu(queries: int, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    kv_heads, group, head_dim = heads
    rng = torch.Generator().manual_seed(queries)
    rows = [Row(1, int(n), selected=24, recent=8) for n in torch.randint(1, 3000, (11,), generator=rng)]
    rows += [Row(0, 100)]
    rows += [Row(queries, queries + int(n)) for n in torch.randint(0, 5000, (9,), generator=rng)]
    check(
        make_case(rows, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype, device="cuda", seed=queries),
        dtype,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mix", ["decode", "verify", "mixed", "prefill"])
def test_page_mass(mix: str, device: str) -> None:
    rows = MIXES[mix]
    case = make_case(rows, kv_heads=2, group=3, head_dim=32, device=device, seed=5)
    offsets = [[0, row.q_len - 1] if row.q_len > 2 else [-1, row.q_len - 1] for row in rows]
    offsets[0] = [0, 0] if rows[0].q_len else [-1, -1]
    chosen = torch.tensor(offsets, dtype=torch.int32, device=device)
    shape = (len(rows), case.batch.block_table.shape[1])
    expected, mass = torch.full(shape, -7.0, device=device), torch.full(shape, -7.0, device=device)
    wide = case.wide()
    reference(*wide, case.batch, scale=case.scale, page_mass=expected, mass_rows=chosen)
    out = paged.paged_attention(
        case.q, case.k_cache, case.v_cache, case.batch, scale=case.scale, page_mass=mass, mass_rows=chosen
    )
    assert torch.allclose(mass, expected, atol=2e-6)
    assert relative_error(out, reference(*wide, case.batch, scale=case.scale)) < 1e-5
    full = [r for r, row in enumerate(rows) if row.q_len and row.selected is None]
    assert bool((mass[full].sum(dim=1) >= 1.0 - 1e-5).all()), "the largest head's mass over all pages is at least one"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verifies", [True, False])
@pytest.mark.parametrize("per_sm", [1, 4])
def test_page_mass_at_the_end_of_prompts(per_sm: int, verifies: bool, device: str) -> None:
    """The last token of a prompt is computed with the verifying rows, or alone where there are none."""
    rows = [Row(40, 100), Row(1, 133), Row(20, 20), Row(0, 30), Row(3, 70), Row(1, 77, selected=1), Row(33, 300)]
    chosen = [[39, -1], [0, -1], [-1, -1], [-1, -1], [0, 2], [-1, -1], [32, -1]]
    if not verifies:
        kept = [r for r, row in enumerate(rows) if row.q_len > 17 or row.selected is not None]
        rows, chosen = [rows[r] for r in kept], [chosen[r] for r in kept]
    case = make_case(rows, kv_heads=2, group=3, head_dim=32, device=device, seed=8)
    batch = replace(case.batch, mass_at_end=True, max_verify_q=17 if verifies else 0, plan={})
    mass_rows = torch.tensor(chosen, dtype=torch.int32, device=device)
    shape = (len(rows), batch.block_table.shape[1])
    expected, mass = torch.full(shape, -7.0, device=device), torch.full(shape, -7.0, device=device)
    wide = case.wide()
    reference(*wide, batch, scale=case.scale, page_mass=expected, mass_rows=mass_rows)
    out = torch.full_like(case.q, float("nan"))
    tiles = {
        VERIFY: Tile(64 if verifies else 16, 16, 4, 3, per_sm=per_sm, min_share=1),
        PREFILL: Tile(64, 16, 4, 3, per_sm=per_sm, min_share=1),
    }
    paged.paged_attention(
        case.q, case.k_cache, case.v_cache, batch, scale=case.scale, page_mass=mass, mass_rows=mass_rows, out=out,
        tiles=tiles,
    )  # fmt: skip
    assert torch.allclose(mass, expected, atol=2e-6)
    assert relative_error(out, reference(*wide, batch, scale=case.scale)) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("heads", [(3, 3, 64), (8, 4, 128)])
def test_page_mass_bf16_on_gpu(heads: tuple[int, int, int]) -> None:
    rows = [Row(9, 4000), Row(1, 3000), Row(17, 17), Row(1, 2500, selected=24, recent=8)]
    case = make_case(
        rows, kv_heads=heads[0], group=heads[1], head_dim=heads[2], dtype=torch.bfloat16, device="cuda", seed=6
    )
    chosen = torch.tensor([[0, 8], [0, -1], [0, 16], [-1, -1]], dtype=torch.int32, device="cuda")
    shape = (len(rows), case.batch.block_table.shape[1])
    expected, mass = torch.zeros(shape, device="cuda"), torch.zeros(shape, device="cuda")
    reference(*case.wide(), case.batch, scale=case.scale, page_mass=expected, mass_rows=chosen)
    paged.paged_attention(
        case.q, case.k_cache, case.v_cache, case.batch, scale=case.scale, page_mass=mass, mass_rows=chosen
    )
    assert relative_error(mass, expected) < 5e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_graph_replays_with_new_lengths() -> None:
    """Lengths, slots and kinds change between replays of one captured graph; only the bounds are fixed."""
    rows = [Row(1, 2000, selected=9, recent=8), Row(4, 1500), Row(17, 2100), Row(1, 64)]
    case = make_case(rows, kv_heads=3, group=3, head_dim=64, dtype=torch.bfloat16, device="cuda")
    backend = get_backend("triton", "cuda")
    q, batch = torch.zeros(64, 9, 64, dtype=torch.bfloat16, device="cuda"), case.batch
    out = torch.zeros_like(q)

    def forward() -> None:
        backend.prepare(batch, 9, 3, 64, torch.bfloat16, 64)
        backend.paged_attention(q, case.k_cache, case.v_cache, batch, scale=case.scale, out=out)

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    for seed, lengths in enumerate(([1990, 1400, 2051, 60], [1501, 900, 700, 16])):
        other = make_case(
            [Row(r.q_len, n, r.selected, r.recent) for r, n in zip(rows, lengths, strict=True)],
            kv_heads=3, group=3, head_dim=64, dtype=torch.bfloat16, device="cuda", seed=seed + 1,
        )  # fmt: skip
        for name in ("row_slot", "q_start", "q_len", "kv_len", "sparse", "sel_pages", "sel_count", "tail_page"):
            getattr(batch, name).copy_(getattr(other.batch, name))
        width = other.batch.block_table.shape[1]
        batch.block_table[:, :width].copy_(other.batch.block_table)
        case.k_cache[: len(other.k_cache)].copy_(other.k_cache)
        case.v_cache[: len(other.v_cache)].copy_(other.v_cache)
        q[: len(other.q)].copy_(other.q)
        out.fill_(float("nan"))
        graph.replay()
        expected = reference(*other.wide(), other.batch, scale=case.scale)
        assert relative_error(out[: len(other.q)], expected) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES)
def test_prepared_plan_serves_every_layer(device: str) -> None:
    case = make_case(MIXES["mixed"], kv_heads=2, group=3, head_dim=32, device=device)
    backend = get_backend("triton", device)
    backend.prepare(case.batch, 6, 2, 32, case.q.dtype, case.q.shape[0])
    k, v = case.k_cache.nan_to_num(), case.v_cache.nan_to_num()
    other = case.batch.block_table[:, 1 : 1 + case.batch.sel_pages.shape[1]].contiguous()  # same counts, other pages
    counters.reset()
    outs = []
    for lists in (case.batch.sel_pages, other):
        batch = case.batch.with_selection(lists)
        outs.append(backend.paged_attention(case.q, k, v, batch, scale=case.scale))
        assert relative_error(outs[-1], reference(case.q, k, v, batch, scale=case.scale)) < 1e-5
    assert not torch.equal(outs[0], outs[1])
    assert counters.snapshot()["attention.triton.sparse"] == 2


def test_reference_equals_torch_attention() -> None:
    case = make_case([Row(200, 300)], kv_heads=2, group=3, head_dim=32)
    out = reference(case.q, case.k_cache, case.v_cache, case.batch, scale=case.scale)
    pages = case.batch.block_table[int(case.batch.row_slot[0])].long()
    k, v = (c[pages].permute(1, 0, 2, 3).reshape(2, -1, 32)[:, :300] for c in (case.k_cache, case.v_cache))
    mask = torch.arange(300)[None, :] <= torch.arange(100, 300)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, enable_gqa=True
    )[0].transpose(0, 1)
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_q_len": 1}, "exceeds max_q_len"),
        ({"max_full_kv": 100}, "exceeds max_full_kv"),
        ({"max_sparse_kv": 16}, "more than max_sparse_kv"),
        ({"kv_len": torch.zeros(5, dtype=torch.int32)}, "kv_len must count"),
        ({"kv_len": torch.zeros(5, dtype=torch.int64)}, "must be torch.int32"),
        ({"row_slot": torch.full((5,), 99, dtype=torch.int32)}, "outside the"),
        ({"sparse": torch.ones(5, dtype=torch.int32)}, "exactly one query token"),
    ],
)
def test_bad_batches_are_refused(change: dict[str, object], message: str) -> None:
    batch = make_case(MIXES["mixed"], kv_heads=1, group=1, head_dim=16).batch
    with pytest.raises(UsageError, match=message):
        AttentionBatch(**{**batch.__dict__, **change})


def test_unreadable_layouts_are_refused() -> None:
    case = make_case(MIXES["decode"], kv_heads=2, group=1, head_dim=16)
    with pytest.raises(UsageError, match="both must be the same"):
        paged.paged_attention(case.q.half(), case.k_cache, case.v_cache, case.batch, scale=1.0)
    with pytest.raises(UsageError, match="contiguous"):
        paged.paged_attention(
            case.q, torch.cat((case.k_cache, case.k_cache), dim=3)[..., :16], case.v_cache, case.batch, scale=1.0
        )
    with pytest.raises(UsageError, match="did you mean"):
        get_backend("tritn")
