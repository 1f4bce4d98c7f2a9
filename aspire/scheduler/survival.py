"""Are all drafts so far accepted? An online estimate from margins, and the stopping rule built on it (docs/goodput.md).

Everything is learned from what a verification shows: drafts before the first rejection are accepted, the first rejected
one is rejected, those behind it teach nothing. State is struct-of-arrays over slots; no call loops over requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import InputError, UsageError, check_keys

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FEATURE_COUNT = 3  # 1, sqrt(margin), position / d_max
_LOGIT_LIMIT = 12.0
_MARGIN_LIMIT = 6.0  # drafts are as sure beyond; one left without a rival by top-k or top-p has infinity


@dataclass(frozen=True)
class SurvivalParams:
    """Priors and memories. The defaults lie on a flat optimum of recorded rounds (reports/notes/goodput.md).

    ``intercept``, ``slope``, ``position_slope``: prior of the population's logit, with ``precision`` each.
    ``effect_variance``, ``effect_carry``: a request's own shift of that logit, a stationary AR(1) process over rounds.
    ``prior_acceptance``, ``prior_trials``: of the next draft, before its margin is known (``alpha_0`` of the paper).
    ``position_trials``: strength of the pull of each position's acceptance to that of all positions.
    ``memory_rounds``: population evidence fades by 1/e over so many rounds, those without drafts included.
    ``optimism``: standard deviations of a request's shift added while it holds no draft: none is given up for ever.
    """

    intercept: float = -0.3
    slope: float = 2.3
    position_slope: float = 0.0
    precision: tuple[float, float, float] = (2.0, 4.0, 20.0)
    effect_variance: float = 0.8
    effect_carry: float = 0.94
    prior_acceptance: float = 0.9
    prior_trials: float = 10.0
    position_trials: float = 200.0
    memory_rounds: float = 3200.0
    optimism: float = 0.5

    def __post_init__(self) -> None:
        for name in ("effect_variance", "prior_trials", "position_trials", "memory_rounds"):
            if not getattr(self, name) > 0:
                raise UsageError(f"survival parameter {name}={getattr(self, name)} is not positive; give a number > 0")
        if not 0.0 <= self.effect_carry < 1.0 or not 0.0 < self.prior_acceptance < 1.0:
            raise UsageError("survival parameters effect_carry and prior_acceptance must be in 0..1, below 1")
        if len(self.precision) != FEATURE_COUNT or min(self.precision) <= 0 or self.slope < 0 or self.optimism < 0:
            raise UsageError("survival parameters need three positive precisions, slope >= 0 and optimism >= 0")


def logistic(logit: Any) -> Floats:
    """1 / (1 + exp(-logit)), with the logit held within +-12."""
    return np.asarray(1.0 / (1.0 + np.exp(-np.minimum(np.maximum(logit, -_LOGIT_LIMIT), _LOGIT_LIMIT))))


def _sums(row: Ints, values: Floats, count: int) -> Floats:
    return np.bincount(row, values, count).astype(np.float64, copy=False)


def worth_drafting(survival: Floats, upcoming: Floats, price: Floats | float, rate: float) -> NDArray[np.bool_]:
    """[n]: draft once more, because some look-ahead of j drafts earns more tokens than its price buys elsewhere.

    ``survival`` [n]: P(all drafts so far accepted). ``upcoming`` [n, h]: P(the next 1..h are accepted too, given that).
    ``price`` [n], [n, h] or a number: marginal time of one more draft row and verified token, per draft ahead.
    ``rate``: tokens per unit of time of the whole batch (lambda, see `RateTracker`).
    """
    if upcoming.shape[1] == 1 and np.ndim(price) < 2:
        return np.asarray(survival * upcoming[:, 0] > rate * price)
    gain = survival[:, None] * np.cumsum(upcoming, axis=1)
    each = np.asarray(price, dtype=np.float64)
    each = each[:, None] if each.ndim == 1 else each
    spent = np.cumsum(np.broadcast_to(each, gain.shape), axis=1)
    return np.asarray((gain > rate * spent).any(axis=1))


def draft_price(row: Floats | float, token: Floats | float, shared: float, requests: int) -> Floats:
    """[n] time that one more draft costs: its ``row`` [n], its ``token`` [n] to verify, and its share of the step.

    ``shared``: what a step takes whoever is in it (weights, launches, host), carried by all ``requests`` alike. A
    request that drafts once more commits one step later; priced by its row alone a small batch drafts until it is
    slower than autoregressive decoding (docs/goodput.md).
    """
    return np.asarray(row + token + shared / max(requests, 1))


def best_rate(acceptance: float, price: float, d_max: int) -> float:
    """max over g of E(g) / (1 + price g): the rate to start from when nothing was observed (the rule of the paper)."""
    tokens = np.cumsum(np.power(acceptance, np.arange(d_max + 1)))
    return float(np.max(tokens / (1.0 + price * np.arange(d_max + 1))))


class RateTracker:
    """lambda: tokens per unit of time over the last ``window_tokens`` tokens; ``prior_rate`` until those are seen."""

    def __init__(self, prior_rate: float, window_tokens: float = 6000.0, prior_tokens: float = 64.0) -> None:
        if not (prior_rate > 0 and window_tokens > 0 and prior_tokens > 0):
            given = f"prior_rate={prior_rate}, window_tokens={window_tokens}, prior_tokens={prior_tokens}"
            raise UsageError(f"rate tracker: {given}; give numbers > 0")
        self._window = window_tokens
        self._tokens, self._time = prior_tokens, prior_tokens / prior_rate

    @property
    def rate(self) -> float:
        """Tokens per unit of time."""
        return self._tokens / self._time

    def observe(self, tokens: float, time: float) -> None:
        """Add what a step committed and how long it took."""
        keep = math.exp(-tokens / self._window)
        self._tokens = keep * self._tokens + tokens
        self._time = keep * self._time + time

    def scale(self, factor: float) -> None:
        """What was observed counts as ``factor`` times as fast."""
        self._time /= factor


class SurvivalModel:
    """Acceptance of drafts given margin, position and request, learned online.

    logit P(draft k accepted | those before it) = w . (1, sqrt(margin), k / d_max) + u[slot]. The population weights w
    follow recursive Newton steps of a penalised logistic regression that forgets; u is a Kalman filter's mean. Drafts
    whose margin is not known (NaN) count as the mean acceptance of their position.

    ``block_rounds``: w learns from so many rounds in one step, of fewer while it has seen little (1/64 of the rounds so
    far); 1 = from each verification at once. u always learns at once.
    """

    def __init__(
        self, max_slots: int, d_max: int = 16, params: SurvivalParams | None = None, *, block_rounds: int = 1
    ) -> None:
        if max_slots < 1 or d_max < 1 or block_rounds < 1:
            raise UsageError(
                f"survival model: max_slots={max_slots}, d_max={d_max} and block_rounds={block_rounds} "
                "must be at least 1"
            )
        self.params = p = params or SurvivalParams()
        self.d_max = d_max
        self.weights: Floats = np.array([p.intercept, p.slope, p.position_slope])
        self._block_rounds = block_rounds
        self._seen_rounds = self._new_rounds = 0
        self._judged: list[tuple[Any, ...]] = []  # root, place, right, miss, information; w has not learned from them
        self._prior_precision: Floats = np.diag(np.asarray(p.precision, dtype=np.float64))
        self._precision = self._prior_precision.copy()
        self._accepted: Floats = np.zeros(d_max)  # by position, fading
        self._trials: Floats = np.zeros(d_max)
        self._pooled_logit: Floats = np.zeros(d_max)
        self._refresh_pooled()
        self.effect: Floats = np.zeros(max_slots)  # u
        self._variance: Floats = np.full(max_slots, p.effect_variance)
        self._survival: Floats = np.ones(max_slots)
        self._drafted: Ints = np.zeros(max_slots, dtype=np.int64)
        self._predicted: Floats = np.full((max_slots, d_max), p.prior_acceptance)
        self._root: Floats = np.full((max_slots, d_max), -1.0)  # sqrt(margin); -1 = not known
        self._ended: tuple[Ints, Ints, Ints] | None = None  # slots, drafted, accepted of `end_rounds`, not learned yet
        self._first_cell: Ints = np.arange(max_slots, dtype=np.int64) * d_max  # of each slot in the two, laid out flat

    def reset(self, slots: Ints) -> None:
        """Forget the requests that were in ``slots`` [n]; what they taught about the population stays."""
        self.learn()
        self.effect[slots] = 0.0
        self._variance[slots] = self.params.effect_variance
        self.drop_drafts(slots)

    def drop_drafts(self, slots: Ints) -> None:
        """Forget the drafts that ``slots`` [n] hold, e.g. after preemption; what their requests taught stays."""
        self.learn()
        self._survival[slots] = 1.0
        self._drafted[slots] = 0
        self._forget_margins(slots)

    def _forget_margins(self, slots: Ints) -> None:
        self._root[slots] = -1.0
        self._predicted[slots] = self.params.prior_acceptance

    def acceptance(self, slots: Ints | slice, position: Ints, margin: Floats) -> Floats:
        """[n] P(draft accepted | those before it) at ``position`` (from 0), given its ``margin``; NaN = not known."""
        return self._judge(slots, position, margin)[0]

    def unseen_acceptance(self, slots: Ints) -> Floats:
        """[n, d_max] P(draft accepted | those before it) at every position, margins not known."""
        return logistic(self._pooled_logit + self.effect[slots][:, None])

    def observe_drafts(self, slots: Ints | slice, position: Ints, margin: Floats) -> None:
        """``slots`` [n] drafted one token each at ``position`` [n] (from 0) of their round, with ``margin`` [n]."""
        self.learn()
        chance, root = self._judge(slots, position, margin)
        self._survival[slots] = np.where(position == 0, chance, self._survival[slots] * chance)
        self._drafted[slots] = position + 1
        cell = self._first_cell[slots] + position
        self._predicted.reshape(-1)[cell] = chance
        self._root.reshape(-1)[cell] = root

    def _judge(self, slots: Ints | slice, position: Ints, margin: Floats) -> tuple[Floats, Floats]:
        """`acceptance`, and the square root of each margin that it was judged by; -1 = not known."""
        known = margin >= 0
        root = np.sqrt(np.minimum(np.maximum(margin, 0.0), _MARGIN_LIMIT))
        logit = self.weights[1] * root + (self.weights[0] + (self.weights[2] / self.d_max) * position)
        if np.count_nonzero(known) < known.size:
            root, logit = np.where(known, root, -1.0), np.where(known, logit, self._pooled_logit[position])
        return logistic(logit + self.effect[slots]), root

    def observe_verified(self, slots: Ints, drafted: Ints, accepted: Ints) -> None:
        """Verification of ``drafted`` [n] drafts, 0 allowed; the first ``accepted`` [n] were right; ends the rounds."""
        self.end_rounds(slots, drafted, accepted)
        self.learn()

    def end_rounds(self, slots: Ints, drafted: Ints, accepted: Ints) -> None:
        """`observe_verified`, for `survival` of the next rounds at once; what they teach is left to `learn`."""
        self.learn()
        if len(slots):
            self._ended = slots, drafted, accepted
            self._survival[slots] = 1.0
            self._drafted[slots] = 0

    def learn(self) -> None:
        """Learn from the rounds that ended last, if that is not done: at the latest before anything else changes."""
        if self._ended is None:
            return
        (slots, drafted, accepted), self._ended = self._ended, None
        count = len(slots)
        judged = np.minimum(accepted + 1, drafted)  # what lies behind the first rejection was never judged
        # Few of the d_max places are judged: work on those alone, as one flat list.
        ends = np.cumsum(judged)
        row = np.repeat(np.arange(count), judged)
        place = np.arange(ends[-1]) - (ends - judged)[row]
        cell = slots[row] * self.d_max + place
        chance, root = self._predicted.take(cell), self._root.take(cell)
        right = place < accepted[row]
        miss, information = right - chance, chance * (1.0 - chance)
        self._judged.append((root, place, right, miss, information))
        self._new_rounds += count
        if self._new_rounds >= min(self._block_rounds, 1 + self._seen_rounds // 64):
            self._learn_population()
        self._learn_effect(slots, _sums(row, miss, count), _sums(row, information, count))
        self._forget_margins(slots)

    def pass_rounds(self, slots: Ints, rounds: Ints) -> None:
        """``slots`` [n] verified ``rounds`` [n] times without drafts: what was learned fades, as `observe_verified` of
        them one by one would let it."""
        self.learn()
        self._learn_population()
        self._fade(int(rounds.sum()))
        self._refresh_pooled()
        carry = self.params.effect_carry**rounds
        stationary = self.params.effect_variance
        self.effect[slots] *= carry
        self._variance[slots] = stationary + carry**2 * (self._variance[slots] - stationary)

    def survival(self, slots: Ints | slice, drafted: Ints) -> Floats:
        """[n] P(all ``drafted`` [n] drafts of the round are accepted), in [0, 1]; 1 without drafts.

        Evidence may be a step late: drafts beyond those observed count with the mean acceptance of their place, and a
        slot of 0 drafts is in a new round even if the verification of its last one was not observed yet.
        """
        known = np.where(drafted > 0, self._survival[slots], 1.0)
        unseen = np.maximum(drafted - self._drafted[slots], 0)
        if not np.count_nonzero(unseen):
            return known
        place = np.minimum(np.maximum(drafted, 1), self.d_max) - 1
        return np.asarray(known * logistic(self._pooled_logit[place] + self.effect[slots]) ** unseen)

    def next_acceptance(self, slots: Ints | slice, drafted: Ints, horizon: int = 1) -> Floats:
        """[n, horizon] P(the next 1..horizon drafts are accepted | all ``drafted`` [n] are), their margins not known.

        Places past d_max count as 0. A slot without drafts gets ``optimism`` standard deviations on top.
        """
        shift = self.effect[slots]
        if np.count_nonzero(drafted) < len(drafted):
            shift = shift + self.params.optimism * np.sqrt(self._variance[slots]) * (drafted == 0)
        if horizon == 1:
            chance = logistic(self._pooled_logit[np.minimum(drafted, self.d_max - 1)] + shift)
            return (chance * (drafted < self.d_max))[:, None]
        place = drafted[:, None] + np.arange(horizon)
        chance = logistic(self._pooled_logit[np.minimum(place, self.d_max - 1)] + shift[:, None])
        return np.asarray(np.cumprod(np.where(place < self.d_max, chance, 0.0), axis=1))

    def to_dict(self) -> dict[str, Any]:
        """What was learned about the population, as JSON values."""
        self.learn()
        self._learn_population()
        return {
            "weights": self.weights.tolist(),
            "precision": self._precision.tolist(),
            "accepted": self._accepted.tolist(),
            "trials": self._trials.tolist(),
        }

    def load_dict(self, data: Mapping[str, Any]) -> None:
        """Start from the population of `to_dict`; raises `InputError` when it does not fit this model."""
        check_keys("survival state", data, ("weights", "precision", "accepted", "trials"))
        shapes = {
            "weights": (FEATURE_COUNT,),
            "precision": (FEATURE_COUNT, FEATURE_COUNT),
            "accepted": (self.d_max,),
            "trials": (self.d_max,),
        }
        arrays: dict[str, Floats] = {}
        for name, shape in shapes.items():
            try:
                arrays[name] = np.array(data[name], dtype=np.float64)
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"survival state lacks a numeric '{name}'; save the policy again") from error
            if arrays[name].shape != shape or not np.isfinite(arrays[name]).all():
                raise InputError(
                    f"survival state '{name}' has shape {arrays[name].shape} or holds non-finite numbers; "
                    f"{shape} finite numbers are needed (d_max {self.d_max})"
                )
        if not ((arrays["accepted"] >= 0) & (arrays["accepted"] <= arrays["trials"])).all():
            raise InputError("survival state needs 0 <= accepted <= trials at every position; save the policy again")
        precision = arrays["precision"]
        if not (np.allclose(precision, precision.T) and np.linalg.eigvalsh(precision)[0] > 0):
            raise InputError("survival state 'precision' is not a positive definite matrix; save the policy again")
        self.weights, self._precision = arrays["weights"], precision
        self._accepted, self._trials = arrays["accepted"], arrays["trials"]
        self._refresh_pooled()

    def _learn_population(self) -> None:
        if not self._judged:
            return
        root, place, right, miss, information = (
            self._judged[0] if len(self._judged) == 1 else map(np.concatenate, zip(*self._judged, strict=True))
        )
        self._fade(self._new_rounds)
        self._seen_rounds += self._new_rounds
        self._judged, self._new_rounds = [], 0
        known = (root >= 0).astype(np.float64)
        features = np.empty((FEATURE_COUNT, len(root)))
        features[0], features[1], features[2] = known, known * root, known * place / self.d_max
        self._precision += (features * information) @ features.T
        self.weights = self.weights + np.linalg.solve(self._precision, features @ miss)
        self.weights[1] = max(self.weights[1], 0.0)  # a larger margin never means a worse draft
        self._accepted += np.bincount(place[right], minlength=self.d_max)
        self._trials += np.bincount(place, minlength=self.d_max)
        self._refresh_pooled()

    def _fade(self, rounds: int) -> None:
        keep = float(np.exp(-rounds / self.params.memory_rounds))
        self._precision = keep * self._precision + (1.0 - keep) * self._prior_precision
        self._accepted = keep * self._accepted
        self._trials = keep * self._trials

    def _learn_effect(self, slots: Ints, miss: Floats, information: Floats) -> None:
        """One Newton step of the posterior of u, then the AR(1) step to the next round."""
        carry, stationary = self.params.effect_carry, self.params.effect_variance
        variance = 1.0 / (1.0 / self._variance[slots] + information)
        self.effect[slots] = carry * (self.effect[slots] + variance * miss)
        self._variance[slots] = carry**2 * variance + (1.0 - carry**2) * stationary

    def _refresh_pooled(self) -> None:
        p = self.params
        overall = (self._accepted.sum() + p.prior_acceptance * p.prior_trials) / (self._trials.sum() + p.prior_trials)
        chance = (self._accepted + p.position_trials * overall) / (self._trials + p.position_trials)
        self._pooled_logit = np.log(chance / (1.0 - chance))
