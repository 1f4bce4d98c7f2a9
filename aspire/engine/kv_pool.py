"""The KV pool: one allocation of pages for all layers, sized from what memory is left."""

from __future__ import annotations

import torch
from torch import Tensor

from aspire.engine.config import EngineConfig
from aspire.errors import CapacityError
from aspire.models import ModelConfig
from aspire.scheduler import MAX_DRAFT, PAGE_TOKENS

_CPU_POOL_BYTES = 4 << 30  # without a GPU the pool takes at most this much


class KVPool:
    """``keys[layer]`` and ``values[layer]``: [num_pages, kv_heads, page, head_dim]. Page 0 is the trash page."""

    def __init__(self, config: ModelConfig, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_pages = num_pages
        shape = (config.num_layers, 2, num_pages, config.num_kv_heads, PAGE_TOKENS, config.head_dim)
        try:
            # zeros, not empty: a page's unwritten tail is multiplied by weight 0, and 0 * NaN would be NaN
            self._pool = torch.zeros(shape, dtype=dtype, device=device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            need = num_pages * page_bytes(config, dtype)
            raise CapacityError(
                f"a KV pool of {num_pages} pages needs {need / 1e9:.2f} GB, which {device} does not have; "
                "lower num_pages, max_num_seqs or gpu_memory_utilization"
            ) from error
        self.keys: list[Tensor] = [layer[0] for layer in self._pool]
        self.values: list[Tensor] = [layer[1] for layer in self._pool]

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self._pool.numel() * self._pool.element_size()

    def fill_random(self, seed: int = 0) -> None:
        """Random KV everywhere, so that a profile needs no prefill."""
        generator = torch.Generator(device=self._pool.device).manual_seed(seed)
        for layer in self._pool:
            layer.normal_(generator=generator)


def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return config.kv_bytes_per_token(dtype.itemsize) * PAGE_TOKENS


def fit_pages(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    utilization: float,
    reserved_bytes: int,
    wanted_pages: int,
) -> int:
    """KV pages that fit: at most ``wanted_pages`` (what all slots can use), after ``reserved_bytes`` for buffers.

    Raises `CapacityError` with the sizes when not even one longest request would find room for a page.
    """
    one = page_bytes(config, dtype)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        available = int(free - (1.0 - utilization) * total) - reserved_bytes
    else:
        free, available = _CPU_POOL_BYTES, _CPU_POOL_BYTES
    pages = min(wanted_pages, available // one)
    if pages < 2:
        raise CapacityError(
            f"no room for KV pages: {free / 1e9:.2f} GB free after the weights, {reserved_bytes / 1e9:.2f} GB "
            f"needed for step buffers at gpu_memory_utilization {utilization:g}; lower max_num_batched_tokens "
            "or max_num_seqs, or raise gpu_memory_utilization"
        )
    return int(pages)


def step_bytes(shape: ModelConfig, dtype: torch.dtype, config: EngineConfig, pages_per_slot: int) -> int:
    """Bytes that a step may need beside weights and KV: activations, logits, page mass, lists, attention scratch."""
    tokens, element = config.max_num_batched_tokens, dtype.itemsize
    widest = 2 * shape.intermediate_size + 2 * shape.q_size + 4 * shape.kv_size + 6 * shape.hidden_size
    samples = min(tokens, config.max_num_seqs * (MAX_DRAFT + 1))
    logits = samples * shape.vocab_size * 4 * 2
    mass = 3 * 4 * shape.num_layers * config.max_num_seqs * pages_per_slot
    scratch = 512 << 20 if torch.cuda.is_available() else 0
    return tokens * widest * element * 2 + logits + mass + scratch
