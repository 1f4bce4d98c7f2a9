"""Paged attention over mixed rows (prefill, decode, draft, verify)."""

from aspire_kernels.attention.interface import MAX_VERIFY_QUERIES, PAGE_SIZE, AttentionBatch

__all__ = ["MAX_VERIFY_QUERIES", "PAGE_SIZE", "AttentionBatch"]
