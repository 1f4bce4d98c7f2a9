"""What the tuner may try: policy kinds with their parameters, selectors, budgets, batch limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from aspire.errors import UsageError, check_choice
from aspire.scheduler import POLICIES, SELECTOR_KINDS, PolicySpec, SelectorSpec
from aspire_simulator.scenario import Scenario

Candidate = dict[str, Any]  # changes to a scenario: "policy" (object of policy.json) and limits

# kind -> parameter -> (low, high): whole numbers where both bounds are; a parameter that the policy lacks is left out
SPACES: dict[str, dict[str, tuple[float, float]]] = {
    "fixed": {"g": (1, 12)},
    "staggered": {"g": (1, 12)},
    "fsm": {"g_init": (1, 10)},
    "aspire": {"w": (0.5, 0.98), "alpha_0": (0.6, 0.95), "gamma_init": (1, 8)},
    "goodput": {"hysteresis": (0.0, 0.2), "explore_rounds": (32, 512), "window_tokens": (1000.0, 20000.0)},
}
DEPTHS: tuple[int, ...] = (4, 8, 16)  # num_speculative_tokens
GRID: dict[str, list[dict[str, Any]]] = {
    "fixed": [{"g": g} for g in (2, 3, 5, 8)],
    "staggered": [{"g": g} for g in (3, 5, 8)],
}


class Trial(Protocol):
    """The part of an Optuna trial used here."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...

    def suggest_int(self, name: str, low: int, high: int) -> int: ...

    def suggest_float(self, name: str, low: float, high: float) -> float: ...


@dataclass(frozen=True)
class SearchSpace:
    """Sets to choose from. Empty selectors or budgets: those for which acceptance is known, else the scenario's own."""

    kinds: tuple[str, ...] = tuple(kind for kind in SPACES if kind in POLICIES)
    selectors: tuple[str, ...] = ()
    budget_ratios: tuple[float, ...] = ()
    depths: tuple[int, ...] = DEPTHS
    max_num_seqs: tuple[int, ...] = ()
    max_num_batched_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for kind in self.kinds:
            check_choice("policy", kind, POLICIES)
        for selector in self.selectors:
            check_choice("selector", selector, SELECTOR_KINDS)
        if not self.kinds:
            raise UsageError("the search space has no policy kinds; give at least one, e.g. aspire")

    def filled(self, scenario: Scenario) -> SearchSpace:
        """With what was left empty taken from ``scenario``."""
        own = scenario.load_policy().selector
        known: list[str] = []
        given = scenario.acceptance
        if not isinstance(given, str) and "kind" not in given:
            known = [key for key in given if key != "*"]
        selectors = self.selectors or tuple(dict.fromkeys(key.partition("@")[0] for key in known)) or (own.kind,)
        ratios = tuple(float(key.partition("@")[2]) for key in known if "@" in key)
        return SearchSpace(
            self.kinds,
            selectors,
            self.budget_ratios or tuple(dict.fromkeys(ratios)) or (own.budget_ratio,),
            self.depths,
            self.max_num_seqs or (scenario.max_num_seqs,),
            self.max_num_batched_tokens or (scenario.max_num_batched_tokens,),
        )

    def suggest(self, trial: Trial) -> Candidate:
        """A candidate from the choices of an Optuna trial."""
        kind = str(trial.suggest_categorical("kind", self.kinds))
        params: dict[str, Any] = {}
        for name, (low, high) in parameter_ranges(kind).items():
            if isinstance(low, int) and isinstance(high, int):
                params[name] = trial.suggest_int(f"{kind}.{name}", low, high)
            else:
                params[name] = round(trial.suggest_float(f"{kind}.{name}", low, high), 3)
        selector = SelectorSpec(
            kind=str(trial.suggest_categorical("selector", self.selectors)),
            budget_ratio=float(trial.suggest_categorical("budget_ratio", self.budget_ratios)),
        )
        depth = int(trial.suggest_categorical("num_speculative_tokens", self.depths))
        seqs = int(trial.suggest_categorical("max_num_seqs", self.max_num_seqs))
        tokens = int(trial.suggest_categorical("max_num_batched_tokens", self.max_num_batched_tokens))
        return candidate(kind, params, selector, depth, seqs, tokens)

    def starting_points(self) -> Iterator[dict[str, Any]]:
        """Trial parameters to try first: every kind with its defaults, so that a search never misses the plain
        choices.
        """
        shared = {
            "selector": self.selectors[0],
            "budget_ratio": self.budget_ratios[0],
            "num_speculative_tokens": self.depths[-1],
            "max_num_seqs": self.max_num_seqs[0],
            "max_num_batched_tokens": self.max_num_batched_tokens[0],
        }
        for kind in self.kinds:
            defaults = POLICIES[kind].Params()
            chosen = {f"{kind}.{name}": getattr(defaults, name) for name in parameter_ranges(kind)}
            yield {"kind": kind, **chosen, **shared}

    def grid(self) -> list[Candidate]:
        """A small grid: defaults of every kind, a few draft lengths, every selector, budget and limit."""
        found = []
        settings = itertools.product(
            self.selectors, self.budget_ratios, self.max_num_seqs, self.max_num_batched_tokens, self.kinds
        )
        for selector, ratio, seqs, tokens, kind in settings:
            for params in GRID.get(kind, [{}]):
                spec = SelectorSpec(kind=selector, budget_ratio=ratio)
                found.append(candidate(kind, params, spec, self.depths[-1], seqs, tokens))
        return found


def parameter_ranges(kind: str) -> Mapping[str, tuple[float, float]]:
    """Tunable parameters of a policy kind that this version of it has."""
    known = {field.name for field in fields(POLICIES[kind].Params)}
    return {name: bounds for name, bounds in SPACES.get(kind, {}).items() if name in known}


def candidate(
    kind: str, params: Mapping[str, Any], selector: SelectorSpec, depth: int, seqs: int, tokens: int
) -> Candidate:
    """Changes to a scenario. Autoregressive decoding has no selector to choose: all its variants are one candidate."""
    spec = PolicySpec(kind) if kind == "autoregressive" else PolicySpec(kind, dict(params), selector, depth)
    return {"policy": spec.to_dict(), "max_num_seqs": seqs, "max_num_batched_tokens": tokens}


def label(changes: Candidate) -> str:
    """Short name of a candidate."""
    spec = PolicySpec.from_dict(changes["policy"])
    budget = "" if spec.kind == "autoregressive" else f"@{spec.selector.budget_ratio:g}"
    return f"{spec.label}{budget} seqs={changes['max_num_seqs']}"
