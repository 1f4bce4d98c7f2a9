"""Steps planned while the one before runs: what is projected, what is put right, what must wait."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire.errors import UsageError
from aspire.scheduler import Mode, PolicySpec, Request, Scheduler, SchedulerConfig, SelectorSpec, StepPlan
from tests.scheduler.executor import FakeExecutor

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=400, num_pages=101)
SELECTOR = SelectorSpec(budget_ratio=0.1, min_pages=4, recent=2)


def _scheduler(policy: str = "fixed", config: SchedulerConfig = CONFIG, **params: int) -> Scheduler:
    return Scheduler(config, PolicySpec(kind=policy, params=params, selector=SELECTOR))


class Ahead(FakeExecutor):
    """Plans each step before the outcome of the one before is applied."""

    def __init__(self, scheduler: Scheduler, **options: float) -> None:
        super().__init__(scheduler, **options)  # type: ignore[arg-type]
        self.flight: list[StepPlan] = []
        self.planned_ahead = 0

    def step(self) -> StepPlan | None:
        """End one step, the next being planned already where the scheduler allows it."""
        if not self.flight and (plan := self.scheduler.schedule()) is not None:
            self.flight.append(plan)
        if self.flight and (plan := self.scheduler.schedule()) is not None:
            self.flight.append(plan)
            self.planned_ahead += 1
        if not self.flight:
            return None
        plan = self.flight.pop(0)
        self.plans.append(plan)
        self.finished.extend(self.scheduler.update(plan, self.alive(plan)))
        return plan

    def alive(self, plan: StepPlan):  # noqa: ANN201
        """The outcome, with nothing for rows whose request has left."""
        outcome = self.outcome(plan)
        gone = self.scheduler.slots.tenancy[plan.slots] != plan.tenancy
        assert (self.scheduler.alive(plan) == ~gone).all()
        for column in (outcome.accepted, outcome.committed, outcome.finish):
            column[gone] = 0
        return outcome


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=9),
    st.sampled_from([("autoregressive", {}), ("fixed", {"g": 3}), ("staggered", {"g": 4}), ("fsm", {})]),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([101, 16]),
    st.integers(0, 1000),
)
def test_all_requests_end_with_their_tokens_and_pages(requests, policy, rate, stop, pages, seed) -> None:  # noqa: ANN001
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=400, num_pages=pages)
    scheduler = _scheduler(policy[0], config, **policy[1])
    executor = Ahead(scheduler, rate=rate, stop=stop, seed=seed)
    asked = {}
    for index, (prompt, tokens) in enumerate(requests):
        request = Request(str(index), min(prompt, 16 * (pages - 1) - tokens), tokens)
        asked[request.request_id] = request
        scheduler.add_request(request)
    executor.run()
    assert {request.request_id for request in executor.finished} == set(asked)
    if stop == 0.0:
        assert all(request.generated == request.max_tokens for request in asked.values())
    assert all(1 <= request.generated <= request.max_tokens for request in asked.values())
    assert scheduler.pages.num_free == scheduler.pages.num_usable
    assert not (scheduler.slots.active.any() or executor.flight and scheduler.requests)


def test_a_plan_made_too_early_to_know_is_put_right() -> None:
    scheduler = _scheduler(g=3)
    executor = Ahead(scheduler, rate=1.0)
    scheduler.add_request(Request("a", 40, 50))
    known = 40
    while scheduler.has_work:
        plan = executor.step()
        assert plan is not None
        row = plan.modes[0]
        assert plan.slack[0] == 0
        if row != Mode.PREFILL:
            assert plan.start[0] == known - 1 + (plan.drafted[0] if row == Mode.DRAFT else 0)
            known += plan.drafted[0] + 1 if row == Mode.VERIFY else 0
        else:
            known += 1
    assert known == 90
    assert executor.planned_ahead > 20


def test_a_step_after_a_verification_allows_for_all_it_may_commit() -> None:
    scheduler = _scheduler(g=3)
    scheduler.add_request(Request("a", 40, 50))
    executor = FakeExecutor(scheduler, rate=1.0)
    for _ in range(4):  # prefill, three drafts
        executor.step()
    verify = scheduler.schedule()
    after = scheduler.schedule()
    assert verify is not None and after is not None
    assert (verify.modes[0], verify.drafted[0], verify.slack[0]) == (Mode.VERIFY, 3, 0)
    assert (after.modes[0], after.start[0], after.slack[0]) == (Mode.DRAFT, 41, 3)
    assert scheduler.pages.held[0] * 16 >= 45
    scheduler.update(verify, executor.outcome(verify))
    assert (after.start[0], after.slack[0], scheduler.slots.slack[0]) == (44, 0, 0)


def test_planning_ahead_waits_where_pages_are_short_and_never_preempts() -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=160, num_pages=9)
    scheduler = _scheduler("autoregressive", config)
    for name in "ab":
        scheduler.add_request(Request(name, 60, 60))
    executor = Ahead(scheduler)
    executor.run()
    in_flight_when_preempted = [plan for plan in executor.plans if plan.preempted]
    assert in_flight_when_preempted and {request.request_id for request in executor.finished} == {"a", "b"}
    assert executor.planned_ahead < len(executor.plans) - 1


def test_outcomes_come_in_order_and_once() -> None:
    scheduler = _scheduler("autoregressive")
    scheduler.add_request(Request("a", 20, 9))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    executor = FakeExecutor(scheduler)
    with pytest.raises(UsageError, match="in their order"):
        scheduler.update(second, executor.outcome(second))
    scheduler.update(first, executor.outcome(first))
    with pytest.raises(UsageError, match="each once"):
        scheduler.update(first, executor.outcome(first))
    with pytest.raises(UsageError, match="in flight"):
        scheduler.set_policy(PolicySpec())


def test_steps_that_failed_give_their_requests_back() -> None:
    scheduler = _scheduler("fixed", g=2)
    executor = FakeExecutor(scheduler, rate=0.5)
    for name in "abc":
        scheduler.add_request(Request(name, 30, 20))
    for _ in range(6):
        executor.step()
    generated = scheduler.slots.generated.copy()
    assert scheduler.schedule() is not None and scheduler.schedule() is not None
    scheduler.discard_in_flight()
    assert scheduler.counts.waiting == 3 and scheduler.counts.running == 0 and not scheduler.in_flight
    assert scheduler.pages.num_free == scheduler.pages.num_usable
    assert sorted(request.generated for request in scheduler.requests.values()) == sorted(generated[:3].tolist())
    executor.run()
    assert all(np.array([request.generated for request in executor.finished]) == 20)
