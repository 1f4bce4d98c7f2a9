"""What a composed batch amounts to: its features for the cost model, and the share of it that prompts get."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler.features import StepFeatures
from aspire.scheduler.plan import Mode
from aspire.scheduler.slots import Slots

Ints = NDArray[np.int64]
_PREFILL, _DRAFT, _VERIFY = int(Mode.PREFILL), int(Mode.DRAFT), int(Mode.VERIFY)


def features_of_rows(
    slots: Slots,
    rows: Ints,  # [n] slots, as all arrays here
    modes: Ints,
    query: Ints,
    start: Ints,
    selecting: NDArray[np.bool_],  # rows that get page lists in this step
    *,
    page_tokens: int,
    padded_tokens: int,
    full_layer_share: float,
    select_layer_share: float,
) -> StepFeatures:
    """Features (0-d) of the step in which ``rows`` put ``query`` tokens at ``start`` through the model."""
    context = start + query
    drafting, prompts = (modes == _DRAFT).nonzero()[0], (modes == _PREFILL).nonzero()[0]
    drafts, prefills = len(drafting), len(prompts)
    tokens, full = int(query.sum()), int(context.sum())
    sparse, draft_full, width = 0, 0.0, 0
    if drafts:
        read, at = int(context[drafting].sum()), rows[drafting]
        sparse = int((slots.sel_count[at] - slots.tail_page[at]).sum()) * page_tokens + read
        full -= read
        draft_full = full_layer_share * float(read)
    if drafts + prefills < len(rows):
        verifying = query if not prefills else query[modes == _VERIFY]
        width = int(verifying.max())  # a draft row has one query token
    choosing, choosing_kv = int(np.count_nonzero(selecting)), 0
    if choosing:
        choosing_kv = int(context[selecting].sum())
    return StepFeatures.of(
        rows=float(len(rows)),
        query_tokens=float(tokens),
        padded_tokens=float(padded_tokens),
        draft_rows=float(drafts),
        verify_rows=float(len(rows) - drafts - prefills),
        sparse_kv_tokens=float((1.0 - full_layer_share) * sparse),
        full_kv_tokens=float(full + draft_full),
        prefill_tokens=float(query[prompts].sum()) if prefills else 0.0,
        prefill_qkv=float((query * context)[prompts].sum()) if prefills else 0.0,
        select_kv_tokens=select_layer_share * choosing_kv + draft_full,
        select_rows=float(choosing + (drafts if full_layer_share else 0)),
        verify_width=float(width),
    )


def prefill_chunks(slots: Slots, prefilling: Ints, budget: int) -> tuple[Ints, Ints]:
    """(slots, chunk lengths): ``budget`` tokens go to the prompts of ``prefilling``, most urgent and oldest first."""
    if not len(prefilling) or budget <= 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    turn = prefilling[np.lexsort((slots.order[prefilling], slots.priority[prefilling]))]
    want = slots.known[turn] - slots.computed[turn]
    before = np.cumsum(want) - want
    chunk = np.clip(budget - before, 0, want)
    chosen = chunk > 0
    return turn[chosen], chunk[chosen]
