"""Run the engine's own scheduler on a SimPy clock. Events are steps: what a step costs comes from the cost model, what
becomes of its drafts from the acceptance model.

Two processes: arrivals put requests into the scheduler's queue at their times; the engine loop plans a step, waits as
long as it takes, and applies its outcome. With ``async_scheduling`` it plans the next step when this one begins, as the
engine does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from aspire.errors import CapacityError, EngineError, InputError, UsageError
from aspire.rundir import Run
from aspire.runlog import RequestTable, StepLog, log_step, status_of, table_from_log
from aspire.scheduler import CostModel, Request, Scheduler, SchedulerConfig, StepPlan
from aspire.scheduler.features import start_latency_of
from aspire_simulator.acceptance import AcceptanceModel
from aspire_simulator.oracle import AnyPolicy, HindsightOracle, OracleSpec
from aspire_simulator.outcomes import SlotOutcomes
from aspire_simulator.workload import Workload

Events = Generator[simpy.Event, Any, None]
Progress = Callable[[int, int, float], None]  # finished requests, all requests, simulated seconds


@dataclass(eq=False)
class _Planned:
    """A step with the requests in its rows, which may have ended when it does."""

    plan: StepPlan
    planned_s: float
    owner: NDArray[np.int64]  # [rows] request number
    entering: int  # requests that begin their prompts in it, those that were preempted anew


class Simulation:
    """One simulated run. Common random numbers: the same ``seed`` gives every policy the same outcomes.

    ``noise`` is the standard deviation of the logarithm of a step's time around the prediction. ``max_concurrency``
    bounds the requests in the engine, waiting ones included; later arrivals are held back and their arrival time is
    when they were let in, as in vLLM's benchmark. ``policy_prices``: what the policy goes by, where that is not the
    ``cost_model`` which tells how long steps take. ``rest_s``: how long the engine has been idle when the clock begins;
    infinite: it ran nothing before.
    """

    def __init__(
        self,
        workload: Workload,
        policy: AnyPolicy,
        cost_model: CostModel,
        acceptance: AcceptanceModel,
        config: SchedulerConfig,
        *,
        seed: int = 0,
        noise: float = 0.0,
        max_concurrency: int | None = None,
        progress: Progress | None = None,
        policy_prices: CostModel | None = None,
        rest_s: float = math.inf,
    ) -> None:
        if not len(workload):
            raise UsageError(f"workload {workload.name} has no requests")
        if noise < 0:
            raise UsageError(f"noise {noise} is negative; give a standard deviation such as 0.02")
        if max_concurrency is not None and max_concurrency < 1:
            raise UsageError(f"max_concurrency {max_concurrency} must be at least 1")
        if not rest_s >= 0:
            raise UsageError(f"rest_s {rest_s} must be seconds >= 0, or infinite where the engine ran nothing before")
        self.workload = workload
        self.policy = policy
        # a round of g drafts takes g + 1 rows for at least one token
        self.log = StepLog(2 * (int(workload.output_tokens.sum()) + len(workload)))
        self._cost_model = cost_model
        self._max_concurrency = max_concurrency
        self._progress = progress
        self._noise = noise
        self._rest_s = rest_s
        self._rng = np.random.default_rng([seed, 3])
        if isinstance(policy, OracleSpec):  # hindsight on a step whose outcome is not applied yet would be a guess
            config = replace(config, async_scheduling=False)
        self._async = config.async_scheduling
        spec = policy.stand_in() if isinstance(policy, OracleSpec) else policy
        self.scheduler = Scheduler(config, spec, policy_prices or cost_model, on_release=self._released)
        longest = int(workload.output_tokens.max())
        self._outcomes = SlotOutcomes(acceptance, seed, config.max_num_seqs, longest)
        if isinstance(policy, OracleSpec):
            generated = self.scheduler.slots.generated
            self.scheduler.policy = HindsightOracle(
                policy,
                config.max_num_seqs,
                lambda slots, past, drafted, most: self._outcomes.right_ahead(
                    slots, generated[slots] + past, drafted, most
                ),
            )
        # a request that shares no prefix finds its own pages again after a preemption, and only then
        names_of = workload.page_names(linked_only=not may_preempt(workload, config))
        self._requests = [
            Request(str(index), prompt, output, arrival, page_hashes=names)
            for index, (prompt, output, arrival, names) in enumerate(
                zip(
                    workload.prompt_tokens.tolist(),
                    workload.output_tokens.tolist(),
                    workload.arrival_s.tolist(),
                    names_of,
                    strict=True,
                )
            )
        ]
        self._owner = np.full(config.max_num_seqs, -1, dtype=np.int64)  # request number in each slot
        self._nobody = np.zeros(config.max_num_seqs, dtype=bool)
        self._done = 0
        self._all_submitted = False
        self._queued_s = workload.arrival_s.astype(np.float64)
        self._config: dict[str, Any] = {
            "source": "simulator",
            "scheduler": asdict(config),
            "policy": policy.to_dict(),
            "policy_label": policy.label,
            "workload": {"name": workload.name, "requests": len(workload), **workload.detail},
            "acceptance": acceptance.to_dict(),
            "cost_model": cost_model_json(cost_model),
            "seed": seed,
            "noise": noise,
            "max_concurrency": max_concurrency,
            "rest_s": None if rest_s == math.inf else rest_s,
        }

    def run(self) -> Run:
        """Simulate to the end. Raises `EngineError` when requests wait that the scheduler never runs."""
        self._env = simpy.Environment()
        self._wake = self._env.event()
        self._room = self._env.event()
        self._env.process(self._arrivals())
        engine = self._env.process(self._engine())
        self._env.run(until=engine)
        return Run(self._config, self._table(), self.log)

    # --- the two processes ----------------------------------------------------------------------------------------

    def _arrivals(self) -> Events:
        for request in self._requests:
            if request.arrival_s > self._env.now:
                yield self._env.timeout(request.arrival_s - self._env.now)
            while self._max_concurrency is not None and len(self.scheduler.requests) >= self._max_concurrency:
                self._room = self._env.event()
                yield self._room
            request.arrival_s = self._env.now if self._max_concurrency is not None else request.arrival_s
            self._queued_s[int(request.request_id)] = self._env.now
            try:
                self.scheduler.add_request(request)
            except (InputError, CapacityError):
                self._done += 1
                continue
            if not self._wake.triggered:
                self._wake.succeed()
        self._all_submitted = True
        if not self._wake.triggered:
            self._wake.succeed()

    def _engine(self) -> Events:
        env, scheduler = self._env, self.scheduler
        yield env.timeout(0)  # requests that arrive at 0 are in the queue before the first step
        ahead: _Planned | None = None
        end_s = -self._rest_s
        while True:
            step = ahead or self._plan()
            if step is None:
                if self._all_submitted:
                    if scheduler.has_work:
                        raise EngineError(f"{scheduler.counts} and yet nothing to run: the scheduler is stuck")
                    return
                self._wake = env.event()
                yield self._wake
                continue
            start_s = env.now
            seconds = self._seconds(step.plan)
            # without planning ahead every step begins so, those that the cost model was made from too
            if ahead is None and self._async:
                seconds += float(start_latency_of(self._cost_model, start_s - end_s, step.entering))
            ahead = self._plan() if self._async else None
            yield env.timeout(seconds)
            self._finish_step(step, start_s, seconds)
            end_s = env.now

    # --- one step ---------------------------------------------------------------------------------------------------

    def _seconds(self, plan: StepPlan) -> float:
        seconds = float(self._cost_model.predict(plan.features))
        if self._noise:
            seconds *= float(np.exp(self._rng.normal(-0.5 * self._noise**2, self._noise)))
        return seconds

    def _plan(self) -> _Planned | None:
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        owner, entering = self._owner.take(plan.slots), 0
        if owner[owner.argmin()] < 0:
            begin = plan.slots[owner < 0].tolist()
            for slot in begin:
                self._attach(slot)
            owner, entering = self._owner.take(plan.slots), len(begin)
        return _Planned(plan, self._env.now, owner, entering)

    def _finish_step(self, step: _Planned, start_s: float, seconds: float) -> None:
        plan, scheduler = step.plan, self.scheduler
        alive = scheduler.alive(plan)
        outcome = self._outcomes.of(plan, alive, scheduler.slots.generated, seconds)
        finished = scheduler.update(plan, outcome)
        left = alive & ~scheduler.alive(plan) if finished else self._nobody[: len(alive)]
        log_step(self.log, plan, outcome, step.owner, start_s, left, step.planned_s)
        if finished:
            self._done += len(finished)
            if not self._room.triggered:
                self._room.succeed()
        if self._progress is not None and (finished or not len(self.log) % 256):
            self._progress(self._done, len(self._requests), self._env.now)

    def _attach(self, slot: int) -> None:
        request = self.scheduler.slots.requests[slot]
        if request is None:
            raise EngineError(f"slot {slot} is in a step and holds no request")
        number = int(request.request_id)
        self._owner[slot] = number
        self._outcomes.attach(slot, number, request.max_tokens)

    def _released(self, slot: int, request: Request) -> None:
        self._owner[slot] = -1

    def _table(self) -> RequestTable:
        table = table_from_log(self.log, len(self._requests))
        for name in ("arrival_s", "prompt_tokens", "max_tokens", "priority", "preemptions", "cached_tokens"):
            getattr(table, name)[:] = [getattr(request, name) for request in self._requests]
        if self.workload.prefix_of is not None and self.workload.prefix_tokens is not None:
            table.prefix_of[:], table.prefix_tokens[:] = self.workload.prefix_of, self.workload.prefix_tokens
        table.queued_s[:] = self._queued_s
        table.status = [status_of(request) for request in self._requests]
        return table


def may_preempt(workload: Workload, config: SchedulerConfig) -> bool:
    """Whether the KV pool could run short with every slot taken by one of the longest requests."""
    longest = np.sort(np.minimum(workload.prompt_tokens + workload.output_tokens, config.max_model_len))
    pages = -(-longest[-config.max_num_seqs :] // config.block_size)  # drafts never reach past a request's limit
    return bool(pages.sum() > config.num_pages - 1)


def cost_model_json(cost_model: CostModel | None) -> dict[str, Any] | None:
    """The content of the cost model's file, for config.json; None where it has none."""
    file = getattr(cost_model, "file", None)
    return None if file is None else dict(file.to_json())


def simulate(
    workload: Workload,
    policy: AnyPolicy,
    cost_model: CostModel,
    acceptance: AcceptanceModel,
    config: SchedulerConfig,
    **options: Any,
) -> Run:
    """`Simulation` (its options) run to the end."""
    return Simulation(workload, policy, cost_model, acceptance, config, **options).run()
