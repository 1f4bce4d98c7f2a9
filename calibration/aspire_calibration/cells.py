"""What to time: a `Cell` describes one synthetic step; the engine builds it on random KV and times it.

``context_tokens`` of a row is its ``kv_len``: the KV tokens that the last query token of the row sees, itself included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import InputError, UsageError, check_choice, check_keys
from aspire.scheduler.features import Floats, StepFeatures, causal_pairs

KINDS = ("verify", "draft", "prefill")
REGIMES = ("ar", "draft", "verify", "mixed", "prefill")


@dataclass(frozen=True)
class RowGroup:
    """``count`` equal rows of a step."""

    kind: str  # "verify" (autoregressive when query_tokens == 1), "draft" or "prefill"
    count: int
    query_tokens: int  # per row; 1 for draft
    context_tokens: int  # per row: kv_len, the query tokens included
    sparse_tokens: int = 0  # per row: KV tokens that a draft row reads (selected pages and tail); 0 for other kinds
    select: bool = False  # the step also computes page mass of the rows, for their next page list (not drafts)

    def __post_init__(self) -> None:
        check_choice("row kind", self.kind, KINDS)
        if self.count < 1 or self.query_tokens < 1:
            raise UsageError(f"a row group needs count >= 1 and query_tokens >= 1, got {self}")
        if self.context_tokens < self.query_tokens:
            raise UsageError(f"context_tokens counts the query tokens too: it must be >= query_tokens, got {self}")
        if self.kind == "draft" and (self.query_tokens != 1 or not 1 <= self.sparse_tokens <= self.context_tokens):
            raise UsageError(f"a draft row has 1 query token and 1 <= sparse_tokens <= context_tokens, got {self}")
        if self.select and self.kind == "draft":
            raise UsageError(f"whether draft rows select is a setting of the selector, not of a cell; got {self}")
        if self.kind != "draft" and self.sparse_tokens:
            raise UsageError(f"only draft rows have sparse_tokens, got {self}")

    @property
    def key(self) -> str:
        """Stable text, e.g. ``draft:8x1q4096c512s``; ``+`` marks page mass."""
        sparse = f"{self.sparse_tokens}s" if self.kind == "draft" else ""
        return (
            f"{self.kind}:{self.count}x{self.query_tokens}q{self.context_tokens}c{sparse}{'+' if self.select else ''}"
        )


@dataclass(frozen=True)
class Cell:
    """One step to time: its row groups in batch order. ``heldout`` cells are never fitted, only predicted.

    ``rest_s``: the step is timed as the first one after so many seconds of idleness, host work included, where others
    (0) are timed as they follow each other. An idle engine starts with whole prompts alone. Such cells are neither
    fitted nor held out: see `CostModelFile.start_latency`.
    """

    groups: tuple[RowGroup, ...]
    heldout: bool = False
    rest_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.groups:
            raise UsageError("a cell needs at least one row group")
        whole = all(group.kind == "prefill" and group.query_tokens == group.context_tokens for group in self.groups)
        if self.rest_s and (self.rest_s < 0 or self.heldout or not whole):
            raise UsageError(f"a cell that starts from idle holds whole prompts alone and is not held out, got {self}")

    @property
    def idle(self) -> bool:
        """Whether the step starts from idle."""
        return self.rest_s > 0

    @property
    def key(self) -> str:
        """Stable name of the step; two cells with equal keys are the same step, begun in the same way."""
        rest = [f"idle{1e3 * self.rest_s:g}ms"] if self.idle else []
        return " ".join([*rest, *(group.key for group in self.groups)])

    @property
    def rows(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def query_tokens(self) -> int:
        return sum(group.count * group.query_tokens for group in self.groups)

    @property
    def kv_tokens(self) -> int:
        """KV tokens that the pool must hold."""
        return sum(group.count * group.context_tokens for group in self.groups)

    @property
    def regime(self) -> str:
        """One of `REGIMES`."""
        return str(regimes_of(self.features())[()])

    def pages(self, page_size: int = 16) -> int:
        """KV pages that the pool must hold."""
        return sum(group.count * -(-group.context_tokens // page_size) for group in self.groups)

    def features(
        self,
        graph_buckets: Sequence[int] = (),
        *,
        full_layer_share: float = 0.0,
        select_layer_share: float = 1.0,
    ) -> StepFeatures:
        """Scalar features of the step as the scheduler would count them.

        ``padded_tokens`` comes from the buckets (none: eager, no padding). ``full_layer_share``: share of layers that a
        draft step runs with full attention, computing page mass there (refresh, delta); ``select_layer_share``: share
        of layers whose page mass a selecting verification computes.
        """
        total = dict.fromkeys(StepFeatures.__dataclass_fields__, 0.0)
        for group in self.groups:
            total["rows"] += group.count
            total["query_tokens"] += group.count * group.query_tokens
            context = group.count * group.context_tokens
            if group.kind == "draft":
                total["draft_rows"] += group.count
                read = (1.0 - full_layer_share) * group.sparse_tokens
                total["sparse_kv_tokens"] += group.count * read
                total["longest_sparse_kv"] = max(total["longest_sparse_kv"], read)
                total["full_kv_tokens"] += full_layer_share * context
                total["select_kv_tokens"] += full_layer_share * context
                total["select_rows"] += group.count * (full_layer_share > 0)
            else:
                total["full_kv_tokens"] += context
                total["longest_full_kv"] = max(total["longest_full_kv"], group.context_tokens)
            if group.kind == "verify":
                total["verify_rows"] += group.count
                total["verify_width"] = max(total["verify_width"], group.query_tokens)
            if group.kind == "prefill":
                total["prefill_tokens"] += group.count * group.query_tokens
                total["prefill_pairs"] += group.count * causal_pairs(group.query_tokens, group.context_tokens)
            if group.select:
                total["select_kv_tokens"] += select_layer_share * context
                total["select_rows"] += group.count
        total["padded_tokens"] = float(padded_tokens(np.float64(total["query_tokens"]), bucket_array(graph_buckets)))
        return StepFeatures.of(**total)

    def to_json(self) -> list[dict[str, Any]]:
        return [{name: getattr(group, name) for name in RowGroup.__dataclass_fields__} for group in self.groups]

    @classmethod
    def from_json(cls, data: Any, *, heldout: bool = False, rest_s: float = 0.0) -> Cell:
        """Inverse of `to_json`; raises `InputError` for what is not a list of row groups."""
        if not isinstance(data, list) or not all(isinstance(group, dict) for group in data):
            raise InputError(f"a cell is a list of row groups, got {data!r}")
        for group in data:
            check_keys("row group", group, RowGroup.__dataclass_fields__)
        return cls(tuple(RowGroup(**group) for group in data), heldout, rest_s)


def bucket_array(graph_buckets: Sequence[int]) -> Floats:
    """Sorted bucket sizes followed by infinity, for `padded_tokens`."""
    return np.asarray([*sorted(graph_buckets), np.inf], dtype=np.float64)


def padded_tokens(query_tokens: Floats | np.float64, buckets: Floats) -> Floats:
    """Smallest bucket that holds the query tokens; above the largest, or without any, steps run eagerly, unpadded."""
    if len(buckets) == 1:
        return np.asarray(query_tokens, dtype=np.float64)
    padded = buckets[buckets.searchsorted(query_tokens)]
    return np.asarray(np.where(padded < np.inf, padded, query_tokens))


def regimes_of(features: StepFeatures) -> NDArray[np.str_]:
    """Regime of each step: prefill alone, one kind of decoding rows alone, or mixed; same shape as the features."""
    draft, verify = features.draft_rows > 0, features.verify_rows > 0
    prefill = features.prefill_tokens > 0
    only_verify = np.where(features.query_tokens > features.verify_rows, "verify", "ar")
    alone = np.where(prefill, "prefill", np.where(draft, "draft", only_verify))
    return np.asarray(np.where(draft.astype(int) + verify + prefill > 1, "mixed", alone))


def ar(rows: int, context: int) -> Cell:
    """Autoregressive step: ``rows`` verifying rows without drafts."""
    return Cell((RowGroup("verify", rows, 1, context),))


def draft(rows: int, context: int, sparse: int) -> Cell:
    """Draft step whose rows read ``sparse`` KV tokens each."""
    return Cell((RowGroup("draft", rows, 1, context, min(sparse, context)),))


def verify(rows: int, context: int, drafted: int, *, select: bool = True) -> Cell:
    """Verification of ``drafted`` tokens a row: ``drafted + 1`` query tokens each."""
    return Cell((RowGroup("verify", rows, drafted + 1, max(context, drafted + 1), select=select),))


def prefill(chunk: int, context: int, rows: int = 1, *, select: bool = False) -> Cell:
    """Prefill chunk of ``chunk`` tokens a row that ends its prompt of ``context`` tokens; with ``select`` the request
    gets its first page list in this step, as where it will draft."""
    return Cell((RowGroup("prefill", rows, chunk, max(chunk, context), select=select),))


def mixed(*cells: Cell) -> Cell:
    """One step that does the work of all the cells."""
    return Cell(tuple(group for cell in cells for group in cell.groups), any(cell.heldout for cell in cells))


def ragged(cell: Cell, spread: float = 4.0, parts: int = 4) -> Cell:
    """The same cell with contexts spread geometrically over a factor ``spread``, mean context about kept.

    Draft rows keep their sparse tokens (as far as the shorter contexts allow).
    """
    groups: list[RowGroup] = []
    for group in cell.groups:
        pieces = min(parts, group.count)
        factors = spread ** np.linspace(-0.5, 0.5, pieces) if pieces > 1 else np.ones(1)
        factors = factors / factors.mean()
        for index in range(pieces):
            count = group.count // pieces + (index < group.count % pieces)
            context = max(int(group.context_tokens * factors[index]), group.query_tokens)
            sparse = min(group.sparse_tokens, context)
            groups.append(RowGroup(group.kind, count, group.query_tokens, context, sparse, group.select))
    return Cell(tuple(groups), cell.heldout)
