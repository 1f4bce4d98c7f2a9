"""Simulated against measured: the same requests, policy and outcomes, timed by the cost model instead of the
machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import InputError
from aspire.rundir import Run, read_run
from aspire.runlog import PREFILL, VERIFY, StepLog
from aspire.scheduler import CostModel, StepFeatures
from aspire.scheduler.prefix_links import links_among
from aspire_calibration import RunValidation, validate_steps
from aspire_simulator.acceptance import AcceptanceModel, Outcomes
from aspire_simulator.executor import simulate
from aspire_simulator.metrics import summarize
from aspire_simulator.replaying import ReplayReport, config_of, recorded_cost_model, replay
from aspire_simulator.rounds import RecordedTraces, Rounds
from aspire_simulator.workload import Workload

Floats = NDArray[np.float64]
THROUGHPUT_BAND = 0.06
LATENCY_BAND = 0.10
THROUGHPUTS = ("decode_only_throughput", "output_throughput", "request_throughput")
LATENCIES = tuple(
    f"{statistic}_{name}_ms" for name in ("ttft", "tpot", "e2el") for statistic in ("mean", "median", "p90", "p99")
)


@dataclass(frozen=True)
class ExactOutcomes(AcceptanceModel):
    """The outcomes of one run, by request and output position, so that another schedule of it can be simulated.

    Positions that the run never drafted (bonus tokens, autoregressive steps) get the outcome and margin of a random
    other position of the same request.
    """

    kind = "exact"
    first: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))  # [requests + 1]
    accepted: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))  # [positions]
    margin: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    wrong_margin: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))

    @classmethod
    def of(cls, run: Run) -> ExactOutcomes:
        """From the rows of ``run``."""
        log = run.steps
        outputs = run.requests.max_tokens
        first = np.concatenate([[0], np.cumsum(outputs)])
        known = np.zeros(int(first[-1]), dtype=bool)
        accepted, margin = np.zeros_like(known), np.zeros(len(known), dtype=np.float32)
        wrong = np.zeros(len(known), dtype=np.float32)
        if (log.column("drafted")[log.column("mode") == VERIFY] > 0).any():
            rounds = Rounds.from_steps(log)
            request, generated = _round_starts(log)
            draws = rounds.draws()
            seen = np.minimum(rounds.accepted + 1, rounds.drafted)
            owner = np.repeat(np.arange(len(rounds)), seen)
            place = first[request[owner]] + generated[owner] + draws.index
            inside = place < first[request[owner] + 1]
            place, owner = place[inside], owner[inside]
            known[place], accepted[place] = True, draws.accepted[inside]
            margin[place] = np.nan_to_num(rounds.margin[owner, draws.index[inside]])
            pool = RecordedTraces.of(rounds).wrong_margin
            wrong[:] = np.random.default_rng(0).choice(pool, size=len(wrong))
            _fill(first, known, accepted, margin)
        return cls(first=first, accepted=accepted, margin=margin, wrong_margin=wrong)

    def draw(self, seed: int, request: int, length: int) -> Outcomes:
        span = slice(int(self.first[request]), int(self.first[request]) + length)
        if span.stop > self.first[request + 1]:
            raise InputError(
                f"request {request} has {self.first[request + 1] - span.start} recorded positions, not {length}"
            )
        difficulty = np.where(self.accepted[span], -1.0, 1.0).astype(np.float32)
        return Outcomes(difficulty, self.margin[span], self.margin[span], self.wrong_margin[span])

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "positions": len(self.accepted)}


def _round_starts(log: StepLog) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(request, output tokens before it) of every round, in the order of `Rounds.from_steps`."""
    request = log.column("request")
    order = np.argsort(request, kind="stable")
    request, committed = request[order].astype(np.int64), log.column("committed")[order].astype(np.int64)
    running = np.cumsum(committed) - committed
    fresh = np.flatnonzero(np.diff(request, prepend=-1))
    before = running - np.repeat(running[fresh], np.diff(np.append(fresh, len(request))))
    rounds = (log.column("mode")[order] == VERIFY) & (log.column("drafted")[order] > 0)
    return request[rounds], before[rounds]


