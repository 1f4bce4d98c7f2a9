"""Synthetic acceptance for models without trained weights: accepted lengths are drawn, not found."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler import Mode, StepPlan


class SyntheticAcceptance:
    """Draft position j is accepted with ``rates[j]`` (the last rate holds beyond), seeded by request and position.

    The draw for a token depends on the request and the token's position alone, so policies are compared on the same
    luck.
    """

    def __init__(self, rates: tuple[float, ...], seed: int) -> None:
        self._rates = np.asarray(rates)
        self._seed = seed

    def draw(self, plan: StepPlan, accepted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Accepted drafts [rows] in place of the real ones."""
        drawn = accepted.copy()
        for row in np.flatnonzero((plan.modes == Mode.VERIFY) & (plan.drafted > 0)).tolist():
            count, start = int(plan.drafted[row]), int(plan.start[row])
            rates = self._rates[np.minimum(np.arange(count), len(self._rates) - 1)]
            key = abs(hash((self._seed, int(plan.slots[row])))) & 0xFFFFFFFF
            luck = [np.random.default_rng((key, start + place)).random() for place in range(count)]
            refused = np.flatnonzero(np.asarray(luck) >= rates)
            drawn[row] = int(refused[0]) if len(refused) else count
        return drawn
