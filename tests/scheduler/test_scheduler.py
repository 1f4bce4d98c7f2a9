"""Composition of steps with drawn outcomes: order, limits, preemption, conservation, features."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire.errors import CapacityError, InputError, UsageError
from aspire.scheduler import (
    PAGE_TOKENS,
    POLICIES,
    SELECTOR_KINDS,
    FinishReason,
    Mode,
    PolicySpec,
    Request,
    RequestState,
    Scheduler,
    SchedulerConfig,
    SelectorSpec,
)
from tests.scheduler.executor import FakeExecutor

SELECTOR = SelectorSpec(kind="verify", min_pages=3, recent=2, budget_ratio=0.1)


def scheduler_of(kind: str = "autoregressive", params: dict[str, Any] | None = None, **limits: Any) -> Scheduler:
    """A scheduler with small limits."""
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "num_pages": 65, "num_layers": 4}
    if params is None and kind in ("aspire", "goodput"):
        params = {"cost_ratio": 0.2}
    return Scheduler(SchedulerConfig(**{**defaults, **limits}), PolicySpec(kind, params or {}, SELECTOR))


def add(scheduler: Scheduler, *lengths: tuple[int, int], priority: int = 0) -> list[Request]:
    """Requests of (prompt tokens, max tokens)."""
    requests = []
    for prompt, output in lengths:
        request = Request(f"r{scheduler.counts.arrived}", prompt, output, priority=priority)
        scheduler.add_request(request)
        requests.append(request)
    return requests


def check(scheduler: Scheduler) -> None:
    """What holds between steps."""
    counts, pages = scheduler.counts, scheduler.pages
    assert counts.arrived == counts.waiting + counts.running + counts.finished + counts.rejected
    gone = len(scheduler.pages_of_gone)
    assert pages.num_free + int(pages.held.sum()) + gone == pages.num_usable
    states = Counter(request.state for request in scheduler.requests.values())
    assert states == +Counter({RequestState.WAITING: counts.waiting, RequestState.RUNNING: counts.running})


@given(st.data())
def test_random_traffic_is_conserved_and_ends(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(tuple(POLICIES)))
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    seqs = draw(1, 6)
    scheduler = scheduler_of(
        kind, max_num_seqs=seqs, max_num_batched_tokens=seqs + draw(0, 40), num_pages=draw(6, 30), max_model_len=160
    )
    executor = FakeExecutor(scheduler, rate=data.draw(st.sampled_from((0.0, 0.5, 1.0))), stop=0.02, seed=draw(0, 99))
    accepted, rejected = [], 0
    for index in range(draw(1, 12)):
        request = Request(f"r{index}", draw(1, 170), draw(1, 30), priority=draw(0, 1))
        try:
            scheduler.add_request(request)
            accepted.append(request)
        except (InputError, CapacityError):
            rejected += 1
            assert request.state == RequestState.REJECTED
        for _ in range(draw(0, 3)):
            executor.step()
            check(scheduler)
        if draw(0, 5) == 0 and scheduler.requests:
            victim = data.draw(st.sampled_from(sorted(scheduler.requests)))
            assert scheduler.abort(victim) and not scheduler.abort(victim)
            check(scheduler)
    executor.run()
    check(scheduler)
    counts = scheduler.counts
    assert (counts.finished, counts.rejected, counts.waiting, counts.running) == (len(accepted), rejected, 0, 0)
    assert scheduler.pages.num_free == scheduler.pages.num_usable
    for request in accepted:
        assert request.state == RequestState.FINISHED and request.finish_reason != FinishReason.NONE
        if request.finish_reason == FinishReason.LENGTH:
            assert request.generated == min(request.max_tokens, 160 - request.prompt_tokens)
    assert len({request.request_id for request in executor.finished}) == len(executor.finished)


@settings(max_examples=12)
@given(st.sampled_from(tuple(POLICIES)), st.integers(4, 60), st.integers(0, 50))
def test_every_plan_is_within_its_limits(kind: str, budget: int, seed: int) -> None:
    scheduler = scheduler_of(kind, max_num_batched_tokens=budget, num_pages=30)
    add(scheduler, *[(1 + 14 * (index % 5), 20) for index in range(9)])
    executor = FakeExecutor(scheduler, seed=seed)
    executor.run()
    slots_seen = []
    for plan in executor.plans:
        assert 0 < plan.num_query_tokens <= budget and plan.num_rows <= 4
        assert (np.diff(plan.slots) > 0).all() and (plan.query_tokens > 0).all()
        draft, verify = plan.rows_of(Mode.DRAFT), plan.rows_of(Mode.VERIFY)
        assert (plan.query_tokens[draft] == 1).all()
        assert (plan.query_tokens[verify] == plan.drafted[verify] + 1).all() and plan.drafted.max() <= 16
        assert (plan.drafted[plan.start == 0] == 0).all(), "drafts of the slot's last tenant"
        features = plan.features
        assert features.query_tokens == plan.num_query_tokens == features.padded_tokens
        assert (features.draft_rows, features.verify_rows) == (draft.sum(), verify.sum())
        context = plan.start + plan.query_tokens
        assert features.full_kv_tokens == context[~draft].sum()
        assert features.sparse_kv_tokens == (context + (plan.sel_count - plan.tail_page) * PAGE_TOKENS)[draft].sum()
        slots_seen.append(plan.num_rows)
    assert max(slots_seen) >= 2


def test_first_come_first_served_and_urgent_first() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    late = add(scheduler, (5, 2), (5, 2), priority=1)
    urgent = add(scheduler, (5, 2), (5, 2), priority=0)
    executor = FakeExecutor(scheduler)
    executor.run()
    assert executor.finished == [*urgent, *late]


def test_prompts_come_in_chunks_and_decoding_never_waits_for_them() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=16)
    executor = FakeExecutor(scheduler)
    (first,) = add(scheduler, (4, 30))
    executor.step()
    add(scheduler, (50, 4))
    while (
        scheduler.requests["r1"].state != RequestState.RUNNING or scheduler.slots.computed[scheduler.slot_of("r1")] < 50
    ):
        plan = executor.step()
        assert plan is not None and "r0" in plan.requests
    chunks = [int(plan.query_tokens[plan.requests.index("r1")]) for plan in executor.plans[1:]]
    assert chunks == [15, 15, 15, 5] and first.generated == 0
    sampled = [bool(plan.samples[plan.requests.index("r1")]) for plan in executor.plans[1:]]
    assert sampled == [False, False, False, True]


def test_preemption_takes_the_newest_and_spares_the_oldest() -> None:
    scheduler = scheduler_of(num_pages=9, max_num_batched_tokens=256)
    requests = add(scheduler, (30, 60), (30, 60), (30, 60))
    executor = FakeExecutor(scheduler)
    preempted = []
    while scheduler.has_work:
        plan = executor.step()
        assert plan is not None
        preempted.extend(plan.preempted)
        assert not set(plan.preempted) & set(plan.requests)
        check(scheduler)
    assert preempted and "r0" not in preempted and preempted[0] == "r2"
    assert [request.generated for request in requests] == [60] * 3
    assert [request.preemptions for request in requests] == [preempted.count(f"r{index}") for index in range(3)]


def test_an_urgent_request_is_preempted_last() -> None:
    scheduler = scheduler_of(num_pages=9, max_num_batched_tokens=256)
    add(scheduler, (30, 60), (30, 60), priority=1)
    add(scheduler, (30, 60), priority=0)
    executor = FakeExecutor(scheduler)
    executor.run()
    preempted = [name for plan in executor.plans for name in plan.preempted]
    assert preempted and "r2" not in preempted


def test_a_preempted_request_computes_all_it_knows_again_and_starts_without_drafts() -> None:
    scheduler = scheduler_of("fixed", {"g": 3}, num_pages=9, max_num_batched_tokens=256)
    add(scheduler, (30, 60), (30, 60))
    executor = FakeExecutor(scheduler)
    known = 0
    while scheduler.has_work:
        plan = executor.step()
        assert plan is not None
        if "r1" in plan.preempted:
            known = 30 + scheduler.requests["r1"].generated
        elif known and "r1" in plan.requests:
            row = plan.requests.index("r1")
            assert plan.modes[row] == Mode.PREFILL and plan.start[row] == 0 and plan.drafted[row] == 0
            assert plan.query_tokens[row] == known
            known = 0
    assert any(plan.preempted for plan in executor.plans)


def test_room_is_left_for_running_requests_to_grow() -> None:
    scheduler = scheduler_of(num_pages=101, max_model_len=1600)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_model_len=1600, num_pages=101, watermark=0.1), PolicySpec()
    )
    add(scheduler, (80 * 16 - 1, 8), (12 * 16 - 1, 8))
    scheduler.admit()
    assert scheduler.counts.running == 1  # 80 + 12 pages leave 8 of the 10 wanted
    scheduler.abort("r0")
    scheduler.admit()
    assert scheduler.counts.running == 1 and scheduler.slot_of("r1") is not None


def test_pages_of_a_request_that_ended_come_free_when_there_is_time_or_need() -> None:
    for needed in (False, True):
        scheduler = scheduler_of(num_pages=9, max_model_len=128)
        add(scheduler, (60, 1), (60, 8))
        executor = FakeExecutor(scheduler)
        executor.step()
        assert len(scheduler.pages_of_gone) == 4 and scheduler.pages.num_free == 0
        if needed:
            add(scheduler, (40, 1))
            assert scheduler.schedule() is not None and scheduler.slot_of("r2") is not None
        else:
            scheduler.learn()
            assert scheduler.pages.num_free == 4
        assert not len(scheduler.pages_of_gone)


def test_pages_of_many_that_end_at_once_come_free_two_requests_a_step_unless_somebody_waits() -> None:
    for waits in (False, True):
        scheduler = scheduler_of(num_pages=40, max_model_len=128, max_num_seqs=7, max_num_batched_tokens=512)
        add(scheduler, *[(60, 1)] * 5, (60, 8))
        executor = FakeExecutor(scheduler)
        executor.step()
        assert len(scheduler.pages_of_gone) == 20
        if waits:
            add(scheduler, (60, 8))
        scheduler.learn()
        scheduler.learn()
        assert len(scheduler.pages_of_gone) == (0 if waits else 12)
        if not waits:
            executor.step()
            assert len(scheduler.pages_of_gone) == 12  # learned already
            executor.step()
            assert len(scheduler.pages_of_gone) == 4
            add(scheduler, (60, 8))  # it might share a prefix with one of them
            assert scheduler.schedule() is not None and not len(scheduler.pages_of_gone)


def test_pages_come_free_when_those_who_wait_are_aborted_instead_of_run() -> None:
    scheduler = scheduler_of(num_pages=9, max_model_len=128)
    add(scheduler, (100, 1), (100, 8))
    FakeExecutor(scheduler).step()
    FakeExecutor(scheduler).step()
    assert len(scheduler.pages_of_gone) == 7 and scheduler.abort("r1")
    assert not scheduler.has_work and scheduler.pages.num_free == scheduler.pages.num_usable


def test_nobody_moves_in_before_a_step_that_has_room_for_the_prompt() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=64)
    add(scheduler, (40, 8), (40, 8), (40, 8))
    plan = scheduler.schedule()
    assert plan is not None and plan.query_tokens.tolist() == [40, 24]
    assert scheduler.counts.running == 2 and scheduler.slot_of("r2") is None
    add(scheduler, (8, 8), priority=-1)
    urgent = scheduler.schedule()  # its prompt comes before what is left of the others'
    assert urgent is not None and "r3" in urgent.requests and scheduler.slot_of("r2") is not None


def test_a_draft_is_never_longer_than_what_is_left_to_generate() -> None:
    scheduler = scheduler_of("fixed", {"g": 16}, max_model_len=64)
    add(scheduler, (20, 6), (60, 100), (63, 5))
    executor = FakeExecutor(scheduler, rate=1.0)
    executor.run()
    for plan in executor.plans:
        for row in range(plan.num_rows):
            limit = {"r0": 26, "r1": 64, "r2": 64}[plan.requests[row]]
            assert plan.start[row] + plan.query_tokens[row] <= limit
    assert [request.generated for request in sorted(executor.finished, key=lambda r: r.order)] == [6, 4, 1]


def test_a_token_budget_below_a_verification_caps_the_draft() -> None:
    scheduler = scheduler_of("fixed", {"g": 8}, max_num_seqs=2, max_num_batched_tokens=3)
    add(scheduler, (9, 20), (9, 20))
    executor = FakeExecutor(scheduler, rate=1.0)
    executor.run()
    assert max(int(plan.drafted.max()) for plan in executor.plans) == 2


def test_padding_goes_to_the_next_bucket() -> None:
    scheduler = scheduler_of(graph_buckets=(1, 2, 8))
    assert [scheduler.padded(tokens) for tokens in (1, 2, 3, 8, 9)] == [1, 2, 8, 8, 9]


def test_abort_between_plan_and_outcome() -> None:
    scheduler = scheduler_of("fixed", {"g": 2})
    add(scheduler, (5, 9), (5, 9), (5, 9))
    executor = FakeExecutor(scheduler)
    executor.step()
    plan = scheduler.schedule()
    assert plan is not None
    outcome = executor.outcome(plan)
    scheduler.abort("r1")
    add(scheduler, (33, 4))
    scheduler.admit()  # r3 moves into the slot that r1 left
    assert scheduler.slot_of("r3") == 1
    scheduler.update(plan, outcome)
    assert scheduler.slots.known[1] == 33 and scheduler.slots.computed[1] == 0 and scheduler.slots.drafted[1] == 0
    check(scheduler)
    executor.run()
    assert {request.request_id for request in executor.finished} == {"r0", "r2", "r3"}


def test_in_step_staggered_and_single_phases() -> None:
    phases = {}
    for kind in ("fixed", "staggered"):
        scheduler = scheduler_of(kind, {"g": 3}, max_num_batched_tokens=256)
        add(scheduler, *[(20, 80)] * 4)
        executor = FakeExecutor(scheduler, rate=1.0)
        executor.run()
        steady = [plan for plan in executor.plans[8:] if plan.num_rows == 4][:12]
        phases[kind] = [int(plan.rows_of(Mode.VERIFY).sum()) for plan in steady]
    assert set(phases["fixed"]) == {0, 4}, "the batch is not in step"
    assert phases["staggered"] == [1] * 12, "the phases are not spread"


@pytest.mark.parametrize("kind", SELECTOR_KINDS)
@pytest.mark.parametrize(
    ("budget_ratio", "min_pages", "sinks", "recent"), [(0.0, 3, 1, 2), (0.3, 2, 0, 1), (1.0, 40, 2, 4)]
)
def test_geometry_of_page_lists(kind: str, budget_ratio: float, min_pages: int, sinks: int, recent: int) -> None:
    spec = SelectorSpec(kind, budget_ratio, min_pages, sinks, recent)
    computed = np.arange(0, 700)
    count, tail = spec.geometry(computed)
    pages = computed // PAGE_TOKENS + 1
    budget = np.minimum(pages, np.maximum(np.ceil(np.float32(budget_ratio) * pages.astype(np.float32)), min_pages))
    read = count + pages - tail
    assert (tail < pages).all() and (count <= tail).all() and (count >= 0).all()
    assert (read == budget).all(), "a draft reads exactly its budget"
    assert (read[pages <= min_pages] == pages[pages <= min_pages]).all(), "a short context is read in full"
    assert count.max() <= spec.max_selected(700)


@pytest.mark.parametrize(
    "bad",
    [{"max_num_seqs": 0}, {"num_pages": 0}, {"max_num_batched_tokens": 3}, {"watermark": 1.0}, {"block_size": 8}],
    ids=str,
)
def test_bad_limits_are_errors(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        scheduler_of(**bad)


def test_a_new_tenant_inherits_no_drafts() -> None:
    scheduler = scheduler_of("fixed", {"g": 3}, max_num_seqs=1)
    add(scheduler, (40, 20), (1, 5))
    executor = FakeExecutor(scheduler)
    for _ in range(3):
        executor.step()
    assert scheduler.slots.drafted[0] == 2
    scheduler.abort("r0")
    plan = executor.step()
    assert plan is not None and plan.requests == ("r1",) and plan.drafted.tolist() == [0] and plan.num_query_tokens == 1
