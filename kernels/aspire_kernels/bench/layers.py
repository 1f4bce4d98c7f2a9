"""All layers of a draft step of SmolLM2-135M's shape, fused and with a library's products: what launches cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from aspire_kernels.attention import paged
from aspire_kernels.backend import get_backend
from aspire_kernels.bench.timing import measure
from aspire_kernels.bench.workloads import SMOL, Workload

_LAYERS, _HIDDEN, _INNER, _ROWS = 30, 576, 1536, 128


@dataclass
class _Layer:
    """Weights of one layer and the KV that it reads."""

    norm: Tensor
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    caches: tuple[Tensor, Tensor]


class _Draft:
    """128 rows of 32 pages: tokens through every layer but embedding, logits and sampling."""

    def __init__(self) -> None:
        self.ops = get_backend("triton", "cuda")
        self.work = Workload(SMOL, [7200] * _ROWS, pages=32)
        self.work.prepare()
        size = (SMOL.heads + 2 * SMOL.kv_heads) * SMOL.head_dim
        self.layers = [
            _Layer(
                torch.ones(_HIDDEN, device="cuda", dtype=torch.bfloat16),
                *(
                    (torch.randn(shape, device="cuda") * shape[1] ** -0.5).bfloat16()
                    for shape in ((size, _HIDDEN), (_HIDDEN, _HIDDEN), (2 * _INNER, _HIDDEN), (_HIDDEN, _INNER))
                ),
                self.work.caches[layer % self.work.layers],
            )
            for layer in range(_LAYERS)
        ]
        self.x = torch.randn(_ROWS, _HIDDEN, device="cuda").bfloat16()
        self.positions = (self.work.batch.kv_len - 1).int()
        table = self.work.batch.block_table.gather(1, (self.positions // 16).long()[:, None])[:, 0]
        self.slots = table * 16 + self.positions % 16
        angle = torch.rand(int(self.positions.max()) + 1, SMOL.head_dim // 2, device="cuda")
        self.cos, self.sin = angle.cos(), angle.sin()

    def attend(self, layer: _Layer, qkv: Tensor) -> Tensor:
        """Rope, KV write and sparse attention of one layer: [rows, hidden]."""
        heads = (SMOL.heads, SMOL.kv_heads, SMOL.kv_heads)
        q, k, v = qkv.view(_ROWS, sum(heads), SMOL.head_dim).split(heads, dim=1)
        q = self.ops.rope_and_kv_write(q, k, v, self.positions, self.slots, self.cos, self.sin, *layer.caches)
        return paged.paged_attention(q, *layer.caches, self.work.batch, scale=self.work.scale).view(_ROWS, -1)

    def fused(self) -> Tensor:
        """All layers by fused products."""
        residual: Tensor = self.x.clone()
        for layer in self.layers:
            qkv, _ = self.ops.norm_linear(None, residual, None, layer.qkv, None, 1e-5)
            self.ops.linear_add(self.attend(layer, qkv), layer.output, None, residual)
            inner, _ = self.ops.norm_gated(None, residual, None, layer.gate_up, 1e-5)
            self.ops.linear_add(inner, layer.down, None, residual)
        return residual

    def separate(self) -> Tensor:
        """All layers by a library's products and a kernel for each operation between them."""
        residual: Tensor = self.x.clone()
        x = self.ops.rms_norm(residual, self.layers[0].norm, 1e-5)
        for layer in self.layers:
            x = linear(self.attend(layer, linear(x, layer.qkv)), layer.output)
            x, residual = self.ops.add_rms_norm(x, residual, layer.norm, 1e-5)
            x = linear(self.ops.silu_mul(linear(x, layer.gate_up)), layer.down)
            x, residual = self.ops.add_rms_norm(x, residual, layer.norm, 1e-5)
        return residual


def layer_results(repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of all layers, by fused and by separate kernels, and how far their results lie apart."""
    draft = _Draft()
    fused, separate = draft.fused().double(), draft.separate().double()
    apart = float((fused - separate).norm() / separate.norm())
    results = []
    for name, call in (("fused", draft.fused), ("separate", draft.separate)):
        timing = measure([call], repeats=repeats, target_ms=20.0)
        results.append(
            {
                "id": f"kernel.draft_layers_{name}_ms",
                "value": timing.seconds * 1e3,
                "unit": "ms",
                "n": len(timing.samples),
                "spread": timing.spread,
                "detail": {
                    "rows": _ROWS,
                    "layers": _LAYERS,
                    "us_a_layer": timing.seconds * 1e6 / _LAYERS,
                    "apart": apart,
                },
            }
        )
    return results
