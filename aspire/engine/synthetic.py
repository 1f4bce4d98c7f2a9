"""Synthetic acceptance for models without trained weights: accepted lengths are drawn, not found."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler import Mode, StepPlan

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class SyntheticAcceptance:
    """Draft position j is accepted with ``rates[j]`` (the last rate holds beyond).

    The draw for a token depends on the seed, the request's id and the token's position alone, so that policies are
    compared on the same luck.
    """

    def __init__(self, rates: tuple[float, ...], seed: int) -> None:
        self._rates = np.asarray(rates)
        self._seed = seed

    def draw(self, plan: StepPlan) -> NDArray[np.int64]:
        """Drafts to accept [rows]; -1 where none is verified."""
        drawn = np.full(plan.num_rows, -1)
        rows = np.flatnonzero((plan.modes == Mode.VERIFY) & (plan.drafted > 0))
        if not len(rows):
            return drawn
        keys = np.array([zlib.crc32(f"{self._seed}/{plan.requests[row]}".encode()) for row in rows], dtype=np.uint64)
        place = np.arange(int(plan.drafted[rows].max()))
        luck = _uniform(keys[:, None], (plan.start[rows][:, None] + place).astype(np.uint64))
        rates = self._rates[np.minimum(place, len(self._rates) - 1)]
        kept = (luck < rates) & (place < plan.drafted[rows][:, None])
        drawn[rows] = np.cumprod(kept, axis=1).sum(axis=1)
        return drawn


def _uniform(key: NDArray[np.uint64], counter: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) of a counter-based generator: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    z = (key << np.uint64(32)) + counter * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
