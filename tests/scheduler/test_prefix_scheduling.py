"""Prefix caching in the scheduler: what a row reads is what a computation from the start would have written there.

The KV pool is simulated token by token: prefill and verification write the tokens they run, drafts and rejected tokens
write rubbish, and rows of requests that have left while they were in flight write into the pages they had.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.scheduler import FinishReason, Mode, PolicySpec, Request, Scheduler, SchedulerConfig, StepOutcome, StepPlan
from aspire.scheduler.prefix_cache import page_hashes

pytestmark = pytest.mark.usefixtures("short_prefixes_are_waited_for")

PAGE = 16
RUBBISH = -1


class PagedExecutor:
    """Runs plans over a simulated KV pool, up to ``depth`` in flight."""

    def __init__(self, scheduler: Scheduler, depth: int = 1, seed: int = 0, stop: float = 0.0) -> None:
        self.scheduler = scheduler
        self.depth, self.stop = depth, stop
        self.rng = np.random.default_rng(seed)
        self.tokens: dict[str, np.ndarray] = {}
        self.kv = np.full(scheduler.config.num_pages * PAGE, RUBBISH)
        self.flight: list[tuple[StepPlan, np.ndarray]] = []
        self.prefilled = 0
        self.finished: list[str] = []

    def submit(self, name: str, tokens: np.ndarray, prompt: int, priority: int = 0) -> None:
        self.tokens[name] = tokens
        request = Request(name, prompt, len(tokens) - prompt, priority=priority, page_hashes=page_hashes(tokens))
        self.scheduler.add_request(request)

    def step(self) -> None:
        while len(self.flight) < self.depth:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self.flight.append((plan, self.scheduler.pages.table[plan.slots].copy()))
        if not self.flight:
            return
        plan, pages = self.flight.pop(0)
        alive = self.scheduler.slots.tenancy[plan.slots] == plan.tenancy
        accepted = np.zeros(plan.num_rows, dtype=np.int64)
        for row in range(plan.num_rows):
            accepted[row] = self.run(plan, row, pages[row], bool(alive[row]))
        finds = plan.samples & (plan.modes != Mode.DRAFT)
        committed = np.where(finds, accepted + 1, 0)
        finish = np.where(finds & (self.rng.random(plan.num_rows) < self.stop), FinishReason.STOP, FinishReason.NONE)
        margin = np.where(plan.modes == Mode.DRAFT, 1.0, np.nan)
        outcome = StepOutcome(accepted, committed, finish.astype(np.int64), margin, seconds=1e-3)
        self.finished += [request.request_id for request in self.scheduler.update(plan, outcome)]
        self.check()

    def run(self, plan: StepPlan, row: int, pages: np.ndarray, alive: bool) -> int:
        start, count = int(plan.start[row]), int(plan.query_tokens[row])
        tokens = self.tokens[plan.requests[row]]
        places = pages[np.arange(start + count) // PAGE] * PAGE + np.arange(start + count) % PAGE
        if not alive:  # it runs all the same; drafts of a request that has left count as wrong
            self.kv[places[start:]] = RUBBISH
            right = {Mode.PREFILL: count, Mode.VERIFY: 1}.get(Mode(plan.modes[row]), 0)
            self.kv[places[start : start + right]] = tokens[start : start + right]
            return 0
        known = start - (int(plan.drafted[row]) if plan.modes[row] == Mode.DRAFT else 0)
        assert (self.kv[places[:known]] == tokens[:known]).all(), f"{plan.requests[row]} reads what was not computed"
        if plan.modes[row] == Mode.DRAFT:
            self.kv[places[start]] = RUBBISH
            return 0
        self.kv[places[start:]] = tokens[start : start + count]
        if plan.modes[row] == Mode.PREFILL:
            self.prefilled += count
            return 0
        accepted = int(self.rng.integers(0, plan.drafted[row] + 1))
        self.kv[places[start + accepted + 1 :]] = RUBBISH
        return accepted

    def check(self) -> None:
        pages, slots = self.scheduler.pages, self.scheduler.slots
        owners = np.zeros(pages.num_pages, dtype=int)
        for slot in range(len(slots.active)):
            owners[pages.held_by(slot)] += 1
        np.add.at(owners, self.scheduler.pages_of_gone, 1)
        assert (owners == pages.owners).all()
        assert pages.num_free == pages.num_usable - np.count_nonzero(owners)
        for slot in np.flatnonzero(slots.active).tolist():
            own = pages.table[slot, int(slots.computed[slot]) // PAGE : pages.held[slot]]
            assert (owners[own] == 1).all(), "a page that is written has two owners"

    def drain(self, limit: int = 4000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work and not self.flight:
                break
            self.step()
        assert not self.scheduler.has_work, self.scheduler.counts
        assert self.scheduler.pages.num_free == self.scheduler.pages.num_usable


def scheduler(pages: int = 200, seqs: int = 6, tokens: int = 64, policy: str = "fixed:g=3", **more: bool) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=256, num_pages=pages, watermark=0.0, **more
    )
    return Scheduler(config, PolicySpec.parse(policy))


def text(rng: np.random.Generator, *parts: np.ndarray, length: int) -> np.ndarray:
    shared = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    return np.concatenate([shared, rng.integers(0, 1 << 20, max(1, length - len(shared)))])


@given(st.data())
def test_no_row_ever_reads_what_was_not_computed_for_its_tokens(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**20))
    rng = np.random.default_rng(seed)
    policy = data.draw(st.sampled_from(["fixed:g=3", "autoregressive", "fsm", "aspire:cost_ratio=0.2"]))
    pages = data.draw(st.sampled_from([18, 24, 40, 200]))
    made = scheduler(pages, tokens=data.draw(st.sampled_from([16, 64, 300])), policy=policy)
    runner = PagedExecutor(made, depth=data.draw(st.integers(1, 2)), seed=seed, stop=0.02)
    families = [rng.integers(0, 1 << 20, 120) for _ in range(2)]
    for number in range(data.draw(st.integers(2, 14))):
        family = families[int(rng.integers(0, 2))][: int(rng.integers(1, 120))]
        tokens = text(rng, *([family] if rng.random() < 0.8 else []), length=int(rng.integers(2, 200)))
        prompt = int(rng.integers(1, len(tokens))) if len(tokens) > 1 else 1
        if len(tokens) > prompt and -(-len(tokens) // PAGE) < pages:
            runner.submit(str(number), tokens, prompt, int(rng.integers(0, 2)))
        for _ in range(int(rng.integers(0, 6))):
            runner.step()
        if rng.random() < 0.15 and runner.scheduler.requests:
            runner.scheduler.abort(sorted(runner.scheduler.requests)[0])
            runner.check()
    runner.drain()


def test_a_shared_prefix_is_computed_once_however_many_ask_at_once() -> None:
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 1000, 128)
    runner = PagedExecutor(scheduler(seqs=16))
    for number in range(16):
        runner.submit(str(number), text(rng, prefix, length=150), 140)
    requests = list(runner.scheduler.requests.values())
    runner.drain()
    assert runner.prefilled == 140 + 15 * 12
    assert [request.cached_tokens for request in requests] == [0] + [128] * 15


def test_without_caching_every_prompt_is_computed() -> None:
    rng = np.random.default_rng(0)
    tokens = text(rng, length=150)
    runner = PagedExecutor(scheduler(enable_prefix_caching=False))
    for number in range(4):
        runner.submit(str(number), tokens, 140)
    runner.drain()
    assert runner.prefilled == 4 * 140


def test_a_whole_prompt_in_the_cache_leaves_a_token_to_compute() -> None:
    rng = np.random.default_rng(0)
    tokens = text(rng, length=136)
    runner = PagedExecutor(scheduler())
    runner.submit("first", tokens, 128)
    runner.drain()
    runner.submit("again", tokens, 128)
    runner.submit("more", tokens, 129)
    again, more = (runner.scheduler.requests[name] for name in ("again", "more"))
    runner.drain()
    assert (again.cached_tokens, more.cached_tokens) == (112, 128)
    assert runner.prefilled == 128 + 16 + 1


def test_the_answer_of_a_turn_is_found_by_the_next_one() -> None:
    rng = np.random.default_rng(0)
    tokens = text(rng, length=200)
    runner = PagedExecutor(scheduler(policy="autoregressive"))
    runner.submit("turn", tokens[:100], 40)
    runner.drain()
    runner.submit("next", tokens, 120)
    request = runner.scheduler.requests["next"]
    runner.drain()
    assert request.cached_tokens == 96  # of the 99 tokens whose KV the first turn left


def test_a_preempted_request_finds_its_own_pages() -> None:
    rng = np.random.default_rng(0)
    runner = PagedExecutor(scheduler(pages=20, policy="autoregressive"))
    requests = []
    for number in range(3):
        runner.submit(str(number), text(rng, length=140), 60)
        requests.append(runner.scheduler.requests[str(number)])
    runner.drain()
    assert sum(request.preemptions for request in requests) > 0
    assert runner.prefilled < 3 * 60 + sum(request.preemptions for request in requests) * 100


def test_a_more_urgent_request_does_not_wait_for_a_less_urgent_one() -> None:
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 1000, 160)
    runner = PagedExecutor(scheduler(tokens=16))
    runner.submit("slow", text(rng, prefix, length=190), 180, priority=5)
    runner.step()
    runner.submit("patient", text(rng, prefix, length=190), 180, priority=6)
    runner.step()
    assert runner.scheduler.slot_of("patient") is None
    runner.submit("urgent", text(rng, prefix, length=190), 180, priority=0)
    runner.step()
    assert runner.scheduler.slot_of("urgent") is not None
    runner.drain()


def test_who_waited_for_a_prefix_goes_on_when_its_maker_is_aborted() -> None:
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 1000, 160)
    runner = PagedExecutor(scheduler(tokens=32))
    for name in ("maker", "waiter"):
        runner.submit(name, text(rng, prefix, length=190), 180)
    runner.step()
    assert runner.scheduler.slot_of("waiter") is None
    runner.scheduler.abort("maker")
    runner.step()
    assert runner.scheduler.slot_of("waiter") is not None
    assert runner.scheduler.slots.computed.max() == 32 + 32, "the pages that the maker computed are not used"
    runner.drain()


def test_nobody_waits_for_a_few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aspire.scheduler.residents.PAGES_TO_WAIT_FOR", 8)
    rng = np.random.default_rng(0)
    for pages, waits in ((7, False), (8, True)):
        runner = PagedExecutor(scheduler(tokens=600))
        prefix = rng.integers(0, 1000, 16 * pages)
        for name in ("first", "second"):
            runner.submit(name, text(rng, prefix, length=16 * pages + 20), 16 * pages + 10)
        runner.step()
        assert (runner.scheduler.slot_of("second") is None) == waits
        runner.drain()


def test_pages_of_a_failed_request_or_step_are_found_by_nobody() -> None:
    rng = np.random.default_rng(0)
    tokens = text(rng, length=150)
    made = scheduler(tokens=64)
    runner = PagedExecutor(made)
    runner.submit("broken", tokens, 140)
    runner.step()
    plan = made.schedule()
    assert plan is not None
    none = np.zeros(1, dtype=np.int64)
    made.update(plan, StepOutcome(none, none, np.array([int(FinishReason.ERROR)]), np.array([np.nan])))
    assert not made.pages.prefixes.named.any()
    runner.submit("fails", tokens, 140)
    runner.step()
    assert made.pages.prefixes.named.any()
    assert made.schedule() is not None
    made.discard_in_flight()
    assert not made.pages.prefixes.named.any() and made.counts.waiting == 1
    runner.drain()
