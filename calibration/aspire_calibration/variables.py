"""The quantities that cost terms are functions of: the raw step features and a few derived from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from aspire.scheduler.features import FEATURES, GRAPH_WIDTHS, MAXIMA, Floats, prefill_context
from aspire.scheduler.once import once

INDEX = {name: position for position, name in enumerate(FEATURES)}
ROWS, QUERY, DRAFT_ROWS, VERIFY_ROWS = (INDEX[n] for n in ("rows", "query_tokens", "draft_rows", "verify_rows"))
PREFILL, PREFILL_PAIRS = INDEX["prefill_tokens"], INDEX["prefill_pairs"]
FULL_KV, SELECT_KV, SELECT_ROWS = (INDEX[n] for n in ("full_kv_tokens", "select_kv_tokens", "select_rows"))
VERIFY_WIDTH, LONGEST_FULL, LONGEST_SPARSE = (
    INDEX[n] for n in ("verify_width", "longest_full_kv", "longest_sparse_kv")
)
SPARSE_KV = INDEX["sparse_kv_tokens"]
SHORT_CONTEXT = 128.0  # tokens: no step tells shorter contexts apart
_BOUNDS = np.array([0.0, *GRAPH_WIDTHS])
_POWERS = np.append(np.exp2(np.arange(1024)), np.inf)
# Variables that are 0 in every step that `is_plain`.
NOT_PLAIN = frozenset(
    ("prefill_tokens", "prefill_pairs", "full_spread", "sparse_spread")
    + ("verify_width", "longest_full_kv", "longest_sparse_kv")
)

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
    "prefill_pairs": ("token^2", "(query, key) pairs that causal attention of prefill rows computes, summed"),
    "select_kv_tokens": ("token", "context of rows whose page mass is computed"),
    "select_rows": ("row", "rows whose page mass is computed"),
    "padded_rows": (
        "row",
        "rows of the CUDA graph of a decode step: the power of two that is not below its rows; 0 else",
    ),
    "idle_rows": ("row", "rows of the CUDA graph of a decode step that hold no request"),
    "padded_width": (
        "token",
        "query tokens of a verifying row that the CUDA graph of a decode step is made for; 0 else",
    ),
    "full_rows": ("row", "rows that read their whole context: verifying and prefill rows"),
    "kv_tokens": ("token", "sparse_kv_tokens + full_kv_tokens"),
    "logits_rows": ("row", "rows of logits: query_tokens - prefill_tokens + prefill rows"),
    "verify_kv_tokens": ("token", "context of verifying rows: full_kv_tokens less that of prefill rows"),
    "verify_extra_qkv": ("token^2", "verify_kv_tokens x drafted tokens per verifying row (mean of the step)"),
    "mean_drafted": ("token", "drafted tokens per verifying row, mean of the step"),
    "mean_context_octaves": ("octave", "log2 of (mean context of full rows / 128 tokens), at least 0"),
    "select_context_octaves": ("octave", "mean_context_octaves in steps that compute page mass, else 0"),
    "wide_select_kv_tokens": ("token", "select_kv_tokens in steps where some row verifies drafts, else 0"),
    "verify_width": ("token", "query tokens of the widest verifying row; 0 where the step does not tell it"),
    "longest_full_kv": ("token", "longest context of a full row; 0 where the step does not tell it"),
    "longest_sparse_kv": ("token", "most tokens that a drafting row reads; 0 where the step does not tell it"),
    "longest_context": ("token", "longest_full_kv, or where it is not told the mean context of full rows"),
    "full_spread": ("mean", "longest context of full rows over their mean, less 1; 0 where not told"),
    "sparse_spread": ("mean", "most tokens that a drafting row reads over their mean, less 1; 0 where not told"),
    "widest_verify": ("token", "verify_width, or where it is not told the mean query tokens of verifying rows"),
    "wide_kv_tokens": ("token", "verify_kv_tokens in steps where some row verifies drafts, else 0"),
    "widest_kv_tokens": ("token", "verify_kv_tokens in steps where some row verifies more than 8 drafts, else 0"),
}


# Variables that are sums of features: one matrix product gives them all.
SUMS: dict[str, dict[str, float]] = {
    **{name: {name: 1.0} for name in FEATURES},
    "full_rows": {"rows": 1.0, "draft_rows": -1.0},
    "kv_tokens": {"sparse_kv_tokens": 1.0, "full_kv_tokens": 1.0},
    # decoding tokens + prefill rows
    "logits_rows": {"query_tokens": 1.0, "prefill_tokens": -1.0, "rows": 1.0, "draft_rows": -1.0, "verify_rows": -1.0},
    # of verifying rows: a part of others, no variable
    "drafted_tokens": {"query_tokens": 1.0, "prefill_tokens": -1.0, "draft_rows": -1.0, "verify_rows": -1.0},
}


def variable_rows(features: Floats, names: Sequence[str]) -> Floats:
    """[len(names), steps] from features [len(FEATURES), steps]."""
    return VariableRows(names)(features)


def sum_matrix(names: Sequence[str]) -> Floats:
    """[len(names), len(FEATURES)]; rows of variables that are no sums are zero."""
    matrix = np.zeros((len(names), len(FEATURES)))
    for row, name in zip(matrix, names, strict=True):
        for feature, factor in SUMS.get(name, {}).items():
            row[INDEX[feature]] = factor
    return matrix


def is_plain(features: Floats) -> bool:
    """Whether no step has prompts and none tells a maximum, as the what-ifs of policies do."""
    return not np.count_nonzero(features[PREFILL : PREFILL_PAIRS + 1]) and not np.count_nonzero(features[MAXIMA])


class VariableRows:
    """`variable_rows` of ``names`` that are looked up once."""

    def __init__(self, names: Sequence[str]) -> None:
        self._count = len(names)
        self._sums = sum_matrix([*names, "full_rows", "drafted_tokens"])
        self._derived = [(row, DERIVED[name]) for row, name in enumerate(names) if name not in SUMS]

    def __call__(self, features: Floats) -> Floats:
        sums = self._sums @ features
        out = sums[: self._count]
        derived = _Derived(features, sums[self._count :])
        for row, work in self._derived:
            out[row] = work(derived)
        return np.asarray(out)


class _Derived:
    """What is no sum of the features ``f`` [len(FEATURES), steps], of them and two ``sums`` [2, steps], ``full_rows``
    and ``drafted_tokens``; parts that several variables share are made once."""

    def __init__(self, f: Floats, sums: Floats) -> None:
        self.f, self._sums = f, sums

    @once
    def full_rows(self) -> Floats:
        return np.asarray(self._sums[0])

    @property
    def drafted_tokens(self) -> Floats:
        return np.asarray(self._sums[1])

    @once
    def verify_kv_tokens(self) -> Floats:
        f = self.f
        if not self.prompts:
            return np.asarray(f[FULL_KV])
        # the context of prefill rows is no feature of its own
        prefill_rows = self.full_rows - f[VERIFY_ROWS]
        prefill_kv = prefill_context(prefill_rows, f[PREFILL], f[PREFILL_PAIRS])
        return np.asarray(np.maximum(f[FULL_KV] - prefill_kv, 0.0) * (f[VERIFY_ROWS] > 0))

    @once
    def mean_drafted(self) -> Floats:
        return np.asarray(np.maximum(self.drafted_tokens, 0.0) / np.maximum(self.f[VERIFY_ROWS], 1.0))

    @once
    def widest_verify(self) -> Floats:
        told, width = self.f[VERIFY_WIDTH], 1.0 + self.mean_drafted
        if np.count_nonzero(told):
            width = np.where(told > 0, told, width)
        return np.asarray(width * (self.f[VERIFY_ROWS] > 0))

    @once
    def mean_context_octaves(self) -> Floats:
        f, full_rows = self.f, self.full_rows
        # without full rows, full_kv_tokens are those of layers that draft rows read in full
        mean = f[FULL_KV] / np.maximum(np.where(full_rows > 0, full_rows, f[ROWS]), 1.0)
        return np.asarray(np.log2(np.maximum(mean / SHORT_CONTEXT, 1.0)))

    @property
    def idle_rows(self) -> Floats:
        return self._if_decodes(np.asarray(self.padded_rows - self.f[ROWS]))

    @property
    def longest_context(self) -> Floats:
        f = self.f
        return np.asarray(np.maximum(f[LONGEST_FULL], f[FULL_KV] / np.maximum(self.full_rows, 1.0)))

    @once
    def padded_rows(self) -> Floats:
        return self._if_decodes(_POWERS[_POWERS.searchsorted(self.f[ROWS])])

    @property
    def padded_width(self) -> Floats:
        return self._if_decodes(_BOUNDS[_BOUNDS[:-1].searchsorted(self.widest_verify)])

    @once
    def prompts(self) -> bool:
        return bool(np.count_nonzero(self.f[PREFILL]))

    def _if_decodes(self, values: Floats) -> Floats:
        """[steps]: 0 in steps with prompts."""
        return np.asarray(values * (self.f[PREFILL] == 0)) if self.prompts else values


def _spread(longest: Floats, total: Floats, rows: Floats) -> Floats:
    """[steps]: longest over mean, less 1."""
    return np.asarray(np.maximum(longest * rows / np.maximum(total, 1.0) - 1.0, 0.0))


DERIVED: dict[str, Callable[[_Derived], Floats | float]] = {
    "one": lambda d: 1.0,
    "padded_rows": lambda d: d.padded_rows,
    "idle_rows": lambda d: d.idle_rows,
    "padded_width": lambda d: d.padded_width,
    "longest_context": lambda d: d.longest_context,
    "full_spread": lambda d: _spread(d.f[LONGEST_FULL], d.f[FULL_KV], d.full_rows),
    "sparse_spread": lambda d: _spread(d.f[LONGEST_SPARSE], d.f[SPARSE_KV], d.f[DRAFT_ROWS]),
    "verify_kv_tokens": lambda d: d.verify_kv_tokens,
    "verify_extra_qkv": lambda d: d.verify_kv_tokens * d.mean_drafted,
    "mean_drafted": lambda d: d.mean_drafted,
    "mean_context_octaves": lambda d: d.mean_context_octaves,
    "select_context_octaves": lambda d: d.mean_context_octaves * (d.f[SELECT_ROWS] > 0),
    "wide_select_kv_tokens": lambda d: d.f[SELECT_KV] * (d.widest_verify > 1),
    "widest_verify": lambda d: d.widest_verify,
    "wide_kv_tokens": lambda d: d.verify_kv_tokens * (d.widest_verify > 1),
    "widest_kv_tokens": lambda d: d.verify_kv_tokens * (d.widest_verify > 9),
}
