"""The KV pool: one allocation of pages for all layers, sized from what memory is left."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aspire.engine.config import EngineConfig
from aspire.engine.selectors import SELECTORS_KEPT, list_bytes
from aspire.errors import CapacityError
from aspire.models import ModelConfig
from aspire.scheduler import MAX_DRAFT, PAGE_TOKENS
from aspire_kernels import MAX_VERIFY_QUERIES
from aspire_kernels._triton import multiprocessors
from aspire_kernels.attention.scratch import scratch_bytes
from aspire_kernels.attention.tuning import gpu_name
from aspire_kernels.sample import scratch_bytes as sampling_bytes

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
                f"a KV pool of {num_pages} pages needs {need / 1e9:.2f} GB, which {device} does not have "
                f"({page_bytes(config, dtype) / 1e6:.2f} MB a page); "
                "lower num_pages, max_num_seqs or gpu_memory_utilization"
            ) from error
        self.keys: list[Tensor] = [layer[0] for layer in self._pool]
        self.values: list[Tensor] = [layer[1] for layer in self._pool]

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
    reserved_bytes: Mapping[str, int],
    wanted_pages: int,
) -> int:
    """KV pages that fit: at most ``wanted_pages`` (what all slots can use), beside ``reserved_bytes`` of steps by part.

    What CUDA, its libraries and graphs take by themselves is not counted: it comes from the share of memory that
    ``utilization`` leaves free. Raises `CapacityError` with the sizes when there is no room for a page.
    """
    one, reserved = page_bytes(config, dtype), sum(reserved_bytes.values())
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        kept = int((1.0 - utilization) * total)
        available = free - kept - reserved
    else:
        free, kept, available = _CPU_POOL_BYTES, 0, _CPU_POOL_BYTES
    pages = min(wanted_pages, available // one)
    if pages < 2:
        parts = sorted(reserved_bytes.items(), key=lambda part: -part[1])
        raise CapacityError(
            f"no room for KV pages of {one / 1e6:.2f} MB: {free / 1e9:.2f} GB free after the weights, "
            f"{kept / 1e9:.2f} GB left alone at gpu_memory_utilization {utilization:g}, steps need "
            f"{reserved / 1e9:.2f} GB ({', '.join(f'{name} {size / 1e9:.2f}' for name, size in parts)}); "
            "lower max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization"
        )
    return int(pages)


def step_bytes(shape: ModelConfig, dtype: torch.dtype, config: EngineConfig, pages_per_slot: int) -> dict[str, int]:
    """Bytes that steps take on a GPU beside weights and KV, by part, each at its largest.

    Graphs and steps without one (logprobs, penalties) keep their memory apart: what a forward allocates counts twice.
    """
    slots, layers, tokens = config.max_num_seqs, shape.num_layers, config.max_num_batched_tokens
    samples = min(tokens, slots * (MAX_DRAFT + 1))
    forwards = 1 if config.enforce_eager else 2
    # of a layer: gate, up and their product, or q, k, v before and after rope and the output; residual and products
    width = 3 * shape.intermediate_size + 3 * shape.q_size + 4 * shape.kv_size + 6 * shape.hidden_size
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rope = 2 * (pages_per_slot * PAGE_TOKENS + MAX_VERIFY_QUERIES) * (shape.head_dim // 2)
    return {
        "activations": forwards * tokens * width * dtype.itemsize,
        # without a graph also the log probabilities of the unedited logits
        "logits": (forwards + 1) * samples * shape.vocab_size * 4,
        "sampling": forwards * sampling_bytes(samples, shape.vocab_size),
        # as taken, and for a refresh per layer as seeded and as scaled
        "page mass": forwards * 3 * layers * slots * pages_per_slot * 4,
        "page lists": SELECTORS_KEPT * list_bytes(config.policy_spec.selector, layers, slots, pages_per_slot),
        "attention scratch": scratch_bytes(
            gpu_name(device),
            multiprocessors(device),
            rows=slots,
            tokens=tokens,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_kv=pages_per_slot * PAGE_TOKENS,
            itemsize=dtype.itemsize,
        ),
        "tables": 4 * ((slots + 1) * pages_per_slot + rope),
    }