def _fill(first: Any, known: Any, accepted: Any, margin: Any) -> None:
    """Give the unknown positions of each request the values of its known ones, drawn at random."""
    everywhere = np.flatnonzero(known)
    for request in range(len(first) - 1):
        low, high = int(first[request]), int(first[request + 1])
        missing = low + np.flatnonzero(~known[low:high])
        mine = low + np.flatnonzero(known[low:high])
        source = np.random.default_rng([request, 4]).choice(mine if len(mine) else everywhere, size=len(missing))
        accepted[missing], margin[missing] = accepted[source], margin[source]


@dataclass(frozen=True)
class Comparison:
    """One metric, simulated and measured."""

    metric: str
    measured: float
    simulated: float
    band: float  # largest relative error that passes

    @property
    def error(self) -> float:
        """(simulated - measured) / measured."""
        return (self.simulated - self.measured) / self.measured

    @property
    def verdict(self) -> str:
        """PASS or WARN."""
        return "PASS" if abs(self.error) <= self.band else "WARN"


@dataclass(frozen=True)
class RunCheck:
    """What `validate_run` found."""

    path: str
    policy: str
    rows: int  # most rows in a step
    context_tokens: float  # mean context of the decoding rows, drafts left out
    composition: ReplayReport
    step_times: RunValidation  # every step as recorded, priced by the cost model
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        """Every step reproduced and every metric within its band."""
        return self.composition.equal_share == 1.0 and all(item.verdict == "PASS" for item in self.comparisons)

    def to_dict(self) -> dict[str, Any]:
        """JSON object of the check."""
        return {
            "run": self.path,
            "policy": self.policy,
            "rows": self.rows,
            "context_tokens": self.context_tokens,
            "passed": self.passed,
            "steps": self.composition.steps,
            "steps_equal_share": self.composition.equal_share,
            "first_difference": self.composition.difference,
            "step_times": self.step_times.to_json(),
            "metrics": [
                {
                    "metric": item.metric,
                    "measured": item.measured,
                    "simulated": item.simulated,
                    "error": item.error,
                    "band": item.band,
                    "verdict": item.verdict,
                }
                for item in self.comparisons
            ],
        }


def validate_run(path: str | Path, cost_model: CostModel | None = None) -> RunCheck:
    """Check the run directory ``path`` against the simulator.

    1. Replay: the scheduler must compose every recorded step again.
    2. Step times: every recorded step, priced by the cost model (default: the one in config.json).
    3. Simulation: the same requests and acceptance outcomes on the simulated clock, the cost model deciding how long
       each step takes, and the policy by the prices that it had in the run; throughput must agree within 6 %, latency
       percentiles within 10 %. Those of a run that was repeated (``aspire bench --repeats``) are means of all repeats:
       the TTFT of requests that begin together is one step, one sample a run.
    Raises `InputError` when the run has no rows or there is no cost model.
    """
    run = read_run(path)
    prices = recorded_cost_model(run)
    model = cost_model if cost_model is not None else prices
    if model is None:
        raise InputError(f"run {path} was made without a cost model; give one with --cost-model")
    config, policy = config_of(run)
    idle_s = _rest_before(run)
    composition = replay(run, prices)
    finished = np.flatnonzero(~np.isnan(run.requests.finish_s) & (run.requests.output_tokens > 0))
    if not len(finished):
        raise InputError(f"run {path} finished no request; there is nothing to compare")
    steps = run.steps
    rest_s = None
    if config.async_scheduling:
        ends_s = steps.start_s + steps.duration_s
        rest_s = np.where(steps.planned_ahead, np.nan, steps.start_s - np.append(-idle_s, ends_s[:-1]))
    features = StepFeatures.from_matrix(steps.features)
    step_times = validate_steps(model, features, steps.duration_s, rest_s, entering_requests(steps))
    begin_s = float(steps.start_s[0])
    arrival_s = run.requests.arrival_s[finished] - begin_s
    workload, outcomes = _workload(run, finished, arrival_s), _outcomes(run, finished)
    simulated = simulate(workload, policy, model, outcomes, config, policy_prices=prices, rest_s=idle_s + begin_s)
    simulated.requests.arrival_s[:] = arrival_s  # those before the first step waited for it
    measured, expected = summarize(run) | _means_of_repeats(run), summarize(simulated)
    comparisons = [
        Comparison(name, measured[name], expected[name], THROUGHPUT_BAND if name in THROUGHPUTS else LATENCY_BAND)
        for name in (*THROUGHPUTS, *LATENCIES)
        if measured.get(name) and expected.get(name) is not None
    ]
    decoding = steps.column("mode") != PREFILL
    context = float(steps.column("context")[decoding].mean()) if decoding.any() else 0.0
    rows = int(np.diff(steps.row_end, prepend=0).max())
    return RunCheck(str(path), policy.label, rows, context, composition, step_times, tuple(comparisons))


