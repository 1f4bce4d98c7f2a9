"""Draft-length rules for recorded rounds. Each sees what a live engine would, `Hindsight` excepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler.survival import RateTracker, SurvivalModel, SurvivalParams, best_rate, worth_drafting

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
FIRST_ACCEPTANCE = 0.9  # alpha_0 of the paper


class Rule(ABC):
    """A draft-length rule over requests 0..n-1. `more` is asked before each draft, `drafted` told its margin."""

    @abstractmethod
    def more(self, requests: Ints, drafted: int) -> NDArray[np.bool_]:
        """[n]: draft once more, holding ``drafted`` drafts."""

    def drafted(self, requests: Ints, position: int, margin: Floats) -> None:  # noqa: B027  (many learn nothing here)
        """The draft at ``position`` (from 0) was made with ``margin`` [n]."""

    def verified(self, requests: Ints, drafted: Ints, accepted: Ints) -> None:  # noqa: B027
        """A round ended."""

    def foretold(self, requests: Ints, accepted: Ints) -> None:  # noqa: B027
        """What the round would accept; for hindsight alone."""


class LengthRule(Rule):
    """A rule that knows its draft length ``length`` [requests] when the round begins."""

    def __init__(self, requests: int, length: int) -> None:
        self.length: Ints = np.full(requests, length, dtype=np.int64)

    def more(self, requests: Ints, drafted: int) -> NDArray[np.bool_]:
        return np.asarray(self.length[requests] > drafted)


class Hindsight(LengthRule):
    """Drafts exactly what will be accepted: optimal whenever a draft costs less than a verification."""

    def foretold(self, requests: Ints, accepted: Ints) -> None:
        self.length[requests] = accepted


class Paper(LengthRule):
    """g* = argmax of E(g) / (1 + price g), alpha by request; the constants of the paper (arXiv 2609.17943)."""

    def __init__(self, requests: int, price: float, d_max: int, w: float = 0.8, gamma_init: int = 3) -> None:
        super().__init__(requests, gamma_init)
        self._alpha: Floats = np.full(requests, FIRST_ACCEPTANCE)
        self._w, self._d_max = w, d_max
        self._time = 1.0 + price * np.arange(d_max + 1)

    def verified(self, requests: Ints, drafted: Ints, accepted: Ints) -> None:
        new = accepted / np.maximum(np.minimum(accepted + 1, drafted), 1)
        old = self._alpha[requests]
        self._alpha[requests] = np.where(drafted > 0, self._w * old + (1.0 - self._w) * new, old)
        tokens = np.cumsum(np.power(self._alpha[requests, None], np.arange(self._d_max + 1)), axis=1)
        self.length[requests] = np.argmax(tokens / self._time, axis=1)


class PositionSurvival(LengthRule):
    """Survival by position of each request, fading, shrunk to all requests; learns what the engine would see."""

    def __init__(self, requests: int, price: float, d_max: int, keep: float = 0.9, shrink: float = 3.0) -> None:
        super().__init__(requests, 3)
        self._right: Floats = np.zeros((requests, d_max))
        self._seen: Floats = np.zeros((requests, d_max))
        self._keep, self._shrink = keep, shrink
        self._time = 1.0 + price * np.arange(d_max + 1)

    def verified(self, requests: Ints, drafted: Ints, accepted: Ints) -> None:
        place = np.arange(self._right.shape[1])
        judged = np.minimum(accepted + 1, drafted)
        self._right[requests] = self._keep * self._right[requests] + (place < accepted[:, None])
        self._seen[requests] = self._keep * self._seen[requests] + (place < judged[:, None])
        overall = (self._right.sum() + 10 * FIRST_ACCEPTANCE) / (self._seen.sum() + 10)
        pooled = (self._right.sum(axis=0) + 20 * overall) / (self._seen.sum(axis=0) + 20)
        hazard = (self._right[requests] + self._shrink * pooled) / (self._seen[requests] + self._shrink)
        survived = np.cumsum(np.cumprod(hazard, axis=1), axis=1)
        self.length[requests] = np.argmax(np.c_[np.ones(len(requests)), 1.0 + survived] / self._time, axis=1)


class Goodput(Rule):
    """Margins, stopped by price: `SurvivalModel`, `worth_drafting` and `RateTracker`, as the live policy uses them.

    ``believed`` is the price of a draft that the rule reckons with, when that is not the true one.
    """

    def __init__(
        self,
        requests: int,
        price: float,
        d_max: int,
        params: SurvivalParams | None = None,
        believed: float | None = None,
    ) -> None:
        self.model = SurvivalModel(requests, d_max, params)
        self._rate = RateTracker(
            best_rate(self.model.params.prior_acceptance, price, d_max), prior_tokens=4.0 * requests
        )
        self._price = price
        self._believed = price if believed is None else believed

    def more(self, requests: Ints, drafted: int) -> NDArray[np.bool_]:
        held = np.full(len(requests), drafted)
        survival, upcoming = self.model.survival(requests, held), self.model.next_acceptance(requests, held)
        return worth_drafting(survival, upcoming, self._believed, self._rate.rate)

    def drafted(self, requests: Ints, position: int, margin: Floats) -> None:
        self.model.observe_drafts(requests, np.full(len(requests), position), margin)

    def verified(self, requests: Ints, drafted: Ints, accepted: Ints) -> None:
        self.model.observe_verified(requests, drafted, accepted)
        self._rate.observe(float((accepted + 1).sum()), float((1.0 + self._price * drafted).sum()))


class Late(Rule):
    """``rule`` told everything one decision late, as where a step is planned while the one before it runs.

    It asks for a draft before it knows the margin of the last one, and begins a round before it knows what became of
    the one before.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._news: list[Callable[[], None]] = []

    def more(self, requests: Ints, drafted: int) -> NDArray[np.bool_]:
        wanted = self._rule.more(requests, drafted)
        for news in self._news:
            news()
        self._news.clear()
        return wanted

    def drafted(self, requests: Ints, position: int, margin: Floats) -> None:
        self._news.append(partial(self._rule.drafted, requests, position, margin))

    def verified(self, requests: Ints, drafted: Ints, accepted: Ints) -> None:
        self._news.append(partial(self._rule.verified, requests, drafted, accepted))


def play_round(rule: Rule, requests: Ints, margin: Floats, runs: Ints) -> tuple[Ints, Ints]:
    """One round of ``requests`` [n]: drafted [n] and accepted [n].

    ``margin`` [n, d_max] is shown draft by draft; of d_max drafts ``runs`` [n] would be accepted.
    """
    rule.foretold(requests, runs)
    drafted = np.zeros(len(requests), dtype=np.int64)
    live = np.arange(len(requests))
    for position in range(margin.shape[1]):
        live = live[rule.more(requests[live], position)]
        if len(live) == 0:
            break
        rule.drafted(requests[live], position, margin[live, position])
        drafted[live] += 1
    accepted = np.minimum(runs, drafted)
    rule.verified(requests, drafted, accepted)
    return drafted, accepted
