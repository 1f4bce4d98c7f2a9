"""Policies that follow the acceptance of each request: the paper's rule and the feedback rule it compares with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aspire.errors import UsageError
from aspire.scheduler.policies.base import Feedback, Floats, Ints, Policy, PolicyView, draft_where
from aspire.scheduler.policies.cost_ratios import asked_ratios
from aspire.scheduler.policies.price_tables import has_tables, tables_of
from aspire.scheduler.slots import index_of


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

    c prices a request as if all slots were copies of it (the paper's homogeneous approximation). Where prices stand and
    are slow to ask for they are read from tables, to 0.3 %: cost models are off by more than that.
    """

    kind = "aspire"
    needs_cost_model = True
    Params = AspireParams

    def __init__(self, params: AspireParams, max_slots: int, d_max: int) -> None:
        super().__init__(params, max_slots, d_max)
        self._alpha = np.full(max_slots, params.alpha_0)
        self._first_round = np.ones(max_slots, dtype=bool)

    def reset(self, slots: Ints) -> None:
        self._alpha[slots] = self.params.alpha_0
        self._first_round[slots] = True

    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        at, drafted = index_of(view.slots), view.drafted
        draft = gains_by_drafting(self._alpha[at], self._cost_ratios(view), drafted) & (drafted < self.d_max)
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

    def _cost_ratios(self, view: PolicyView) -> Floats:
        count, sparse = len(view.slots), view.sparse_tokens
        if self.params.cost_ratio is not None:
            return np.full(count, self.params.cost_ratio)
        if view.cost_model is None:
            raise UsageError(
                "policy 'aspire' needs a cost model or the parameter cost_ratio; run 'aspire calibrate' first"
            )
        if not has_tables(view.cost_model) or sparse[sparse.argmin()] < 0:  # of a request that has no page list
            return asked_ratios(view, view.cost_model)
        return tables_of(view.cost_model, view, self.d_max).ratio(count, view.drafted, sparse, view.context_tokens)


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
