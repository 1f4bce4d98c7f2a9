"""Steps in flight: the state moves past each when it is planned, and is put right when its outcome is known.

Verifications are taken to commit one token each, their minimum. What they committed more reaches the slots with
`StepsInFlight.update`, and the plan of the next step if that was made meanwhile.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aspire.errors import UsageError
from aspire.scheduler.config import SchedulerConfig
from aspire.scheduler.plan import StepOutcome, StepPlan
from aspire.scheduler.policies import Feedback, Policy
from aspire.scheduler.request import FinishReason, Request
from aspire.scheduler.residents import OnRelease, Residents

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_EVERY = slice(None)
_Rows = slice | Mask  # a mask, or everyone
_CLEARED_AT_ONCE = 2  # requests that left
# plain numbers: an attribute of an IntEnum costs as much as a small numpy operation
_NONE, _LENGTH, _ERROR = int(FinishReason.NONE), int(FinishReason.LENGTH), int(FinishReason.ERROR)


class StepsInFlight(Residents):
    """Residents in steps that were planned and whose outcome is not applied yet."""

    policy: Policy

    def __init__(self, config: SchedulerConfig, on_release: OnRelease | None = None) -> None:
        super().__init__(config, on_release)
        self._in_flight: list[StepPlan] = []
        self._cleared = False  # since the last update
        self._every = np.ones(config.max_num_seqs, dtype=bool)  # a mask of all rows; nobody writes to it

    def learn(self) -> None:
        """What the next step need not wait for. For an executor that would only wait for the step in flight; `update`
        makes up for it, with the same plans to follow."""
        self.policy.learn()
        self._clear_some()

    def _clear_some(self) -> None:
        """Clear up after all who left if others wait for pages; else after a few at a time: a verification may end
        many, and the step behind it may be short."""
        if not self._cleared:
            self.clear_up(_CLEARED_AT_ONCE if len(self.requests) == len(self._slot_of) else None)
            self._overdue, self._cleared = len(self._gone), True

    def update(self, plan: StepPlan, outcome: StepOutcome) -> list[Request]:
        """Apply what came of ``plan``, the oldest in flight; returns the requests that finished in it."""
        if not self._in_flight or self._in_flight[0] is not plan:
            raise UsageError("update takes the plans of schedule in their order, each once")
        del self._in_flight[0]
        self._clear_some()
        self._cleared = False
        slots = self.slots
        # nobody left since the step was planned: views, not copies
        rows = _EVERY if slots.departures == plan.departures else self.alive(plan)
        finish, drafts = outcome.finish[rows], None
        if plan.num_drafts < plan.num_rows:
            finish, drafts = self._settle(plan, outcome, rows)
        else:
            self._observe(plan, outcome, rows)
        finished: list[Request] = []
        goes_on: Mask | None = None
        if np.count_nonzero(finish):
            goes_on, rows_slots = finish == _NONE, plan.slots[rows]
            for index in finish.nonzero()[0]:
                request = self._leave(int(rows_slots[index]), trusted=finish[index] != _ERROR)
                self._finish(request, FinishReason(int(finish[index])))
                finished.append(request)
        if drafts is not None:
            self._roll_back(plan, rows, drafts if goes_on is None else drafts * goes_on)
        return finished

    def alive(self, plan: StepPlan) -> Mask:
        """[rows] whether the request of each row of ``plan`` is still in its slot; not to be written to."""
        if self.slots.departures == plan.departures:
            return self._every[: plan.num_rows]
        return np.asarray(self.slots.tenancy[plan.at] == plan.tenancy)

    def discard_in_flight(self) -> None:
        """A step failed: the requests of all steps in flight go back to the queue and are computed again."""
        for plan in self._in_flight:
            for slot in plan.slots[self.alive(plan)].tolist():
                self._preempt(slot, trusted=False)
        self._in_flight.clear()
        self.reset_prefix_cache()

    @property
    def in_flight(self) -> tuple[StepPlan, ...]:
        """Steps planned and not yet updated, oldest first."""
        return tuple(self._in_flight)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _advance(self, plan: StepPlan) -> None:
        """Move the state past ``plan``, every verification committing one token."""
        slots, at = self.slots, plan.at
        if plan.num_drafts == plan.num_rows:
            slots.drafted[at] = plan.drafted + 1
            return
        slots.drafted[at] = plan.pending + plan.draft if plan.num_drafts else 0
        if not plan.single:
            slots.slack[at] += plan.judged
        finds = plan.finds
        slots.known[at] += finds
        if plan.num_prefills:
            slots.computed[at] += np.where(plan.prefill, plan.query_tokens, finds)
            slots.primed[at] |= finds
        else:
            slots.computed[at] += finds
        if plan.selects:
            slots.seeded[at] |= finds
        else:
            slots.seeded[at] &= ~finds

    def _settle(self, plan: StepPlan, outcome: StepOutcome, rows: _Rows) -> tuple[Ints, Mask | None]:
        """Apply a step in which somebody verifies or prefills. Returns the reason to finish of each of ``rows``, length
        limits included, and which of them verified drafts; None: nobody."""
        slots, config = self.slots, self.config
        at = plan.at if isinstance(rows, slice) else plan.slots[rows]
        committed, finish = outcome.committed[rows], outcome.finish[rows]
        slots.generated[at] += committed
        drafts: Mask | None = None
        if not plan.single:
            judged = plan.judged[rows]
            drafts = judged > 0
            if np.count_nonzero(drafts):
                self._settle_drafts(at, judged, (committed - 1) * drafts)
            else:
                drafts = None
        self._observe(plan, outcome, rows)
        if plan.num_prefills and config.enable_prefix_caching:
            prefilled = plan.prefill[rows] & (finish != _ERROR)
            if np.count_nonzero(prefilled):
                self._publish(plan.slots[rows][prefilled], (plan.start + plan.query_tokens)[rows][prefilled])
        full = slots.generated[at] >= slots.most[at]
        if np.count_nonzero(full):
            finish = np.where(full & (finish == _NONE), _LENGTH, finish)
        return finish, drafts

    def _settle_drafts(self, at: Ints | slice, drafts: Ints, more: Ints) -> None:
        """Verifications of ``drafts`` in the slots ``at`` committed ``more`` tokens than one: put right the state and
        the plan that was made without knowing it."""
        slots = self.slots
        slots.slack[at] -= drafts
        slots.known[at] += more
        slots.computed[at] += more
        for plan in self._in_flight:
            came, settled = more, drafts
            if not (isinstance(at, slice) and isinstance(plan.at, slice) and plan.num_rows == len(more)):
                came, settled = np.zeros((2, len(slots.active)), dtype=np.int64)
                came[at], settled[at] = more, drafts
                came, settled = came[plan.at], settled[plan.at]
            plan.start += came
            plan.slack -= settled
            lists = slots.lists_of(slots.computed[plan.at])
            plan.sel_count[:], plan.tail_page[:] = lists[0], lists[1]

    def _observe(self, plan: StepPlan, outcome: StepOutcome, rows: _Rows) -> None:
        if type(self.policy).observe is Policy.observe:
            return  # it learns nothing
        decode = rows
        if plan.num_prefills:
            decode = ~plan.prefill if isinstance(rows, slice) else rows & ~plan.prefill
        self.policy.observe(
            Feedback(
                slots=plan.slots[decode],
                verified=plan.verify[decode],
                drafted=plan.drafted[decode],
                accepted=outcome.accepted[decode],
                margin=outcome.margin[decode],
                features=plan.features,
                seconds=outcome.seconds,
            )
        )

    def _roll_back(self, plan: StepPlan, rows: _Rows, verified: Mask) -> None:
        """Free the pages for rejected drafts of those of ``rows`` that ``verified`` some and go on."""
        at, block = plan.at if isinstance(rows, slice) else plan.slots[rows], self.config.block_size
        known = self.slots.known[at]
        beyond = ((self.pages.held[at] - 1) * block >= known) & verified
        if np.count_nonzero(beyond):
            at = beyond.nonzero()[0]
            self.pages.shrink(plan.slots[rows][at], -(-known[at] // block))
