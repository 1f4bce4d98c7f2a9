"""What a composed batch amounts to: its features for the cost model, and the share of it that prompts get."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler.features import StepFeatures
from aspire.scheduler.slots import Slots

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


def features_of_rows(
    drafting: Mask,  # [n], as all arrays
    prompts: Mask | None,  # rows with tokens of a prompt; None where there are none
    query: Ints,
    context: Ints,  # KV tokens of each row after the step
    reads: Ints,  # those of them that a drafting row reads
    selecting: Mask | bool | None,  # rows that get page lists in this step; True: all that do not draft; None: nobody
    *,
    tokens: int,  # sum of ``query``
    padded_tokens: int,
    full_layer_share: float,
    select_layer_share: float,
) -> StepFeatures:
    """Features (0-d) of the step in which the rows put ``query`` tokens through the model."""
    rows, full = len(query), int(np.add.reduce(context))
    drafts = int(np.count_nonzero(drafting))
    prefills = 0 if prompts is None else int(np.count_nonzero(prompts))
    sparse, draft_full, width, longest_full, longest_sparse = 0, 0.0, 0, 0, 0
    if drafts < rows:
        longest_full = _largest(context[(~drafting).nonzero()[0]] if drafts else context)
    if drafts:
        if drafts < rows:
            reads = reads[drafting.nonzero()[0]]
        read = full if drafts == rows else int(context @ drafting)
        sparse, longest_sparse = int(np.add.reduce(reads)), _largest(reads)
        full -= read
        draft_full = full_layer_share * float(read)
    if drafts + prefills < rows:
        verifying = query if prompts is None else query[~(drafting | prompts)]
        width = 1 if tokens == rows else _largest(verifying)  # a draft row has one query token
    prompt_tokens, pairs = 0, 0.0
    if prompts is not None:
        chunks = query * prompts
        prompt_tokens = int(np.add.reduce(chunks))
        pairs = 0.5 * (int(chunks @ (2 * context - query)) + prompt_tokens)  # the sum of `causal_pairs`
    choosing = choosing_kv = 0
    if selecting is True:
        choosing, choosing_kv = rows - drafts, full
    elif selecting is not None:
        choosing, choosing_kv = int(np.count_nonzero(selecting)), int(context @ selecting)
    return StepFeatures.of_step(
        rows,
        tokens,
        padded_tokens,
        drafts,
        rows - drafts - prefills,
        (1.0 - full_layer_share) * sparse,
        full + draft_full,
        prompt_tokens,
        pairs,
        select_layer_share * choosing_kv + draft_full,
        choosing + (drafts if full_layer_share else 0),
        width,
        longest_full,
        (1.0 - full_layer_share) * longest_sparse,
    )


def _largest(values: Ints) -> int:
    """The maximum, found through its place: a fourth of the time that a reduction takes."""
    return int(values[values.argmax()])


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
