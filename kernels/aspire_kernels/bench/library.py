"""The same attention by PyTorch's own kernels, over contiguous K and V (they read no pages), for comparison."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from aspire_kernels.bench.timing import measure
from aspire_kernels.bench.workloads import Heads

# workers that compile in the background would take the host's time from the measurements that follow
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def _error(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def library_seconds(shape: Heads, rows: int, tokens: int, q_len: int = 1, *, flex: bool = False) -> dict[str, Any]:
    """Seconds of one call by library kernel, or the reason why it did not run."""
    kv_bytes = 2 * rows * shape.kv_heads * tokens * shape.head_dim * 2
    sets = max(1, min(4, 400 * 2**20 // kv_bytes))
    size = (rows, shape.kv_heads, tokens, shape.head_dim)
    pairs = [[torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(sets)]
    q = torch.randn(rows, shape.heads, q_len, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    out: dict[str, Any] = {}
    backends = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
    for name, backend in backends.items():

        def call(k: torch.Tensor, v: torch.Tensor, backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=False)

        try:
            out[name] = measure([partial(call, k, v) for k, v in pairs], repeats=3).seconds
        except Exception as error:  # a library kernel that refuses this shape is a finding, not a failure
            out[name] = _error(error)
    if flex:
        try:
            from torch.nn.attention.flex_attention import flex_attention

            compiled = torch.compile(flex_attention, dynamic=False)
            calls = [partial(compiled, q, k, v, enable_gqa=True) for k, v in pairs]
            out["flex_attention"] = measure(calls, repeats=3).seconds
        except Exception as error:
            out["flex_attention"] = _error(error)
    return out
