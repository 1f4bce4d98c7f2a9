"""From what the device found to what it means: committed tokens, stops, failed rows, records of requests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from aspire.engine.live import LiveRequest
from aspire.engine.runner import StepResult
from aspire.engine.sequences import Sequences
from aspire.scheduler import FinishReason, StepOutcome, StepPlan

Bools = NDArray[np.bool_]
_STOP, _ERROR = int(FinishReason.STOP), int(FinishReason.ERROR)


def outcome_of(
    plan: StepPlan,
    result: StepResult,
    alive: Bools,  # [rows] the request is still in the slot that the row was planned for
    sequences: Sequences,
    live: Mapping[str, LiveRequest],
) -> tuple[StepOutcome, NDArray[np.int32]]:
    """What the step did to each row, stops applied, and the tokens it found [rows, width] (-1 = none)."""
    rows = plan.num_rows
    everyone = np.count_nonzero(alive) == rows
    finish = np.zeros(rows, dtype=np.int64)
    if plan.num_drafts == rows:
        accepted, counts = np.zeros((2, rows), dtype=np.int64)
        committed = np.full((rows, 1), -1, dtype=np.int32)
    else:
        finds = plan.finds if everyone else plan.finds & alive
        accepted, committed = _found(plan, result, finds)
        counts, stopped = sequences.cut_at_stops(plan.slots, committed)
        if np.count_nonzero(stopped):
            finish[stopped] = _STOP
            for row in np.flatnonzero(stopped).tolist():
                live[plan.requests[row]].stop_reason = int(committed[row, counts[row] - 1])
        if np.count_nonzero(sequences.watched):
            _look_for_stop_strings(plan, committed, counts, stopped, finish, sequences, live)
    broken = _broken_rows(result)
    if len(broken):
        broken = broken[alive[broken]]
        finish[broken] = _ERROR
        counts[broken] = 0
    margin = np.full(rows, np.nan)
    if plan.num_drafts:
        drafted = (plan.draft if everyone else plan.draft & alive).nonzero()[0]
        margin[drafted] = result.margin[plan.sample_start[drafted]]
        if np.count_nonzero(sequences.edits):
            _note_drafts(plan, result, drafted, sequences)
    return StepOutcome(accepted, counts, finish, margin), committed


def _found(plan: StepPlan, result: StepResult, finds: Bools) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Drafts accepted [rows] and tokens found [rows, width] (-1 = none) by the rows ``finds``."""
    first = plan.sample_start
    if plan.single:
        accepted = np.zeros(plan.num_rows, dtype=np.int64)
        return accepted, np.where(finds, result.tokens, np.int32(-1))[:, None]
    accepted = result.accepted * (finds & plan.verify).astype(np.int64)
    place = np.arange(int(accepted.max()) + 1)
    if not len(result.tokens):  # prompts that go on
        return accepted, np.full((plan.num_rows, 1), -1, dtype=np.int32)
    tokens = result.tokens[np.minimum(first[:, None] + place, len(result.tokens) - 1)]
    return accepted, np.where(finds[:, None] & (place <= accepted[:, None]), tokens, np.int32(-1))


def _look_for_stop_strings(
    plan: StepPlan,
    committed: NDArray[np.int32],
    counts: NDArray[np.int64],
    stopped: Bools,
    finish: NDArray[np.int64],
    sequences: Sequences,
    live: Mapping[str, LiveRequest],
) -> None:
    """End requests at their stop strings: ``counts`` and ``finish`` are put right."""
    for row in np.flatnonzero(sequences.watched[plan.slots] & (counts > 0)).tolist():
        request = live[plan.requests[row]]
        if request.text is None:
            continue
        hit = request.text.push(committed[row, : counts[row]].tolist(), ends=bool(stopped[row]))
        if hit is not None:
            counts[row], finish[row] = hit.tokens, _STOP
            request.stop_reason = hit.stop


def commit(
    plan: StepPlan,
    outcome: StepOutcome,
    committed: NDArray[np.int32],
    result: StepResult,
    sequences: Sequences,
    live: Mapping[str, LiveRequest],
) -> None:
    """Add the committed tokens to what their slots know, and their log-probabilities to their requests."""
    if plan.num_drafts == plan.num_rows:
        return
    rows = outcome.committed.nonzero()[0]
    counts, slots, begin = outcome.committed[rows], plan.slots[rows], plan.sample_start[rows]
    if committed.shape[1] == 1:
        total = result.logprob[begin].astype(np.float64)
    else:
        # a row that is not finite has failed and commits nothing; it must not spoil the sums of the rows after it
        finite = np.where(np.isfinite(result.logprob), result.logprob, 0.0)
        sums = np.concatenate(([0.0], np.cumsum(finite, dtype=np.float64)))
        total = sums[begin + counts] - sums[begin]
    sequences.cumulative_logprob[slots] += total
    for row in rows[sequences.logprobs[slots] >= 0].tolist():
        _add_logprobs(live[plan.requests[row]], result, int(plan.sample_start[row]), int(outcome.committed[row]))
    sequences.append(slots, committed[rows], counts)


def _note_drafts(plan: StepPlan, result: StepResult, rows: NDArray[np.int64], sequences: Sequences) -> None:
    """Penalties count drafts too: keep them behind what their slots know."""
    rows = rows[sequences.edits[plan.slots[rows]]]
    slots = plan.slots[rows]
    sequences.tokens[slots, sequences.known[slots] + plan.drafted[rows]] = result.tokens[plan.sample_start[rows]]


def _broken_rows(result: StepResult) -> NDArray[np.int64]:
    """Rows whose logits were not finite: they fail, the others go on."""
    finite = np.isfinite(result.logprob)
    if np.count_nonzero(finite) == len(finite):
        return np.empty(0, dtype=np.int64)
    row = np.searchsorted(result.sample_start, np.flatnonzero(~finite), side="right") - 1
    return np.unique(row)


def _add_logprobs(request: LiveRequest, result: StepResult, first: int, count: int) -> None:
    wanted = request.params.logprobs or 0
    for at in range(first, first + count):
        best: dict[int, float] = {}
        if wanted and result.top_logprobs is not None:
            values, tokens = (each[at][:wanted] for each in result.top_logprobs)
            best = dict(zip(tokens.tolist(), values.tolist(), strict=True))
        request.logprobs.append({**best, int(result.tokens[at]): float(result.logprob[at])})
