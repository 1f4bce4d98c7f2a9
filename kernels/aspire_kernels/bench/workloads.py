"""Forwards to time: pages scattered over the pool, several layers' caches so that each call reads memory, not cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.errors import EngineError
from aspire_kernels._triton import cdiv
from aspire_kernels.attention import paged, reference
from aspire_kernels.attention.interface import PAGE_SIZE, AttentionBatch
from aspire_kernels.attention.tuning import Tile

SETS_BYTES = 400 * 2**20
"""The caches that calls rotate through hold at least this much: several times the L2 of any current GPU."""


@dataclass(frozen=True)
class Heads:
    """Attention shape of a model."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int


SMOL = Heads("smol", 9, 3, 64)
LLAMA = Heads("llama8b", 32, 8, 128)


class Workload:
    """Rows of given lengths with random K, V and q; full rows of ``q_len`` tokens, or sparse rows of ``pages``
    pages."""

    def __init__(
        self,
        shape: Heads,
        kv_len: Sequence[int],
        *,
        q_len: int = 1,
        pages: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        sets_bytes: int = SETS_BYTES,
    ) -> None:
        self.shape, self.q_len, self.pages, self.dtype = shape, q_len, pages, dtype
        self.kv_len = list(kv_len)
        rows, device = len(self.kv_len), "cuda"
        width = max(cdiv(n, PAGE_SIZE) for n in self.kv_len)
        total = sum(cdiv(n, PAGE_SIZE) for n in self.kv_len) + 1
        page_bytes = 2 * shape.kv_heads * PAGE_SIZE * shape.head_dim * dtype.itemsize
        read = rows * pages * page_bytes if pages else total * page_bytes
        self.layers = max(1, min(8, cdiv(sets_bytes, read)))
        size = (total, shape.kv_heads, PAGE_SIZE, shape.head_dim)
        self.caches = [
            tuple(torch.randn(size, device=device, dtype=dtype) for _ in range(2)) for _ in range(self.layers)
        ]
        for k, v in self.caches:
            k[0] = float("nan")
            v[0] = float("nan")
        scattered = (torch.randperm(total - 1) + 1).int()
        table = torch.zeros(rows, width, dtype=torch.int32)
        taken = 0
        for row, tokens in enumerate(self.kv_len):
            used = cdiv(tokens, PAGE_SIZE)
            table[row, :used] = scattered[taken : taken + used]
            taken += used
        recent = min(8, pages)
        lists = torch.zeros(self.layers, rows, max(1, pages - recent), dtype=torch.int32)
        tail = torch.zeros(rows, dtype=torch.int32)
        if pages:
            for row, tokens in enumerate(self.kv_len):
                tail[row] = cdiv(tokens, PAGE_SIZE) - recent
                for layer in range(self.layers):
                    lists[layer, row] = table[row, torch.randperm(int(tail[row]))[: pages - recent].sort().values]
        numbers = torch.arange(rows, dtype=torch.int32)
        self.lists = lists.to(device)
        self.batch = AttentionBatch(
            row_slot=numbers.to(device),
            q_start=(numbers * q_len).to(device),
            q_len=torch.full((rows,), q_len, dtype=torch.int32, device=device),
            kv_len=torch.tensor(self.kv_len, dtype=torch.int32, device=device),
            sparse=torch.full((rows,), int(pages > 0), dtype=torch.int32, device=device),
            block_table=table.to(device),
            sel_pages=self.lists[0],
            sel_count=torch.full((rows,), max(0, pages - recent), dtype=torch.int32, device=device),
            tail_page=tail.to(device),
            max_q_len=q_len,
            max_full_kv=0 if pages else max(self.kv_len),
            max_sparse_kv=pages * PAGE_SIZE,
        )
        self.q = torch.randn(rows * q_len, shape.heads, shape.head_dim, device=device, dtype=dtype)
        self.out = torch.full_like(self.q, float("nan"))

    @property
    def scale(self) -> float:
        """The usual softmax scale."""
        return float(self.shape.head_dim) ** -0.5

    @property
    def tokens_read(self) -> int:
        """KV tokens that one call must read."""
        if not self.pages:
            return sum(self.kv_len)
        return sum(self.pages * PAGE_SIZE - (-n % PAGE_SIZE) for n in self.kv_len)

    @property
    def floor_bytes(self) -> int:
        """K and V of every token read once, q read and out written once."""
        kv = 2 * self.tokens_read * self.shape.kv_heads * self.shape.head_dim
        return (kv + 2 * self.q.numel()) * self.dtype.itemsize

    def prepare(self, tiles: dict[int, Tile] | None = None) -> None:
        """Compute the work lists, as a forward does once for all its layers."""
        shape = self.shape
        paged.prepare(self.batch, shape.heads, shape.kv_heads, shape.head_dim, self.dtype, self.q.shape[0], tiles=tiles)

    def calls(self, mass_rows: Tensor | None = None) -> list[Callable[[], Tensor]]:
        """One attention call per layer; with page mass of the query offsets ``mass_rows [rows, 2]`` if given."""
        mass = None
        if mass_rows is not None:
            mass = torch.zeros(self.batch.rows, self.batch.block_table.shape[1], device="cuda")

        def layer_call(layer: int) -> Callable[[], Tensor]:
            k, v = self.caches[layer]
            batch = self.batch.with_selection(self.lists[layer])
            return lambda: paged.paged_attention(
                self.q, k, v, batch, scale=self.scale, page_mass=mass, mass_rows=mass_rows, out=self.out
            )

        return [layer_call(layer) for layer in range(self.layers)]

    def offsets(self, *rows: int) -> Tensor:
        """``mass_rows`` that chooses the given one or two query offsets in every row."""
        first, last = (rows[0], rows[-1] if len(rows) > 1 else -1)
        return torch.tensor([[first, last]] * self.batch.rows, dtype=torch.int32, device="cuda")

    def check(self) -> float:
        """``||out - ref|| / ||ref||`` over the first rows of the last layer called; raises `EngineError` above 1e-2."""
        self.out.fill_(float("nan"))
        self.calls()[-1]()
        some = AttentionBatch(**{**self.batch.__dict__, "plan": {}})
        some.q_len = self.batch.q_len.clone()
        some.q_len[2:] = 0
        k, v = self.caches[-1]
        some.sel_pages = self.lists[-1]
        expected = reference.paged_attention(self.q.float(), k, v, some, scale=self.scale)[: 2 * self.q_len].double()
        error = float((self.out[: 2 * self.q_len].double() - expected).norm() / expected.norm())
        if not error < 1e-2 or bool(self.out.isnan().any()):
            raise EngineError(f"attention of {self.shape.name} is wrong: relative error {error}; run the kernel tests")
        return error
