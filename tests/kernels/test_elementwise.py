"""Norms, rope with the KV write, the gate, acceptance: kernel = reference on fresh random inputs, poisoned outputs."""

from __future__ import annotations

import pytest
import torch

from aspire_kernels import get_backend
from tests.kernels.cases import DEVICES, relative_error

REFERENCE = get_backend("reference")


def types(device: str) -> list[torch.dtype]:
    return [torch.float32, torch.float16] + ([torch.bfloat16] if device == "cuda" else [])


BOUND = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hidden", [96, 576, 2048])
def test_norms(hidden: int, device: str) -> None:
    kernel = get_backend("triton", device)
    for dtype in types(device):
        x, residual = torch.randn(2, 5, hidden, device=device).to(dtype)
        weight = torch.randn(hidden, device=device).to(dtype)
        assert relative_error(kernel.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5)) < BOUND[dtype]
        sums = residual.clone(), residual.clone()
        out, same = kernel.add_rms_norm(x, sums[0], weight, 1e-5)
        expected, _ = REFERENCE.add_rms_norm(x, sums[1], weight, 1e-5)
        assert same is sums[0] and torch.equal(sums[0], sums[1])
        assert relative_error(out, expected) < BOUND[dtype]


@pytest.mark.parametrize("device", DEVICES)
def test_silu_mul(device: str) -> None:
    kernel = get_backend("triton", device)
    for dtype in types(device):
        x = (torch.randn(3, 2 * 1100, device=device) * 3).to(dtype)
        assert relative_error(kernel.silu_mul(x), REFERENCE.silu_mul(x)) < BOUND[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("head_dim", "half", "norm"), [(64, 32, False), (128, 64, True), (96, 48, True), (32, 8, True)]
)
def test_rope_and_kv_write(head_dim: int, half: int, norm: bool, device: str) -> None:
    kernel = get_backend("triton", device)
    heads, kv_heads, tokens = 6, 2, 5
    for dtype in types(device):
        fused = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
        q, k, v = fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
        q, k, v = q.view(tokens, heads, -1), k.view(tokens, kv_heads, -1), v.view(tokens, kv_heads, -1)
        positions = torch.randint(0, 50, (tokens,), dtype=torch.int32, device=device)
        slots = (torch.randperm(80)[:tokens]).int().to(device)
        angle = torch.rand(50, half, device=device) * 6
        weights = {}
        if norm:
            weights = {n: torch.randn(head_dim, device=device).to(dtype) for n in ("q_weight", "k_weight")}
        caches = torch.full((2, 2, 5, kv_heads, 16, head_dim), float("nan"), dtype=dtype, device=device)
        outs = [
            b.rope_and_kv_write(q, k, v, positions, slots, angle.cos(), angle.sin(), *c, **weights)
            for b, c in zip((kernel, REFERENCE), caches, strict=True)
        ]
        assert relative_error(outs[0], outs[1]) < BOUND[dtype]
        assert torch.equal(caches[0].isnan(), caches[1].isnan()), "exactly the mapped tokens are written"
        assert relative_error(caches[0].nan_to_num(), caches[1].nan_to_num()) < BOUND[dtype]


def test_rope_equals_hugging_face() -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = torch.randn(1, 4, 7, 32), torch.randn(1, 2, 7, 32)
    angle = torch.outer(torch.arange(7.0), 1e4 ** (-torch.arange(16.0) / 16))
    doubled = torch.cat((angle, angle), dim=1)[None]
    q_out, k_out = modeling.apply_rotary_pos_emb(q, k, doubled.cos(), doubled.sin())
    cache = torch.zeros(2, 1, 2, 16, 32)
    ours = REFERENCE.rope_and_kv_write(
        q[0].transpose(0, 1), k[0].transpose(0, 1), k[0].transpose(0, 1), torch.arange(7), torch.arange(7),
        angle.cos(), angle.sin(), cache[0], cache[1],
    )  # fmt: skip
    assert relative_error(ours, q_out[0].transpose(0, 1)) < 1e-6
    assert relative_error(cache[0, 0, :, :7], k_out[0]) < 1e-6
