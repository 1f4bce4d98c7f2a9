"""The quantities that cost terms are functions of: the raw step features and a few derived from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aspire.scheduler.features import FEATURES, Floats

INDEX = {name: position for position, name in enumerate(FEATURES)}

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
    "kv_tokens": ("token", "sparse_kv_tokens + full_kv_tokens"),
    "logits_rows": ("row", "rows of logits: query_tokens - prefill_tokens + prefill rows"),
    "verify_kv_tokens": ("token", "context of verifying rows: full_kv_tokens less that of prefill rows"),
    "verify_extra_qkv": ("token^2", "verify_kv_tokens x drafted tokens per verifying row (mean of the step)"),
}


def variable_rows(features: Floats, names: Sequence[str]) -> Floats:
    """[len(names), steps] from features [len(FEATURES), steps]."""
    if all(name in INDEX for name in names):
        return np.asarray(features[[INDEX[name] for name in names]])
    out = np.empty((len(names), features.shape[1]))
    for position, name in enumerate(names):
        index = INDEX.get(name)
        out[position] = features[index] if index is not None else _derived(features, name)
    return out


def _derived(features: Floats, name: str) -> Floats | float:
    if name == "one":
        return 1.0
    if name == "kv_tokens":
        return np.asarray(features[INDEX["sparse_kv_tokens"]] + features[INDEX["full_kv_tokens"]])
    prefill_tokens, verify_rows = features[INDEX["prefill_tokens"]], features[INDEX["verify_rows"]]
    draft_rows = features[INDEX["draft_rows"]]
    prefill_rows = np.maximum(features[INDEX["rows"]] - draft_rows - verify_rows, 0.0)
    decoding_tokens = features[INDEX["query_tokens"]] - prefill_tokens
    if name == "logits_rows":
        return np.asarray(np.maximum(decoding_tokens, 0.0) + prefill_rows)
    # The context of prefill rows is not a feature of its own: their mean context weighted by query tokens stands for it.
    prefill_kv = prefill_rows * features[INDEX["prefill_qkv"]] / np.maximum(prefill_tokens, 1.0)
    verify_kv = np.maximum(features[INDEX["full_kv_tokens"]] - prefill_kv, 0.0) * (verify_rows > 0)
    if name == "verify_kv_tokens":
        return np.asarray(verify_kv)
    drafted = np.maximum(decoding_tokens - draft_rows - verify_rows, 0.0)
    return np.asarray(verify_kv * drafted / np.maximum(verify_rows, 1.0))
