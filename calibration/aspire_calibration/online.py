"""Online recalibration: step timings of a run correct the model a little, and forget.

    seconds = model(step) * exp(sum over kinds k of share_k(step) * theta_k)

One multiplicative correction theta per kind of work (autoregressive, draft, verify, prefill), mixed by the share of
each kind in the model's own price of the step's rows. Recursive least squares on log(observed / predicted) with
exponential forgetting (Ljung, System Identification, 1999, section 11.2); outliers are clipped, corrections are
bounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aspire.errors import InputError, UsageError, check_keys
from aspire.scheduler.features import CostModel, Floats, StepFeatures, cells_per_price_of

KINDS = ("ar", "draft", "verify", "prefill")


class OnlineCostModel:
    """A `CostModel` that learns while it is used.

    ``memory_steps``: after so many steps an observation counts 1/e; ``bound``: largest correction (0.3 = between /1.35
    and x1.35); ``prior_steps``: how many steps it takes to move half way from the offline model.
    """

    def __init__(
        self, model: CostModel, *, memory_steps: float = 500.0, bound: float = 0.3, prior_steps: float = 20.0
    ) -> None:
        if memory_steps <= 1 or bound <= 0 or prior_steps <= 0:
            given = f"{memory_steps}, {bound}, {prior_steps}"
            raise UsageError(f"online model: memory_steps > 1, bound > 0 and prior_steps > 0 are needed, got {given}")
        self.model = model
        self.start_latency = getattr(model, "start_latency", ())
        self.start_latency_per_request_s = float(getattr(model, "start_latency_per_request_s", 0.0))
        self.cells_per_price = cells_per_price_of(model)
        self.forgetting = float(np.exp(-1.0 / memory_steps))
        self.bound = bound
        self.prior_steps = prior_steps
        self.theta = np.zeros(len(KINDS))
        self.covariance = np.eye(len(KINDS)) / prior_steps
        self.steps = 0
        self.clipped = 0  # observations too far off to be believed whole

    def predict(self, features: StepFeatures) -> Floats:
        """Corrected seconds, in the shape of the features."""
        predicted = self.model.predict(features)
        return np.asarray(predicted * self._factor(features)) if self.steps else predicted

    def marginal(self, base: StepFeatures, added: StepFeatures) -> Floats:
        """Corrected seconds that ``added`` costs on top of ``base``.

        The correction is that of the kinds of work added: a step's mix moves little by one row, and so the sign and
        order of the offline prices are kept.
        """
        price = self.model.marginal(base, added)
        return np.asarray(price * self._factor(added)) if self.steps else price

    def observe(self, features: StepFeatures, seconds: Floats | float) -> None:
        """Learn from one timed step (0-d features) or from several, in order. Raises `InputError` for seconds <= 0."""
        observed = np.atleast_1d(np.asarray(seconds, dtype=np.float64)).ravel()
        if not (np.all(np.isfinite(observed)) and np.all(observed > 0)):
            raise InputError(f"observed step times must be positive and finite, got {observed.min()}")
        predicted = np.atleast_1d(self.model.predict(features)).ravel()
        shares = np.broadcast_to(shares_of(features).reshape(-1, len(KINDS)), (len(observed), len(KINDS)))
        ratios = np.log(observed / np.maximum(predicted, 1e-12))
        for share, ratio in zip(shares, ratios, strict=True):
            self._update(share, float(ratio))

    def _update(self, share: Floats, ratio: float) -> None:
        error = ratio - float(share @ self.theta)
        if abs(error) > self.bound:  # a stall is not a trend: at most the bound is believed
            error = float(np.sign(error)) * self.bound
            self.clipped += 1
        gain = self.covariance @ share
        gain = gain / (self.forgetting + float(share @ gain))
        self.theta = np.clip(self.theta + gain * error, -self.bound, self.bound)
        covariance = (self.covariance - np.outer(gain, share @ self.covariance)) / self.forgetting
        # Kinds that do not occur would grow without end while others are observed: never less sure than at the start.
        shrink = np.sqrt(np.minimum(1.0, 1.0 / (self.prior_steps * np.maximum(np.diag(covariance), 1e-12))))
        self.covariance = covariance * np.outer(shrink, shrink)
        self.steps += 1

    def _factor(self, features: StepFeatures) -> Floats:
        return np.asarray(np.exp(shares_of(features) @ self.theta))

    def corrections(self) -> dict[str, float]:
        """Factor per kind of work; 1 = as calibrated."""
        return {kind: float(np.exp(value)) for kind, value in zip(KINDS, self.theta, strict=True)}

    def state(self) -> dict[str, Any]:
        """JSON values that `restore` takes."""
        return {
            "theta": self.theta.tolist(),
            "covariance": self.covariance.tolist(),
            "steps": self.steps,
            "clipped": self.clipped,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state`; raises `InputError` for one of another shape."""
        check_keys("online state", state, ("theta", "covariance", "steps", "clipped"))
        theta, covariance = np.asarray(state["theta"], float), np.asarray(state["covariance"], float)
        if theta.shape != (len(KINDS),) or covariance.shape != (len(KINDS), len(KINDS)):
            raise InputError(f"online state holds {theta.shape} corrections, not {len(KINDS)}; start a fresh one")
        self.theta, self.covariance = np.clip(theta, -self.bound, self.bound), covariance
        self.steps, self.clipped = int(state["steps"]), int(state["clipped"])


def shares_of(features: StepFeatures) -> Floats:
    """[..., kinds]: share of each kind of row in the step (a prefill chunk counts by its tokens); sums to 1, 0 if
    empty.

    Verification rows count as ``verify`` by their drafted tokens: a step of verifying rows with one token each is
    ``ar``.
    """
    verify_tokens = np.maximum(features.query_tokens - features.prefill_tokens - features.draft_rows, 0.0)
    drafted = np.clip(verify_tokens - features.verify_rows, 0.0, features.verify_rows)
    parts = np.stack([features.verify_rows - drafted, features.draft_rows, drafted, features.prefill_tokens], axis=-1)
    total = parts.sum(axis=-1, keepdims=True)
    return np.asarray(parts / np.where(total > 0, total, 1.0))
