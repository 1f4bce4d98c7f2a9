"""Search for the policy that serves a scenario best, and say how much it gains, how surely, and where it stops paying.

Candidates share seeds (common random numbers): the same requests arrive at the same times and the same drafts are
right, so differences between candidates are differences between policies. The winner is chosen among the best few on
seeds the search has not seen, and its gain is measured on these, paired by seed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from aspire.errors import AspireError, InputError, UsageError, check_choice
from aspire.evidence import provenance
from aspire.fileio import write_text_atomic
from aspire.scheduler import PolicySpec
from aspire_simulator.breakeven import BreakEven, break_even
from aspire_simulator.candidates import Candidate, SearchSpace, candidate, label
from aspire_simulator.parallel import Workers, workers
from aspire_simulator.scenario import Scenario

OBJECTIVES = {
    "decode": "decode_only_throughput",
    "throughput": "output_throughput",
    "goodput": "request_goodput",
}
FINALISTS = 3


@dataclass(frozen=True)
class TuneSettings:
    """``study``: file that makes the search resumable: ``.db``/``.sqlite`` an SQLite study, ``.jsonl`` for the grid,
    else an Optuna journal. ``repeats``: seeds behind the gain's interval. ``method``: ``optuna`` or ``grid``.
    """

    scenario: Scenario
    space: SearchSpace = field(default_factory=SearchSpace)
    objective: str = "decode"
    method: str = "optuna"
    trials: int = 60
    repeats: int = 5
    seed: int = 0
    num_workers: int = 1
    ray_address: str | None = None
    study: str | None = None
    map_break_even: bool = True

    def __post_init__(self) -> None:
        check_choice("objective", self.objective, OBJECTIVES)
        check_choice("tuning method", self.method, ("optuna", "grid"))
        if self.objective == "goodput" and not self.scenario.goodput:
            raise UsageError("objective goodput needs limits: give --goodput, e.g. 'ttft:2000 tpot:50'")
        if self.trials < 1 or self.repeats < 2:
            raise UsageError(f"tuning needs at least 1 trial and 2 repeats, not {self.trials} and {self.repeats}")

    @property
    def metric(self) -> str:
        """Key of the summary that is maximised."""
        return OBJECTIVES[self.objective]

    def problem_hash(self) -> str:
        """Of all that must agree for a study to go on: scenario, space, objective, cost model."""
        problem = {
            "scenario": self.scenario.to_dict(),
            "space": asdict(self.space),
            "objective": self.objective,
            "cost_model": cost_model_hash(self.scenario),
        }
        return hashlib.sha256(json.dumps(problem, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class Gain:
    """Mean ratio over seeds, paired, with its 95 % interval (Student's t)."""

    over: str
    mean: float
    low: float
    high: float
    seeds: int

    @classmethod
    def of(cls, over: str, ours: Sequence[float], theirs: Sequence[float]) -> Gain:
        """From the objective by seed; raises `UsageError` where the baseline is 0."""
        if min(theirs) <= 0:
            raise UsageError(
                f"{over} reaches an objective of 0, so no gain can be stated; relax the limits or lower the load"
            )
        from scipy.stats import t

        ratio = np.asarray(ours) / np.asarray(theirs)
        half = float(t.ppf(0.975, len(ratio) - 1) * ratio.std(ddof=1) / math.sqrt(len(ratio)))
        return cls(over, float(ratio.mean()), float(ratio.mean()) - half, float(ratio.mean()) + half, len(ratio))


@dataclass(frozen=True)
class TuneResult:
    """The winner and what is expected of it."""

    policy: PolicySpec  # with provenance: ready for policy.json
    changes: Candidate  # the winner as changes to the scenario: policy and batch limits
    value: float  # objective, mean over the repeats
    gains: tuple[Gain, ...]
    break_even: BreakEven | None
    trials: tuple[dict[str, Any], ...]  # label, value, candidate; best first

    def to_dict(self) -> dict[str, Any]:
        """JSON object of the whole search."""
        return {
            "policy": self.policy.to_dict(),
            "limits": {name: value for name, value in self.changes.items() if name != "policy"},
            "value": self.value,
            "gains": [asdict(gain) for gain in self.gains],
            "break_even": self.break_even.to_dict() if self.break_even else None,
            "trials": list(self.trials),
        }


def tune(settings: TuneSettings, progress: Callable[[int, int, str, float], None] | None = None) -> TuneResult:
    """Search, confirm, measure. ``progress(done, trials, best label, best value)``.

    Autoregressive decoding always takes part in the final; it wins unless another candidate is better on average.
    """
    settings = replace(settings, space=settings.space.filled(settings.scenario))
    pool = workers(settings.num_workers, settings.ray_address)
    try:
        trials = _search(settings, pool, progress)
        baselines = _baselines(settings)
        finalists = [trial["candidate"] for trial in trials[:FINALISTS]] + list(baselines.values())
        values = _on_fresh_seeds(settings, finalists, pool)
        winner = max(range(len(finalists)), key=lambda index: float(np.mean(values[index])))
        changes = finalists[winner]
        gains = tuple(
            Gain.of(name, values[winner], values[len(finalists) - len(baselines) + index])
            for index, name in enumerate(baselines)
        )
        shown = None
        if settings.map_break_even and changes["policy"]["kind"] != "autoregressive":
            name = PolicySpec.from_dict(changes["policy"]).label
            shown = break_even(settings.scenario, changes, name, pool=pool)
    finally:
        pool.close()
    value = float(np.mean(values[winner]))
    facts = _provenance(settings, changes, value, gains, shown, len(trials))
    policy = replace(PolicySpec.from_dict(changes["policy"]), provenance=facts)
    return TuneResult(policy, changes, value, gains, shown, tuple(trials))


def evaluate(scenario: dict[str, Any], changes: Candidate, metric: str) -> float:
    """Objective of a candidate on one seed. Raises what the simulation raises."""
    return float(Scenario.from_dict({**scenario, **_overrides(changes)}).run().summary.get(metric, 0.0))


def try_candidate(scenario: dict[str, Any], changes: Candidate, metric: str) -> float | str:
    """`evaluate`, or the message of the error that a user can cause: a candidate that cannot run loses, no more."""
    try:
        return evaluate(scenario, changes, metric)
    except AspireError as error:
        return str(error)


def _overrides(changes: Candidate) -> dict[str, Any]:
    """Changes to a scenario; the candidate's policy says everything, so the scenario's own overrides are cleared."""
    return {**changes, "selector": None, "budget_ratio": None, "num_speculative_tokens": None}


def _baselines(settings: TuneSettings) -> dict[str, Candidate]:
    """Autoregressive and the paper's policy with its defaults, under the scenario's own limits and selector."""
    own, limits = settings.scenario.load_policy(), settings.scenario
    found = {}
    for kind in ("autoregressive", "aspire"):
        found[kind] = candidate(
            kind, {}, own.selector, own.num_speculative_tokens, limits.max_num_seqs, limits.max_num_batched_tokens
        )
    return found


def _on_fresh_seeds(settings: TuneSettings, finalists: list[Candidate], pool: Workers) -> list[list[float]]:
    """[finalists][repeats]: objectives on seeds that the search did not use."""
    seeds = [settings.scenario.seed + 1000 + repeat for repeat in range(settings.repeats)]
    jobs = [
        ((index, place), (settings.scenario.with_(seed=seed).to_dict(), changes, settings.metric))
        for index, changes in enumerate(finalists)
        for place, seed in enumerate(seeds)
    ]
    values = [[0.0] * len(seeds) for _ in finalists]
    for (index, place), value in pool.run(jobs, evaluate):
        values[index][place] = value
    return values


# --- the search -----------------------------------------------------------------------------------------------------


def _search(
    settings: TuneSettings, pool: Workers, progress: Callable[[int, int, str, float], None] | None
) -> list[dict[str, Any]]:
    """All trials that ran, best first."""
    found = _optuna(settings, pool, progress) if settings.method == "optuna" else _grid(settings, pool, progress)
    if not found:
        raise InputError("no candidate could be simulated; the first error was printed with the trials")
    unique = {json.dumps(trial["candidate"], sort_keys=True): trial for trial in found}
    return sorted(unique.values(), key=lambda trial: -float(trial["value"]))


def _grid(settings: TuneSettings, pool: Workers, progress: Any) -> list[dict[str, Any]]:
    candidates = {json.dumps(c, sort_keys=True): c for c in settings.space.grid()}
    header = json.dumps({"problem": settings.problem_hash()})
    found: dict[str, Any] = {}
    path = Path(settings.study) if settings.study else None
    if path is not None and path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        if not lines or lines[0] != header:
            raise UsageError(f"study {path} belongs to another tuning problem; choose another file")
        found = {line["key"]: line["value"] for line in map(json.loads, lines[1:])}
    scenario = settings.scenario.to_dict()
    todo = [(key, (scenario, changes, settings.metric)) for key, changes in candidates.items() if key not in found]
    for key, value in pool.run(todo, try_candidate):
        found[key] = value
        if path is not None:
            lines = [header, *(json.dumps({"key": k, "value": v}) for k, v in found.items())]
            write_text_atomic(path, "\n".join(lines) + "\n")
        _tell(
            progress,
            len(found),
            len(candidates),
            [_trial(candidates[k], v) for k, v in found.items() if k in candidates],
        )
    return [trial for key, value in found.items() if key in candidates and (trial := _trial(candidates[key], value))]


def _optuna(settings: TuneSettings, pool: Workers, progress: Any) -> list[dict[str, Any]]:
    try:
        import optuna
    except ImportError as error:
        raise UsageError("tuning needs optuna: pip install 'aspire-llm[tune]', or use --method grid") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        study_name="aspire",
        storage=_storage(optuna, settings.study),
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=settings.seed, n_startup_trials=12, constant_liar=True),
    )
    problem = study.user_attrs.get("problem")
    if problem is None:
        study.set_user_attr("problem", settings.problem_hash())
        for point in settings.space.starting_points():
            study.enqueue_trial(point)
    elif problem != settings.problem_hash():
        raise UsageError(f"study {settings.study} belongs to another tuning problem; choose another file")
    complete = optuna.trial.TrialState.COMPLETE
    scenario = settings.scenario.to_dict()

    def finished() -> list[dict[str, Any]]:
        done = study.get_trials(deepcopy=False, states=(complete,))
        return [{"label": label(c), "value": t.value, "candidate": c} for t in done if (c := t.user_attrs["candidate"])]

    def questions() -> Iterator[tuple[Any, tuple[Any, ...]]]:
        for _ in range(settings.trials - len(finished())):
            trial = study.ask()
            changes = settings.space.suggest(trial)
            trial.set_user_attr("candidate", changes)
            yield trial, (scenario, changes, settings.metric)

    for trial, value in pool.run(questions(), try_candidate):
        if isinstance(value, str):
            trial.set_user_attr("error", value)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, value)
        _tell(progress, len(finished()), settings.trials, finished())
    return finished()


