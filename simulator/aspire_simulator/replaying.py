"""Feed a recorded run back through the scheduler: does it compose the same steps?

The scheduler is deterministic: with the same limits, policy, cost model, arrivals and outcomes it must plan every step
as it did in the run. Where it does not, engine and simulator have drifted apart, or the recording lacks something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aspire.errors import CapacityError, InputError, UsageError
from aspire.rundir import Run
from aspire.runlog import DRAFT, StepLog
from aspire.scheduler import (
    CostModel,
    FinishReason,
    PolicySpec,
    Request,
    Scheduler,
    SchedulerConfig,
    StepOutcome,
    StepPlan,
)
from aspire.scheduler.prefix_links import names_from_links

FINISH_BY_STATUS = {reason.name.lower(): reason for reason in FinishReason if reason}


@dataclass(frozen=True)
class ReplayReport:
    """How far the replay followed the run."""

    steps: int
    equal_steps: int  # leading steps with the same rows, modes, query tokens, contexts and drafts
    difference: str  # the first difference, in words; empty when there is none

    @property
    def equal_share(self) -> float:
        """Share of the steps reproduced; steps behind the first difference do not count."""
        return self.equal_steps / self.steps if self.steps else 1.0


def config_of(run: Run) -> tuple[SchedulerConfig, PolicySpec]:
    """Scheduler limits and policy of a recorded run; raises `InputError` or `UsageError` when they cannot be had."""
    try:
        limits = dict(run.config["scheduler"])
        policy = dict(run.config["policy"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"config.json of the run lacks the object {error}; record the run with this version"
        ) from error
    if policy.get("kind") == "oracle":
        raise UsageError(
            "a run of the oracle cannot be replayed: it decides by hindsight; replay a run of another policy"
        )
    limits["graph_buckets"] = tuple(limits.get("graph_buckets", ()))
    try:
        return SchedulerConfig(**limits), PolicySpec.from_dict(policy, "policy of the run")
    except TypeError as error:
        raise InputError(f"config.json of the run: scheduler: {error}") from error


def recorded_cost_model(run: Run) -> CostModel | None:
    """The cost model the run was scheduled with: its content or its path in config.json."""
    given = run.config.get("cost_model")
    if given is None:
        return None
    from aspire_calibration import CostModelFile, LoadedCostModel

    file = CostModelFile.load(given) if isinstance(given, str) else CostModelFile.from_json(given)
    model: CostModel = LoadedCostModel(file, warn=lambda message: None)
    return model


def replay(run: Run, cost_model: CostModel | None = None) -> ReplayReport:
    """Replay ``run`` (from `read_run`, with rows). ``cost_model`` defaults to the one recorded in config.json.

    A request is in the queue of every step that is planned at or after the time at which it was queued. Aborts take
    effect before the first step that is planned at or after their finish time.
    """
    config, policy = config_of(run)
    log, table = run.steps, run.requests
    if len(log) and not log.num_rows:
        raise InputError("the run was recorded without rows and cannot be replayed; record it with rows")
    scheduler = Scheduler(config, policy, cost_model if cost_model is not None else recorded_cost_model(run))
    number = {name: index for index, name in enumerate(table.request_id)}
    order = np.argsort(table.queued_s, kind="stable").tolist()
    aborts = [i for i in np.argsort(table.finish_s, kind="stable").tolist() if table.status[i] == "abort"]
    names = names_from_links(table.prefix_of, table.prefix_tokens, table.prompt_tokens + table.output_tokens)
    plans: list[StepPlan] = []  # in flight
    compared = 0

    def finish_step() -> str:
        """Apply the recorded outcome of the oldest step in flight; what differs from the recording, in words."""
        nonlocal compared
        plan, step = plans.pop(0), compared
        owner = np.array([number[name] for name in plan.requests])
        if difference := _difference(plan, owner, log, step):
            return f"step {step}: {difference}"
        scheduler.update(plan, _outcome(log, step, table.status))
        compared += 1
        return ""

    ahead = log.planned_ahead
    for step in range(len(log)):
        if not ahead[step] and plans and (difference := finish_step()):
            return ReplayReport(len(log), compared, difference)
        planned_s = float(log.planned_s[step])
        while order and table.queued_s[order[0]] <= planned_s:
            index = order.pop(0)
            _submit(scheduler, run, index, names[index])
        while aborts and table.finish_s[aborts[0]] <= planned_s:
            scheduler.abort(table.request_id[aborts.pop(0)])
        plan = scheduler.schedule()
        if plan is None:
            return ReplayReport(len(log), compared, f"step {step}: the scheduler has nothing to run, the run had")
        plans.append(plan)
        if ahead[step] and (difference := finish_step()):
            return ReplayReport(len(log), compared, difference)
    while plans:
        if difference := finish_step():
            return ReplayReport(len(log), compared, difference)
    return ReplayReport(len(log), compared, "")


def _submit(scheduler: Scheduler, run: Run, index: int, page_names: Sequence[int]) -> None:
    table = run.requests
    request = Request(
        table.request_id[index],
        int(table.prompt_tokens[index]),
        int(table.max_tokens[index]),
        float(table.arrival_s[index]),
        int(table.priority[index]),
        page_names,
    )
    try:
        scheduler.add_request(request)
    except (InputError, CapacityError):
        if table.status[index] != "rejected":
            raise


def _difference(plan: StepPlan, owner: Any, log: StepLog, step: int) -> str:
    """The first difference between a plan and a logged step, in words; empty if there is none."""
    rows = log.rows_of(step)
    drafting = plan.modes == DRAFT
    planned = {
        "slot": plan.slots,
        "request": owner,
        "mode": plan.modes,
        "query_tokens": plan.query_tokens,
        "context": plan.start - np.where(drafting, plan.drafted, 0),
        "drafted": plan.drafted,
    }
    if plan.num_rows != rows.stop - rows.start:
        return f"{plan.num_rows} rows planned, {rows.stop - rows.start} recorded"
    for name, values in planned.items():
        wrong = np.flatnonzero(values != log.column(name)[rows])
        if len(wrong):
            row = int(wrong[0])
            return f"row {row}: {name} {int(values[row])} planned, {int(log.column(name)[rows][row])} recorded"
    features = plan.features.matrix()
    if not np.allclose(features, log.features[step], rtol=1e-9, atol=1e-6):
        return f"features {features.tolist()} planned, {log.features[step].tolist()} recorded"
    return ""


def _outcome(log: StepLog, step: int, status: list[str]) -> StepOutcome:
    rows = log.rows_of(step)
    finish = np.zeros(rows.stop - rows.start, dtype=np.int64)
    request = log.column("request")[rows]
    for row in np.flatnonzero(log.column("finished")[rows]).tolist():
        finish[row] = FINISH_BY_STATUS.get(status[int(request[row])], FinishReason.LENGTH)
    return StepOutcome(
        accepted=log.column("accepted")[rows].astype(np.int64),
        committed=log.column("committed")[rows].astype(np.int64),
        finish=finish,
        margin=log.margin[rows].astype(np.float64),
        seconds=float(log.duration_s[step]),
    )
