"""Rounds in common: the batch drafts together, then all verify in one step. `Goodput` plans so where verifying rows
make a step dearer for everybody in it than waiting for each other does (docs/goodput.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler.policies.base import Action, Floats, PolicyView


@dataclass(frozen=True)
class RoundPrices:
    """Seconds of a step in which a batch only drafts: ``step`` whoever is in it, ``row`` of each that is, with the
    token that it adds to the verification. ``rate``: tokens per second of the best common draft length."""

    step: float
    row: float
    rate: float


def round_work(draft: Floats, verify: Floats, one_token: Floats, count: int, lengths: int) -> Floats:
    """[len(FEATURES), 2 + lengths]: steps in which all ``count`` requests draft, half of them do, all verify 0, 1, ..
    drafts. Of one mean row, as columns [len(FEATURES), 1]: ``draft``, ``verify`` without drafts, ``one_token`` more."""
    verifying = verify + np.arange(lengths, dtype=np.float64) * one_token
    return np.concatenate([count * draft, 0.5 * count * draft, count * verifying], axis=1)


def price_rounds(added_s: Floats, empty_s: float, count: int, tokens: Floats) -> RoundPrices:
    """Prices of common rounds from ``added_s`` [2 + d_max + 1], seconds that the steps of `round_work` add to an empty
    one of ``empty_s``, and ``tokens`` [d_max + 1] expected of a round of 0, 1, .. drafts. Tokens of the best draft
    length are priced by the chord from no draft to it."""
    whole_s, half_s = (empty_s + added_s[:2]).tolist()
    verify_s = empty_s + added_s[2:]
    rates = count * tokens / np.maximum(np.arange(len(tokens)) * whole_s + verify_s, 1e-12)
    best = max(int(rates.argmax()), 1)
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
