"""What a composed batch amounts to: its features for the cost model, and the share of it that prompts get."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler.features import StepFeatures
from aspire.scheduler.plan import Mode
from aspire.scheduler.slots import SlotRows, Slots

Ints = NDArray[np.int64]
_PREFILL, _DRAFT, _VERIFY = int(Mode.PREFILL), int(Mode.DRAFT), int(Mode.VERIFY)


def features_of_rows(
    state: SlotRows,  # of the rows; [n], as all arrays here
    modes: Ints,
    query: Ints,
    start: Ints,
    selecting: NDArray[np.bool_],  # rows that get page lists in this step
    *,
    tokens: int,  # sum of ``query``
    prefills: int,  # rows with tokens of a prompt
    page_tokens: int,
    padded_tokens: int,
    full_layer_share: float,
    select_layer_share: float,
) -> StepFeatures:
    """Features (0-d) of the step in which the rows put ``query`` tokens at ``start`` through the model."""
    context = start + query
    rows, full = len(modes), int(np.add.reduce(context))
    drafting = modes == _DRAFT
    drafts = int(np.count_nonzero(drafting))
    sparse, draft_full, width = 0, 0.0, 0
    if drafts:
        shift = state.sel_count - state.tail_page
        if drafts == rows:
            read, pages = full, int(np.add.reduce(shift))
        else:
            read, pages = int(np.add.reduce(context[drafting])), int(np.add.reduce(shift[drafting]))
        sparse = pages * page_tokens + read
        full -= read
        draft_full = full_layer_share * float(read)
    if drafts + prefills < rows:
        verifying = query if not prefills else query[modes == _VERIFY]
        width = 1 if tokens == rows else int(verifying.max())  # a draft row has one query token
    choosing, choosing_kv = int(np.count_nonzero(selecting)), 0
    if choosing:
        choosing_kv = int(np.add.reduce(context if choosing == rows else context[selecting]))
    prompts = (modes == _PREFILL).nonzero()[0] if prefills else None
    return StepFeatures.of_step(
        rows,
        tokens,
        padded_tokens,
        drafts,
        rows - drafts - prefills,
        (1.0 - full_layer_share) * sparse,
        full + draft_full,
        0.0 if prompts is None else float(query[prompts].sum()),
        0.0 if prompts is None else float((query * context)[prompts].sum()),
        select_layer_share * choosing_kv + draft_full,
        choosing + (drafts if full_layer_share else 0),
        width,
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