def _means_of_repeats(run: Run) -> dict[str, float]:
    """Latencies of the repeats of ``run``, if there were several."""
    of_repeats = run.summary.get("repeats", {})
    return {name: float(np.mean(of_repeats[name])) for name in LATENCIES if name in of_repeats}


def _rest_before(run: Run) -> float:
    """Seconds that the engine had been idle when the recording began; infinite where it ran nothing before, or where
    the recording does not tell."""
    given = run.config.get("rest_s")
    if given is None:
        return float("inf")
    if not isinstance(given, (int, float)) or not 0 <= given < float("inf"):
        raise InputError(f"config.json of the run: rest_s must be seconds >= 0 or null, got {given!r}; record it again")
    return float(given)


def entering_requests(log: StepLog) -> NDArray[np.int64]:
    """[steps]: requests that begin their prompts in each step, those that were preempted anew: in the first chunk of a
    prompt, which does not go on where the row of the request before it ended."""
    order = np.argsort(log.column("request"), kind="stable")
    request, mode, context, tokens = (
        log.column(name)[order] for name in ("request", "mode", "context", "query_tokens")
    )
    prompt = mode == PREFILL
    goes_on = np.zeros(len(order), dtype=bool)
    goes_on[1:] = (request[1:] == request[:-1]) & prompt[:-1] & (context[1:] == (context + tokens)[:-1])
    begins = prompt & ~goes_on
    return np.bincount(log.step_of_row()[order][begins], minlength=len(log))


def _workload(run: Run, which: NDArray[np.int64], arrival_s: Floats) -> Workload:
    """The requests ``which``, arriving at ``arrival_s`` [n] after the first step's start, or queued before it."""
    table = run.requests
    if (np.diff(arrival_s) < 0).any():
        raise InputError("requests.csv of the run is not ordered by arrival; record the run with this version")
    prefix_of, prefix_tokens = links_among(which, table.prefix_of, table.prefix_tokens)
    return Workload(
        name="recorded run",
        arrival_s=np.maximum(arrival_s, 0.0),
        prompt_tokens=table.prompt_tokens[which],
        output_tokens=table.output_tokens[which],
        prefix_of=prefix_of,
        prefix_tokens=prefix_tokens,
    )


def _outcomes(run: Run, which: NDArray[np.int64]) -> ExactOutcomes:
    exact = ExactOutcomes.of(run)
    spans = [slice(int(exact.first[i]), int(exact.first[i] + run.requests.output_tokens[i])) for i in which.tolist()]
    index = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    first = np.concatenate([[0], np.cumsum(run.requests.output_tokens[which])])
    return ExactOutcomes(
        first=first,
        accepted=exact.accepted[index],
        margin=exact.margin[index],
        wrong_margin=exact.wrong_margin[index],
    )
