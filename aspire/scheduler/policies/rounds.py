"""Rounds in common: the batch drafts together, then all verify in one step. `Goodput` plans so where verifying rows
make a step dearer for everybody in it than waiting for each other does (docs/goodput.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler.features import CostModel, StepFeatures
from aspire.scheduler.policies.base import Action, Floats, PolicyView


@dataclass(frozen=True)
class RoundPrices:
    """Seconds of a step in which a batch only drafts: ``step`` whoever is in it, ``row`` of each that is, with the
    token that it adds to the verification. ``rate``: tokens per second of the best common draft length."""

    step: float
    row: float
    rate: float


def price_rounds(
    model: CostModel,
    other: StepFeatures,  # 0-d, prefill chunks beside
    draft: Floats,  # features of a mean drafting row
    verify: Floats,  # of a mean verifying row without drafts
    one_token: Floats,  # of one more query token
    count: int,
    tokens: Floats,  # [d_max + 1] expected tokens of a round of 0, 1, .. drafts
    empty_s: float,
) -> RoundPrices:
    """Price common rounds of ``count`` requests, for every draft length; the best one's tokens are priced by the chord
    from no draft to it."""
    lengths = np.arange(len(tokens), dtype=np.float64)
    drafting = StepFeatures.from_matrix(np.stack([count * draft, 0.5 * count * draft]))
    whole_s, half_s = (empty_s + model.marginal(other, drafting)).tolist()
    verifying = StepFeatures.from_matrix(count * (verify + lengths[:, None] * one_token))
    verify_s = empty_s + model.marginal(other, verifying)
    rates = count * tokens / np.maximum(lengths * whole_s + verify_s, 1e-12)
    best = max(int(np.argmax(rates)), 1)
    row = max(2.0 * (whole_s - half_s) / count, 0.0)
    token = max(float(verify_s[best] - verify_s[0]) / (best * count), 0.0)
    return RoundPrices(step=max(whole_s - count * row, 0.0), row=row + token, rate=float(rates.max()))


def plan_round(
    prices: RoundPrices,
    view: PolicyView,
    gain: Floats,  # [n] expected tokens of one more draft
    rate: float,  # tokens per second of the whole batch
    hysteresis: float,
) -> NDArray[np.int8]:
    """Another draft of all whose gain pays for their row, if together they pay for the step; else all verify.

    Where nobody has a page list, after a rest, all ask to draft: the scheduler lets them verify, which makes the lists.
    """
    able = view.can_draft if np.count_nonzero(view.can_draft) else view.drafted == 0
    surplus = np.where(able, gain, 0.0) - rate * prices.row * (1.0 + hysteresis)
    joins = surplus > 0.0
    if surplus[joins].sum() <= rate * prices.step * (1.0 + hysteresis):
        return np.full(len(gain), Action.VERIFY, dtype=np.int8)
    return np.where(joins, Action.DRAFT, Action.WAIT).astype(np.int8)
