"""A stand-in for an executor: draws outcomes instead of running a model. Numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler import FinishReason, Mode, Request, Scheduler, StepOutcome, StepPlan


class FakeExecutor:
    """Accepts each draft with ``rate``; ends requests with probability ``stop`` at each verification."""

    def __init__(self, scheduler: Scheduler, *, rate: float = 0.7, stop: float = 0.0, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.plans: list[StepPlan] = []
        self.finished: list[Request] = []
        self._rate, self._stop = rate, stop
        self._rng = np.random.default_rng(seed)

    def outcome(self, plan: StepPlan) -> StepOutcome:
        """What a model might have done."""
        verify, finds = plan.modes == Mode.VERIFY, plan.samples & (plan.modes != Mode.DRAFT)
        right = self._rng.random((plan.num_rows, 16)) < self._rate
        run = np.minimum(np.cumprod(right, axis=1).sum(axis=1), plan.drafted)
        accepted = np.where(verify, run, 0).astype(np.int64)
        committed = np.where(finds, accepted + 1, 0)
        stopped = finds & (self._rng.random(plan.num_rows) < self._stop)
        finish = np.where(stopped, int(FinishReason.STOP), int(FinishReason.NONE))
        margin: NDArray[np.float64] = np.where(
            plan.modes == Mode.DRAFT, self._rng.exponential(size=plan.num_rows), np.nan
        )
        return StepOutcome(accepted, committed, finish, margin, seconds=1e-3)

    def step(self) -> StepPlan | None:
        """One step; None when there was nothing to run."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.finished.extend(self.scheduler.update(plan, self.outcome(plan)))
        return plan

    def run(self, limit: int = 5000) -> None:
        """Step until all requests ended."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"no end after {limit} steps; {self.scheduler.counts}")
