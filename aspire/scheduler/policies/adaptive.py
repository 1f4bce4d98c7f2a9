"""Policies that follow the acceptance of each request: the paper's rule and the feedback rule it compares with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aspire.errors import UsageError
from aspire.scheduler.features import FEATURES, CostModel, StepFeatures, cells_per_price_of, fixed_prices_of
from aspire.scheduler.policies.base import Feedback, Floats, Ints, Policy, PolicyView, draft_where
from aspire.scheduler.slots import index_of

_SLOW_TO_PRICE = 16_000  # cells times requests; a batch of fewer is priced whole
_STEPS_PER_OCTAVE = 3.0  # of contexts between which prices are straight lines


@dataclass(frozen=True)
class AspireParams:
    """``w``: weight of the old estimate; ``alpha_0``: first estimate; ``gamma_init``: drafts of the first round.

    ``cost_ratio`` fixes c = T_draft / T_verify; when None it comes from the cost model at every step.
    """

    w: float = 0.8
    alpha_0: float = 0.9
    gamma_init: int = 3
    cost_ratio: float | None = None

    def __post_init__(self) -> None:
        for name in ("w", "alpha_0"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UsageError(f"policy parameter {name}={getattr(self, name)} is not in 0..1")
        if self.gamma_init < 0:
            raise UsageError(f"policy parameter gamma_init={self.gamma_init} is negative; give a draft length >= 0")
        if self.cost_ratio is not None and self.cost_ratio <= 0:
            raise UsageError(f"policy parameter cost_ratio={self.cost_ratio} is not positive; give T_draft / T_verify")


def gains_by_drafting(alpha: Floats, cost_ratio: Floats, drafted: Ints) -> NDArray[np.bool_]:
    """[n]: whether E(g) / (1 + c g) is larger at g = ``drafted`` + 1 than at ``drafted``.

    E(g) = (1 - a^(g+1)) / (1 - a), the expected tokens of a round of g drafts, is concave and 1 + c g is straight, so
    their ratio rises up to its argmax g* and never again: this says ``drafted`` < g* without trying every g.
    """
    rejected, more = 1.0 - alpha, drafted + 1
    after = alpha**more
    # next to 1 the difference of two numbers near 1 has no digits left
    tokens = (1.0 - after) / np.maximum(rejected, 1e-9)
    if len(rejected) and rejected[rejected.argmin()] <= 1e-9:
        tokens = np.where(rejected <= 1e-9, more, tokens)
    return np.asarray(after * (1.0 + cost_ratio * drafted) > cost_ratio * tokens)


class Aspire(Policy):
    """The paper's rule (arXiv 2609.17943), exactly: g* = argmax E(g) / (1 + c g) by request; verify at g*.

    c prices a request as if all slots were copies of it (the paper's homogeneous approximation). In large batches some
    are priced, the others in proportion between them, where the cost model is slow to ask.
    """

    kind = "aspire"
    needs_cost_model = True
    Params = AspireParams

    def __init__(self, params: AspireParams, max_slots: int, d_max: int) -> None:
        super().__init__(params, max_slots, d_max)
        self._alpha = np.full(max_slots, params.alpha_0)
        self._first_round = np.ones(max_slots, dtype=bool)
        self._draft_prices = _DraftPrices()

    def reset(self, slots: Ints) -> None:
        self._alpha[slots] = self.params.alpha_0
        self._first_round[slots] = True

    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        at, drafted = index_of(view.slots), view.drafted
        draft = gains_by_drafting(self._alpha[at], self._cost_ratio(view), drafted) & (drafted < self.d_max)
        first = self._first_round[at]
        if np.count_nonzero(first):
            draft = np.where(first, drafted < min(self.params.gamma_init, self.d_max), draft)
        return draft_where(draft)

    def observe(self, feedback: Feedback) -> None:
        verified = feedback.verified
        if not np.count_nonzero(verified):
            return
        if np.count_nonzero(self._first_round):
            self._first_round[feedback.slots[verified]] = False
        learn = (feedback.drafted * verified).nonzero()[0]
        slots, accepted = feedback.slots[learn], feedback.accepted[learn]
        estimate = accepted / np.minimum(accepted + 1, feedback.drafted[learn])
        self._alpha[slots] = self.params.w * self._alpha[slots] + (1.0 - self.params.w) * estimate

    def _cost_ratio(self, view: PolicyView) -> NDArray[np.float64]:
        count = len(view.slots)
        if self.params.cost_ratio is not None:
            return np.full(count, self.params.cost_ratio)
        if view.cost_model is None:
            raise UsageError(
                "policy 'aspire' needs a cost model or the parameter cost_ratio; run 'aspire calibrate' first"
            )
        slow = cells_per_price_of(view.cost_model) * count > _SLOW_TO_PRICE
        priced = _PricedRows.of(view.drafted, view.context_tokens) if slow else None
        some = view if priced is None else _only(view, priced.rows)
        known = None
        if slow and fixed_prices_of(view.cost_model) and not view.full_layer_share:
            known = self._draft_prices.of(view.cost_model, count, some.sparse_tokens)
        draft_s, verify_s = _price_copies(view.cost_model, some, count, known)
        ratio = np.asarray(draft_s / np.maximum(verify_s, 1e-12))
        return ratio if priced is None else priced.between(ratio)


def _price_copies(cost_model: CostModel, view: PolicyView, copies: int, known: Floats | None) -> tuple[Floats, Floats]:
    """([n], [n]): seconds of steps in which ``copies`` rows like each of ``view`` draft, and verify. ``known``: draft
    prices by `PolicyView.sparse_tokens`, NaN where they are still to be asked for and filled in."""
    drafting: PolicyView | None = view
    if known is not None:
        unknown = np.isnan(known[view.sparse_tokens]).nonzero()[0]
        drafting = _only(view, unknown) if len(unknown) else None
    drafts = 0 if drafting is None else len(drafting.slots)
    columns = np.empty((len(FEATURES), drafts + len(view.slots)))
    if drafting is not None:
        drafting.fill_draft_features(columns[:, :drafts], copies)
    view.fill_verify_features(columns[:, drafts:], copies)
    seconds = cost_model.predict(StepFeatures.from_columns(columns))
    draft_s, verify_s = seconds[:drafts], seconds[drafts:]
    if known is None:
        return draft_s, verify_s
    if drafting is not None:
        known[drafting.sparse_tokens] = draft_s
    return known[view.sparse_tokens], verify_s


class _DraftPrices:
    """Seconds of steps of equal draft rows by the tokens that each reads, kept from step to step while they hold: they
    do as long as the batch is as large, where no layer of a draft step reads the whole context."""

    def __init__(self) -> None:
        self._cost_model: CostModel | None = None
        self._copies = 0
        self._seconds = np.empty(0)

    def of(self, cost_model: CostModel, copies: int, sparse_tokens: Ints) -> Floats | None:
        """[more than any of ``sparse_tokens``]: to be read and filled in by tokens, NaN where not priced yet; None
        where tokens are not counted (of requests that have no page list)."""
        if sparse_tokens.min() < 0:
            return None
        most = int(sparse_tokens.max())
        if cost_model is not self._cost_model or copies != self._copies or most >= len(self._seconds):
            self._cost_model, self._copies = cost_model, copies
            self._seconds = np.full(max(2 * most, len(self._seconds)) + 1, np.nan)
        return self._seconds


def _only(view: PolicyView, rows: Ints) -> PolicyView:
    """The requests ``rows`` of ``view``."""
    names = ("slots", "drafted", "can_draft", "context_tokens", "sparse_tokens")
    return replace(view, **{name: getattr(view, name)[rows] for name in names})


@dataclass(frozen=True)
class _PricedRows:
    """The requests of a batch that are priced. What the others cost lies between two of them that hold as many
    drafts, in proportion to their contexts, which are at most a fourth apart."""

    rows: Ints  # [priced]
    order: Ints  # [n] all requests by drafts and contexts; in this order:
    below: Ints  # [n] place in ``rows`` of the one with the next shorter context
    above: Ints  # [n] and of the one with the next longer
    weight: Floats  # [n] of the latter

    @classmethod
    def of(cls, drafted: Ints, context_tokens: Ints) -> _PricedRows | None:
        """None where nearly all would be priced."""
        count = len(drafted)
        order = np.lexsort((context_tokens, drafted))
        drafts, context = drafted[order], context_tokens[order].astype(np.float64)
        step = np.floor(_STEPS_PER_OCTAVE * np.log2(context))
        edge = (drafts[1:] != drafts[:-1]) | (step[1:] != step[:-1])
        priced = np.ones(count, dtype=bool)  # the first and the last of each step
        priced[1:-1] = edge[:-1] | edge[1:]
        rows = priced.nonzero()[0]
        if 2 * len(rows) > count:
            return None
        below = np.cumsum(priced) - 1
        above = below + ~priced
        low = context[rows[below]]
        weight = (context - low) / np.maximum(context[rows[above]] - low, 1.0)
        return cls(order[rows], order, below, above, weight)

    def between(self, values: Floats) -> Floats:
        """[n] from ``values`` [priced]."""
        low, out = values[self.below], np.empty(len(self.order))
        out[self.order] = low + self.weight * (values[self.above] - low)
        return out


@dataclass(frozen=True)
class FsmParams:
    """``g_init``: first draft length; ``g_min``: never drafts less."""

    g_init: int = 5
    g_min: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.g_min <= self.g_init:
            raise UsageError(f"policy parameters g_min={self.g_min}, g_init={self.g_init} are not 0 <= g_min <= g_init")


class Fsm(Policy):
    """Draft length by feedback: one more after a fully accepted draft, one fewer after a rejection (ASPIRE-FSM)."""

    kind = "fsm"
    Params = FsmParams

    def __init__(self, params: FsmParams, max_slots: int, d_max: int) -> None:
        super().__init__(params, max_slots, d_max)
        self._g = np.full(max_slots, min(params.g_init, d_max), dtype=np.int64)

    def reset(self, slots: Ints) -> None:
        self._g[slots] = min(self.params.g_init, self.d_max)

    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        return draft_where(view.drafted < self._g[view.slots])

    def observe(self, feedback: Feedback) -> None:
        learn = feedback.verified & (feedback.drafted > 0)
        slots = feedback.slots[learn]
        change = np.where(feedback.accepted[learn] == feedback.drafted[learn], 1, -1)
        self._g[slots] = np.clip(self._g[slots] + change, max(1, self.params.g_min), self.d_max)
