"""From what the device found to what it means: committed tokens, stops, failed rows, records of requests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from aspire.engine.live import LiveRequest
from aspire.engine.runner import StepResult
from aspire.engine.sequences import Sequences
from aspire.scheduler import FinishReason, Mode, StepOutcome, StepPlan

Bools = NDArray[np.bool_]


def outcome_of(
    plan: StepPlan,
    result: StepResult,
    alive: Bools,  # [rows] the request is still in the slot that the row was planned for
    sequences: Sequences,
    live: Mapping[str, LiveRequest],
) -> tuple[StepOutcome, NDArray[np.int32]]:
    """What the step did to each row, stops applied, and the tokens it found [rows, width] (-1 = none)."""
    draft = plan.modes == Mode.DRAFT
    finds = plan.samples & ~draft & alive
    accepted = np.where(finds & (plan.modes == Mode.VERIFY), result.accepted, 0).astype(np.int64)
    width = int(accepted.max(initial=0)) + 1
    at = np.minimum(result.sample_start[:, None] + np.arange(width), max(0, len(result.tokens) - 1))
    given = finds[:, None] & (np.arange(width)[None, :] <= accepted[:, None])
    tokens = result.tokens[at] if len(result.tokens) else np.zeros((plan.num_rows, width), dtype=np.int32)
    committed = np.where(given, tokens, -1).astype(np.int32)
    counts, stopped = sequences.cut_at_stops(plan.slots, committed)
    finish = np.where(stopped, int(FinishReason.STOP), int(FinishReason.NONE))
    for row in np.flatnonzero(stopped).tolist():
        live[plan.requests[row]].stop_reason = int(committed[row, counts[row] - 1])
    for row in np.flatnonzero(sequences.watched[plan.slots] & (counts > 0)).tolist():
        request = live[plan.requests[row]]
        if request.text is None:
            continue
        hit = request.text.push(committed[row, : counts[row]].tolist(), ends=bool(stopped[row]))
        if hit is not None:
            counts[row], finish[row] = hit.tokens, int(FinishReason.STOP)
            request.stop_reason = hit.stop
    broken = _broken_rows(result)
    broken = broken[alive[broken]]
    finish[broken] = int(FinishReason.ERROR)
    counts[broken] = 0
    drafted = np.flatnonzero(draft & alive)
    margin = np.full(plan.num_rows, np.nan)
    margin[drafted] = result.margin[result.sample_start[drafted]]
    _note_drafts(plan, result, drafted, sequences)
    return StepOutcome(accepted, counts, finish, margin), committed


def commit(
    plan: StepPlan,
    outcome: StepOutcome,
    committed: NDArray[np.int32],
    result: StepResult,
    sequences: Sequences,
    live: Mapping[str, LiveRequest],
) -> None:
    """Add the committed tokens to what their slots know, and their log-probabilities to their requests."""
    rows = np.flatnonzero(outcome.committed > 0)
    counts, slots = outcome.committed[rows], plan.slots[rows]
    # a row that is not finite has failed and commits nothing; it must not spoil the sums of the rows after it
    finite = np.where(np.isfinite(result.logprob), result.logprob, 0.0)
    total = np.concatenate(([0.0], np.cumsum(finite, dtype=np.float64)))
    begin = result.sample_start[rows]
    sequences.cumulative_logprob[slots] += total[begin + counts] - total[begin]
    for row in rows[sequences.logprobs[slots] >= 0].tolist():
        first = int(result.sample_start[row])
        _add_logprobs(live[plan.requests[row]], result, first, int(outcome.committed[row]))
    sequences.append(slots, committed[rows], counts)


def _note_drafts(plan: StepPlan, result: StepResult, rows: NDArray[np.int64], sequences: Sequences) -> None:
    """Penalties count drafts too: keep them behind what their slots know."""
    rows = rows[sequences.edits[plan.slots[rows]]]
    slots = plan.slots[rows]
    sequences.tokens[slots, sequences.known[slots] + plan.drafted[rows]] = result.tokens[result.sample_start[rows]]


def _broken_rows(result: StepResult) -> NDArray[np.int64]:
    """Rows whose logits were not finite: they fail, the others go on."""
    bad = ~np.isfinite(result.logprob)
    if not bad.any():
        return np.empty(0, dtype=np.int64)
    row = np.searchsorted(result.sample_start, np.flatnonzero(bad), side="right") - 1
    return np.unique(row)


def _add_logprobs(request: LiveRequest, result: StepResult, first: int, count: int) -> None:
    wanted = request.params.logprobs or 0
    for at in range(first, first + count):
        best: dict[int, float] = {}
        if wanted and result.top_logprobs is not None:
            values, tokens = (each[at][:wanted] for each in result.top_logprobs)
            best = dict(zip(tokens.tolist(), values.tolist(), strict=True))
        request.logprobs.append({**best, int(result.tokens[at]): float(result.logprob[at])})