def _storage(optuna: Any, path: str | None) -> Any:
    if path is None:
        return None
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if Path(path).suffix in (".db", ".sqlite"):
        return f"sqlite:///{path}"
    backend = optuna.storages.journal.JournalFileBackend(str(path))
    return optuna.storages.JournalStorage(backend)


def _trial(changes: Candidate, value: float | str) -> dict[str, Any] | None:
    return None if isinstance(value, str) else {"label": label(changes), "value": value, "candidate": changes}


def _tell(progress: Any, done: int, total: int, trials: Sequence[dict[str, Any] | None]) -> None:
    known = [trial for trial in trials if trial is not None]
    if progress is not None and known:
        best = max(known, key=lambda trial: float(trial["value"]))
        progress(done, total, best["label"], best["value"])


# --- provenance -----------------------------------------------------------------------------------------------------


def cost_model_hash(scenario: Scenario) -> str:
    """SHA-256 of the cost model's content."""
    content = scenario.load_cost_model().file.to_json()
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _provenance(
    settings: TuneSettings,
    changes: Candidate,
    value: float,
    gains: tuple[Gain, ...],
    shown: BreakEven | None,
    trials: int,
) -> dict[str, Any]:
    file = settings.scenario.load_cost_model().file
    given = settings.scenario.acceptance
    notes = ["the interval covers requests and acceptance, not errors of the cost model: see cost_model.accuracy"]
    if file.kind != "measured":
        notes.append(f"the cost model is {file.kind}, not measured on this hardware")
    if isinstance(given, str) and len(settings.space.selectors) > 1:
        notes.append("one acceptance model was used for all selectors: they differ in cost only")
    return {
        "tuned_by": provenance(),
        "cost_model": {
            "sha256": cost_model_hash(settings.scenario),
            "kind": file.kind,
            "hardware": file.hardware.get("name"),
            "model": file.model.get("name"),
            "accuracy": file.accuracy,
        },
        "scenario": settings.scenario.to_dict(),
        "objective": settings.metric,
        "expected": value,
        "gains": [asdict(gain) for gain in gains],
        "limits": {name: number for name, number in changes.items() if name != "policy"},
        "trials": trials,
        "speculation_pays": shown.to_dict() if shown else None,
        "notes": notes,
    }
