"""Limits of a scheduler, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from aspire.errors import UsageError
from aspire.scheduler.selector_spec import PAGE_TOKENS


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits under which steps are composed; names as in vLLM.

    ``num_pages`` counts KV pages of ``block_size`` tokens, the trash page included. ``graph_buckets`` are the padded
    query-token counts that have a CUDA graph (empty: eager, no padding). ``watermark`` is the share of pages that
    admission leaves free for running requests to grow into. ``async_scheduling``: executors plan a step while the one
    before runs. ``lossy``: decoding rows read only the pages that the selector lists, and nothing verifies them.
    ``enable_prefix_caching``: requests share the full pages of equal prefixes (`Request.page_hashes`).
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    num_pages: int = 16384
    num_layers: int = 1
    block_size: int = PAGE_TOKENS
    graph_buckets: tuple[int, ...] = ()
    watermark: float = 0.01
    async_scheduling: bool = False
    enable_prefix_caching: bool = True
    lossy: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_pages", "num_layers"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} is too small; give a number >= 1")
        if self.block_size != PAGE_TOKENS:
            raise UsageError(f"block_size {self.block_size} is not supported; pages hold {PAGE_TOKENS} tokens")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "a decode step could not hold every request; raise the one or lower the other"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise UsageError(f"watermark {self.watermark} is not in 0..1; give a share of the KV pages")

    @property
    def pages_per_slot(self) -> int:
        """Logical pages of the longest request."""
        return -(-self.max_model_len // self.block_size)
