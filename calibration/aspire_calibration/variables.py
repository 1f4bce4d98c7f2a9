"""The quantities that cost terms are functions of: the raw step features and a few derived from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aspire.scheduler.features import FEATURES, Floats

INDEX = {name: position for position, name in enumerate(FEATURES)}
ROWS, QUERY, DRAFT_ROWS, VERIFY_ROWS = (INDEX[n] for n in ("rows", "query_tokens", "draft_rows", "verify_rows"))
PREFILL, PREFILL_QKV = INDEX["prefill_tokens"], INDEX["prefill_qkv"]
SPARSE_KV, FULL_KV = INDEX["sparse_kv_tokens"], INDEX["full_kv_tokens"]

# name -> (unit of the variable, definition)
VARIABLES: dict[str, tuple[str, str]] = {
    "one": ("step", "1 for every step: launches, host work, reading the weights once"),
    "rows": ("row", "requests in the step"),
    "query_tokens": ("token", "tokens through the GEMMs before padding"),
    "padded_tokens": ("token", "tokens through the GEMMs after padding to the graph bucket"),
    "draft_rows": ("row", "rows that read their sparse page list"),
    "verify_rows": ("row", "verification and autoregressive rows"),
    "sparse_kv_tokens": ("token", "KV tokens read by drafting rows, summed"),
    "full_kv_tokens": ("token", "context of verifying and prefill rows, summed"),
    "prefill_tokens": ("token", "query tokens of prefill rows"),
    "prefill_qkv": ("token^2", "query tokens x context of prefill rows, summed"),
    "select_kv_tokens": ("token", "context of rows whose page mass is computed"),
    "select_rows": ("row", "rows whose page mass is computed"),
    "full_rows": ("row", "rows that read their whole context: verifying and prefill rows"),
    "kv_tokens": ("token", "sparse_kv_tokens + full_kv_tokens"),
    "logits_rows": ("row", "rows of logits: query_tokens - prefill_tokens + prefill rows"),
    "verify_kv_tokens": ("token", "context of verifying rows: full_kv_tokens less that of prefill rows"),
    "verify_extra_qkv": ("token^2", "verify_kv_tokens x drafted tokens per verifying row (mean of the step)"),
}


def variable_rows(features: Floats, names: Sequence[str]) -> Floats:
    """[len(names), steps] from features [len(FEATURES), steps]."""
    out = np.empty((len(names), features.shape[1]))
    derived: dict[str, Floats] | None = None
    for row, name in zip(out, names, strict=True):
        index = INDEX.get(name)
        if index is not None:
            row[:] = features[index]
        elif name == "one":
            row[:] = 1.0
        elif name == "full_rows":
            np.subtract(features[ROWS], features[DRAFT_ROWS], out=row)
        elif name == "kv_tokens":
            np.add(features[SPARSE_KV], features[FULL_KV], out=row)
        else:
            if derived is None:
                derived = _derived(features)
            row[:] = derived[name]
    return out


def _derived(features: Floats) -> dict[str, Floats]:
    """What needs the split of a step into decoding and prefill rows.

    The context of prefill rows is no feature of its own: their mean context weighted by query tokens stands for it.
    """
    verify_rows, draft_rows = features[VERIFY_ROWS], features[DRAFT_ROWS]
    decoding_tokens = features[QUERY] - features[PREFILL]
    drafted = np.maximum(decoding_tokens - draft_rows - verify_rows, 0.0)
    prefill_tokens, verify_kv = features[PREFILL], features[FULL_KV]
    logits = decoding_tokens
    if prefill_tokens.any():
        prefill_rows = np.maximum(features[ROWS] - draft_rows - verify_rows, 0.0)
        logits = np.maximum(decoding_tokens, 0.0) + prefill_rows
        prefill_kv = prefill_rows * features[PREFILL_QKV] / np.maximum(prefill_tokens, 1.0)
        verify_kv = np.maximum(verify_kv - prefill_kv, 0.0) * (verify_rows > 0)
    extra = verify_kv * drafted / np.maximum(verify_rows, 1.0)
    return {"logits_rows": logits, "verify_kv_tokens": verify_kv, "verify_extra_qkv": extra}
