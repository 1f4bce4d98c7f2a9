"""Fit acceptance models to recorded rounds and say which describes unseen rounds best."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from aspire.errors import InputError
from aspire_simulator.acceptance import BetaEffect, ByPosition, Iid, Markov, RandomAcceptance
from aspire_simulator.margins import MarginModel
from aspire_simulator.rounds import Rounds

LEAST_ROUNDS = 20


@dataclass(frozen=True)
class AcceptanceFit:
    """Fitted models by kind, the held-out score of each, and the best one."""

    models: dict[str, RandomAcceptance]
    held_out: dict[str, float]  # mean log likelihood of a draft's outcome, nats; higher is better
    best: str
    rounds: int
    requests: int
    margin_auc: float  # chance that an accepted draft's margin exceeds a rejected one's; NaN without margins

    @property
    def model(self) -> RandomAcceptance:
        """The model that fits best."""
        return self.models[self.best]

    def to_dict(self) -> dict[str, Any]:
        """JSON object: scores and models."""
        auc = None if np.isnan(self.margin_auc) else self.margin_auc
        return {
            "best": self.best,
            "held_out_log_likelihood": self.held_out,
            "rounds": self.rounds,
            "requests": self.requests,
            "margin_auc": auc,
            "models": {kind: model.to_dict() for kind, model in self.models.items()},
        }


def fit_acceptance(source: str | Path | Rounds, workload: str | None = None) -> AcceptanceFit:
    """Fit iid, by-position, Markov and Beta models.

    ``source``: a run directory, a rounds npz (``workload`` names one of its recordings) or `Rounds`. Each model is
    fitted to the first half of every request's rounds and scored on the rest; the models returned are fitted to all
    rounds. Raises `InputError` when there are fewer than 20 rounds.
    """
    rounds = source if isinstance(source, Rounds) else Rounds.load(source, workload)
    if len(rounds) < LEAST_ROUNDS:
        raise InputError(f"{len(rounds)} rounds with drafts are too few to fit; record at least {LEAST_ROUNDS}")
    train, test = rounds.split()
    trial = _fit_all(train)
    held_out = {kind: float(model.log_likelihood(train, test).mean()) for kind, model in trial.items()}
    margins = MarginModel.fit(*rounds.margins_by_fate())
    provenance: dict[str, Any] = {
        "rounds": len(rounds),
        "requests": int(rounds.request.max()) + 1,
        "workload": workload,
    }
    if not isinstance(source, Rounds):
        provenance["source"] = Path(source).name
        provenance["sha256"] = hashlib.sha256(rounds.accepted.tobytes() + rounds.margin.tobytes()).hexdigest()
    models = {
        kind: replace(model, margins=margins, provenance={**provenance, "held_out_log_likelihood": held_out[kind]})
        for kind, model in _fit_all(rounds).items()
    }
    accepted, rejected, _ = rounds.margins_by_fate()
    best = max(held_out, key=lambda kind: held_out[kind])
    return AcceptanceFit(models, held_out, best, len(rounds), provenance["requests"], _auc(accepted, rejected))


def _fit_all(rounds: Rounds) -> dict[str, RandomAcceptance]:
    draws = rounds.draws()
    rate = float(draws.accepted.mean())
    deepest = int(draws.index.max()) + 1
    seen = np.bincount(draws.index, minlength=deepest)
    kept = np.bincount(draws.index, weights=draws.accepted, minlength=deepest)
    # a few pseudo-draws at the overall rate steady positions that few rounds reached
    by_position = tuple(((kept + 5 * rate) / (seen + 5)).tolist())
    after = [
        float((draws.accepted[draws.after_accept == flag].sum() + rate) / ((draws.after_accept == flag).sum() + 1))
        for flag in (True, False)
    ]
    models: tuple[RandomAcceptance, ...] = (Iid(rate), ByPosition(by_position), Markov(*after), _fit_beta(rounds))
    return {model.kind: model for model in models}


def _fit_beta(rounds: Rounds) -> BetaEffect:
    """Maximum likelihood of the beta-binomial over requests, in (logit mean, log concentration)."""
    from scipy.optimize import minimize
    from scipy.special import betaln, expit, logit

    draws = rounds.draws()
    accepted = np.bincount(draws.request, weights=draws.accepted)
    rejected = np.bincount(draws.request) - accepted

    def shape(x: Any) -> tuple[float, float]:
        mean, total = float(expit(x[0])), float(np.exp(np.clip(x[1], -3.0, 9.0)))
        return max(mean * total, 1e-6), max((1 - mean) * total, 1e-6)

    def loss(x: Any) -> float:
        a, b = shape(x)
        return float(-(betaln(a + accepted, b + rejected) - betaln(a, b)).sum())

    rate = float(np.clip(draws.accepted.mean(), 1e-4, 1 - 1e-4))
    found = minimize(loss, [logit(rate), np.log(30.0)], method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-6})
    return BetaEffect(*shape(found.x))


def _auc(accepted: Any, rejected: Any) -> float:
    """Mann-Whitney: P(margin of an accepted draft > margin of a rejected one), ties half."""
    accepted, rejected = accepted[np.isfinite(accepted)], np.sort(rejected[np.isfinite(rejected)])
    if not len(accepted) or not len(rejected):
        return float("nan")
    below = np.searchsorted(rejected, accepted, "left") + np.searchsorted(rejected, accepted, "right")
    return float(below.mean() / 2 / len(rejected))
