"""How much an engine may hold: slots, context, KV pages and CUDA graphs, from its configuration, model and device."""

from __future__ import annotations

import torch

from aspire.engine.config import EngineConfig
from aspire.engine.kv_pool import fit_pages, step_bytes
from aspire.errors import UsageError
from aspire.models import LoadedModel
from aspire.scheduler import MAX_DRAFT, SchedulerConfig

GRAPH_BUCKETS = (
    1,
    2,
    4,
    8,
    *range(16, 257, 16),
    *range(320, 1025, 64),
    *range(1152, 2049, 128),
    *range(2304, 4097, 256),
    *range(4608, 8193, 512),
    *range(9216, 32769, 1024),
)
"""Query tokens that the steps of graphs are padded to, as far as an engine has steps of so many."""


def scheduler_config_of(config: EngineConfig, loaded: LoadedModel, *, use_graphs: bool) -> SchedulerConfig:
    """The limits of the scheduler; without ``config.num_pages``, the KV pool takes what memory the model left.

    Raises `UsageError` for contexts that the model has no positions for, `CapacityError` where no page fits.
    """
    shape, decoder = loaded.config, loaded.model
    max_len = config.max_model_len or shape.max_position_embeddings
    if max_len > shape.max_position_embeddings:
        raise UsageError(
            f"max_model_len {max_len} is more than the model's {shape.max_position_embeddings} positions; lower it"
        )
    pages_per_slot = -(-max_len // config.block_size)
    num_pages = config.num_pages or fit_pages(
        shape,
        decoder.dtype,
        decoder.device,
        utilization=config.gpu_memory_utilization,
        reserved_bytes=step_bytes(shape, decoder.dtype, config, pages_per_slot),
        wanted_pages=config.max_num_seqs * pages_per_slot + 1,
    )
    limit = max(config.max_num_seqs * (MAX_DRAFT + 1), config.max_num_batched_tokens)
    ahead = decoder.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_len,
        num_pages=num_pages,
        num_layers=shape.num_layers,
        graph_buckets=(*(bucket for bucket in GRAPH_BUCKETS if bucket < limit), limit) if use_graphs else (),
        async_scheduling=ahead,
        enable_prefix_caching=config.enable_prefix_caching,
        lossy=config.lossy,
    )


def device_of(name: str) -> torch.device:
    """The device called ``name``; ``auto``: a GPU where there is one. Raises `UsageError` for names that torch does
    not know."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise UsageError(f"device '{name}' is not known; allowed: auto, cpu, cuda, cuda:N") from None
