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
        self._margins = np.zeros((3, *shape), dtype=np.float32)  # accepted, rejected, behind a rejected one
        self._margins_of = self._difficulty.size * np.array([2, 1, 0])  # where those of each fate begin
        self._right = np.zeros(max_slots, dtype=np.int64)  # leading drafts of the slot that are right
        self._intact = np.ones(max_slots, dtype=bool)  # none of them was wrong

    def attach(self, slot: int, request: int, output_tokens: int) -> None:
        """Request number ``request`` moves into ``slot`` (again, after a preemption, with the same outcomes)."""
        drawn = self._model.draw(self._seed, request, output_tokens)
        self._difficulty[slot, :output_tokens] = drawn.difficulty
        margins = self._margins[:, slot]
        margins[0, :output_tokens] = drawn.accepted_margin
        margins[1, :output_tokens] = drawn.rejected_margin
        margins[2, :output_tokens] = drawn.wrong_margin

    def next_is_right(self, slots: Ints, generated: Ints, drafted: Ints) -> NDArray[np.bool_]:
        """[n]: whether one more draft of each slot would be accepted. Hindsight: only the oracle may ask."""
        intact = self._intact[slots] | (drafted == 0)
        gain = self._gain[np.minimum(drafted, len(self._gain) - 1)]
        return np.asarray(intact & (self._difficulty[slots, generated + drafted] < gain))

    def of(self, plan: StepPlan, alive: NDArray[np.bool_], generated: Ints, seconds: float) -> StepOutcome:
        """Outcome of ``plan``; ``generated`` [max_slots] are the output tokens each slot has committed.

        ``alive`` [rows]: the request is still there; nothing comes of rows whose request ended while they were planned.
        """
        slots, drafted, drafting = plan.slots, plan.drafted, plan.draft
        margin = np.full(len(slots), np.nan)
        if plan.num_drafts == plan.num_rows:
            accepted = committed = np.zeros(len(slots), dtype=np.int64)
        else:
            # whoever holds drafts and does not draft verifies them
            settles = alive & ~drafting
            accepted = self._right[plan.at] * (settles & (drafted > 0))
            committed = (settles & plan.samples) + accepted
        if plan.num_drafts:
            rows = (alive & drafting).nonzero()[0]
            at, held = slots[rows], drafted[rows]
            cell = at * self._width + generated[at] + held
            fresh = held == 0
            intact = self._intact[at] | fresh
            gain = self._gain if len(self._gain) == 1 else self._gain[np.minimum(held, len(self._gain) - 1)]
            still = intact & (self._difficulty.take(cell) < gain)
            # 2: right, 1: the first wrong one, 0: behind a wrong one
            fate = intact.view(np.int8) + still.view(np.int8)
            margin[rows] = self._margins.take(cell + self._margins_of.take(fate))
            self._right[at] = self._right[at] * ~fresh + still
            self._intact[at] = still
        finish = np.zeros(len(slots), dtype=np.int64)
        return StepOutcome(accepted=accepted, committed=committed, finish=finish, margin=margin, seconds=seconds)
