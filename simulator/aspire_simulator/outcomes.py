"""What happens to the rows of a simulated step: accepted or not, with which margin. Vectorised over slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler.plan import StepOutcome, StepPlan
from aspire_simulator.acceptance import AcceptanceModel

Ints = NDArray[np.int64]


class SlotOutcomes:
    """Pre-drawn outcomes of the requests in the slots, and how far each slot's draft is right so far.

    Memory: 16 bytes per slot and output position.
    """

    def __init__(self, model: AcceptanceModel, seed: int, max_slots: int, max_output_tokens: int) -> None:
        self._model = model
        self._seed = seed
        self._gain = model.gain
        self._width = max_output_tokens + 1
        shape = (max_slots, self._width)
        self._difficulty = np.zeros(shape, dtype=np.float32)
        self._margins = np.zeros((*shape, 3), dtype=np.float32)  # behind a rejected one, rejected, accepted
        self._first_cell = self._width * np.arange(max_slots)  # of each slot in the tables laid out flat
        self._unknown = np.full(max_slots, np.nan)  # margins of rows that do not draft; nobody writes to them
        self._right = np.zeros(max_slots, dtype=np.int64)  # leading drafts that the slot holds and that are right

    def attach(self, slot: int, request: int, output_tokens: int) -> None:
        """Request number ``request`` moves into ``slot`` (again, after a preemption, with the same outcomes)."""
        drawn = self._model.draw(self._seed, request, output_tokens)
        self._difficulty[slot, :output_tokens] = drawn.difficulty
        margins = self._margins[slot, :output_tokens]
        margins[:, 0], margins[:, 1], margins[:, 2] = drawn.wrong_margin, drawn.rejected_margin, drawn.accepted_margin
        self._right[slot] = 0

    def right_ahead(self, slots: Ints, generated: Ints, drafted: Ints, most: int) -> Ints:
        """[n]: how many more drafts in a row would be accepted, up to ``most``, of rounds that begin behind
        ``generated`` output tokens and hold ``drafted`` drafts, all of them right. Hindsight: only the oracle may ask.
        """
        place = drafted[:, None] + np.arange(most)
        at = np.minimum(generated[:, None] + place, self._width - 1)
        right = self._difficulty[slots[:, None], at] < self._gain[np.minimum(place, len(self._gain) - 1)]
        return np.asarray(np.cumprod(right, axis=1).sum(axis=1), dtype=np.int64)

    def of(self, plan: StepPlan, alive: NDArray[np.bool_], generated: Ints, seconds: float) -> StepOutcome:
        """Outcome of ``plan``; ``generated`` [max_slots] are the output tokens each slot has committed.

        ``alive`` [rows]: the request is still there; nothing comes of rows whose request ended while they were planned.
        """
        at, drafted, count = plan.at, plan.drafted, plan.num_rows
        right, margin = self._right[at], self._unknown[:count]
        if plan.num_drafts == count:
            accepted = committed = np.zeros(count, dtype=np.int64)
        else:
            settles = alive & plan.finds
            accepted = right * settles  # none are right where none are held
            committed = accepted + settles
        if plan.num_drafts:
            drafting = alive & plan.draft
            cell = self._first_cell[at] + generated[at]
            cell += drafted
            gain = self._gain if len(self._gain) == 1 else self._gain[np.minimum(drafted, len(self._gain) - 1)]
            intact = right == drafted
            # of rows that do not draft the place is of no account, and may lie beyond the table
            still = intact & (self._difficulty.take(cell, mode="clip") < gain)
            # 2: right, 1: the first wrong one, 0: behind a wrong one
            fate = 3 * cell
            fate += intact
            fate += still
            margin = np.where(drafting, self._margins.take(fate, mode="clip"), margin)
            self._right[at] = (right + still) * drafting
        else:
            self._right[at] = 0
        finish = np.zeros(count, dtype=np.int64)
        return StepOutcome(accepted=accepted, committed=committed, finish=finish, margin=margin, seconds=seconds)
