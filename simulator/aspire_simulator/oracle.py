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

    Drafting pays while one more draft row and one more verified token cost this batch less than the verification that
    the accepted token saves. The oracle knows outcomes, not the best interleaving of rows: it is a bound on what
    knowledge of acceptance can give, not on scheduling as a whole.
    """

    kind = "oracle"
    needs_cost_model = True
    Params = OracleSpec

    def __init__(
        self, spec: OracleSpec, max_slots: int, next_is_right: Callable[[Ints, Ints], NDArray[np.bool_]]
    ) -> None:
        super().__init__(spec, max_slots, spec.num_speculative_tokens)
        self._next_is_right = next_is_right

    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        right = view.can_draft & self._next_is_right(view.slots, view.drafted)
        draft = right & self._pays(view)
        return np.where(draft, Action.DRAFT, Action.VERIFY).astype(np.int8)

    def _pays(self, view: PolicyView) -> bool:
        if view.cost_model is None:
            raise UsageError("the oracle needs a cost model; give --cost-model")
        drafts, verifies = _total(view.draft_features()), _total(view.verify_features())
        longer = verifies + StepFeatures.of(query_tokens=float(len(view.slots)))
        costs = [float(view.cost_model.predict(features)) for features in (drafts, verifies, longer)]
        return costs[0] + (costs[2] - costs[1]) < costs[1]


def _total(features: StepFeatures) -> StepFeatures:
    return StepFeatures.from_matrix(features.matrix().sum(axis=0))
