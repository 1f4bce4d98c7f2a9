"""The hindsight oracle: a policy that knows the outcome of the next draft. Simulator only; it bounds what others can
reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import UsageError
from aspire.scheduler import Action, Policy, PolicySpec, PolicyView, SelectorSpec, StepFeatures
from aspire.scheduler.features import FEATURES

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class OracleSpec:
    """The oracle as data, beside `PolicySpec`: it has no parameters, a selector and a cap on the draft length."""

    selector: SelectorSpec = field(default_factory=SelectorSpec)
    num_speculative_tokens: int = 16
    kind: str = "oracle"

    @property
    def label(self) -> str:
        """Short name for tables."""
        return f"oracle+{self.selector.kind}"

    def to_dict(self) -> dict[str, Any]:
        """JSON object for config.json; no engine loads it."""
        return {
            "kind": self.kind,
            "selector": self.selector.to_dict(),
            "num_speculative_tokens": self.num_speculative_tokens,
        }

    def stand_in(self) -> PolicySpec:
        """A policy that drafts with the same selector and cap: the scheduler is built with it."""
        return PolicySpec("fixed", selector=self.selector, num_speculative_tokens=self.num_speculative_tokens)


AnyPolicy = PolicySpec | OracleSpec


def parse_policy(text: str) -> AnyPolicy:
    """`PolicySpec.parse`, and ``oracle[+selector]``."""
    kind, _, selector = text.partition("+")
    if kind == "oracle":
        return OracleSpec(SelectorSpec(kind=selector) if selector else SelectorSpec())
    return PolicySpec.parse(text)


class HindsightOracle(Policy):
    """Draft exactly the tokens that will be accepted, then verify; never draft when drafting does not pay.

    Requests verify when their next draft would be wrong, or, where that is faster, all together: a step in which
    anybody verifies may cost more than waiting for each other does. Drafting pays while one more draft row and one more
    verified token cost this batch less than the verification that the accepted token saves. The oracle knows outcomes,
    not the best interleaving of rows: it tells what knowledge of acceptance can give, and no schedule beyond these two.
    """

    kind = "oracle"
    needs_cost_model = True
    Params = OracleSpec

    def __init__(
        self, spec: OracleSpec, max_slots: int, right_ahead: Callable[[Ints, Ints, Ints, int], NDArray[np.int64]]
    ) -> None:
        """``right_ahead``: slots, output tokens to come before a round, drafts that it holds, most -> [n] how many more
        drafts will be accepted."""
        super().__init__(spec, max_slots, spec.num_speculative_tokens)
        self._right_ahead = right_ahead

    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        now = np.zeros_like(view.drafted)
        ahead = np.minimum(self._right_ahead(view.slots, now, view.drafted, self.d_max), self.d_max - view.drafted)
        ahead *= view.can_draft
        if not np.count_nonzero(ahead) or not self._pays(view):
            return np.full(len(ahead), Action.VERIFY, dtype=np.int8)
        draft, lengths = ahead > 0, view.drafted + ahead
        if self._together(view, self._rounds_after(view, lengths))[1]:
            draft &= view.drafted < self._together(view, lengths[None])[0]
            if np.count_nonzero(draft):
                return np.where(draft, Action.DRAFT, Action.WAIT).astype(np.int8)
        return np.where(draft, Action.DRAFT, Action.VERIFY).astype(np.int8)

    def _rounds_after(self, view: PolicyView, lengths: Ints) -> Ints:
        """[_ROUNDS, n]: right drafts in a row of the rounds that follow the one with ``lengths`` [n]."""
        rounds, past, none = np.empty((_ROUNDS, len(lengths)), dtype=np.int64), lengths + 1, np.zeros_like(lengths)
        for row in rounds:
            row[:] = self._right_ahead(view.slots, past, none, self.d_max)
            past = past + row + 1
        return rounds

    def _pays(self, view: PolicyView) -> bool:
        verifies = _total(view.verify_features())
        longer = verifies + StepFeatures.of(query_tokens=float(len(view.slots)))
        steps = np.stack([_total(view.draft_features()).matrix(), verifies.matrix(), longer.matrix()])
        drafts_s, verifies_s, longer_s = _seconds(view, StepFeatures.from_matrix(steps)).tolist()
        return bool(drafts_s + (longer_s - verifies_s) < verifies_s)

    def _together(self, view: PolicyView, lengths: Ints) -> tuple[int, bool]:
        """Of ``lengths`` [rounds, n] drafts, all right, in some rounds of each request: how many to make at most in
        rounds in common, and whether these make more tokens a second than verifying one by one."""
        draft, verify = view.draft_features().columns(), view.verify_features().columns()
        verify[_QUERIES] -= view.drafted
        deepest, (rounds, count) = max(int(lengths.max()), 1), lengths.shape
        some = np.arange(deepest + 1)[:, None, None]
        drawn = np.minimum(lengths, some).sum(axis=2)  # [deepest + 1, rounds] drafts, by the most that are made
        joins = (lengths > some[:-1]).reshape(-1, count)  # [deepest * rounds, n] who drafts in each step
        verifying = np.repeat(verify.sum(axis=1)[:, None], drawn.size, axis=1)
        verifying[_QUERIES] += drawn.ravel()
        share = rounds / (lengths + 1).sum(axis=0)  # of its steps in which a request verifies
        alone = verify @ share + draft @ (1.0 - share)
        alone[_QUERIES] += (1.0 - share).sum()
        work = np.concatenate([draft @ joins.T, verifying, alone[:, None]], axis=1)
        *steps_s, alone_s = _seconds(view, StepFeatures.from_columns(work)).tolist()
        drafts_s = np.reshape(steps_s[: joins.shape[0]], (deepest, rounds)).sum(axis=1)
        verify_s = np.reshape(steps_s[joins.shape[0] :], (deepest + 1, rounds)).sum(axis=1)
        rates = (drawn.sum(axis=1) + rounds * count) / (np.concatenate([[0.0], np.cumsum(drafts_s)]) + verify_s)
        best = int(rates.argmax())
        return best, bool(rates[best] > count / alone_s)


_ROUNDS = 4  # of each request, that are looked at ahead
_QUERIES = [FEATURES.index("query_tokens"), FEATURES.index("padded_tokens")]


def _seconds(view: PolicyView, steps: StepFeatures) -> NDArray[np.float64]:
    """[steps] that ``steps`` take."""
    if view.cost_model is None:
        raise UsageError("the oracle needs a cost model; give --cost-model")
    return np.asarray(view.cost_model.predict(steps))


def _total(features: StepFeatures) -> StepFeatures:
    return StepFeatures.from_matrix(features.matrix().sum(axis=0))
