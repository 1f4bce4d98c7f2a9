"""Margins of drafted tokens given what became of them.

The margin is the gap between the two best perturbed draft scores, (logits / T + Gumbel noise). Large margins foretell
acceptance (docs/goodput.md, section 1), so a simulation of confidence-guided policies must draw them. They are skewed
like a lognormal but with heavier shoulders, so the generative form is a table of quantiles, drawn by inversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import UsageError, check_keys
from aspire.scheduler.once import once

Singles = NDArray[np.float32]
Floats = NDArray[np.float64]
LEVELS: tuple[float, ...] = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_LEVELS = np.array(LEVELS)
_PLACE = _LEVELS.searchsorted(np.arange(0.005, 1.0, 0.01)) - 1
"""[100] of each hundredth: between which two of `LEVELS`, which are whole hundredths, it lies."""


@dataclass(frozen=True)
class MarginModel:
    """Quantiles at `LEVELS` of the margin of accepted drafts, of the first rejected one, and of those behind it.

    The defaults are those of SmolLM2-135M on documents of 4k tokens, T = 0.7, per-layer page lists (7 % budget).
    """

    accepted: tuple[float, ...] = (0.0, 0.05, 0.26, 0.47, 1.19, 2.76, 5.87, 10.08, 12.6, 17.28, 27.0)
    rejected: tuple[float, ...] = (0.0, 0.003, 0.02, 0.04, 0.12, 0.28, 0.57, 1.12, 1.46, 2.77, 8.0)
    wrong: tuple[float, ...] = (0.0, 0.03, 0.12, 0.26, 0.71, 1.79, 3.76, 7.05, 9.81, 14.59, 27.0)

    def __post_init__(self) -> None:
        for name in ("accepted", "rejected", "wrong"):
            table = getattr(self, name)
            if len(table) != len(LEVELS) or any(low > high for low, high in zip(table, table[1:], strict=False)):
                raise UsageError(f"margin quantiles '{name}' must be {len(LEVELS)} numbers that do not decrease")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MarginModel:
        """From a JSON object; unknown keys raise `UsageError`."""
        check_keys("margins", data, cls.__dataclass_fields__)
        return cls(**{name: tuple(float(value) for value in values) for name, values in data.items()})

    @classmethod
    def fit(cls, accepted: NDArray[Any], rejected: NDArray[Any], wrong: NDArray[Any]) -> MarginModel:
        """Quantiles of observed margins (NaN left out); a group with fewer than 20 keeps its default."""
        tables: dict[str, tuple[float, ...]] = {}
        for name, values in (("accepted", accepted), ("rejected", rejected), ("wrong", wrong)):
            known = np.asarray(values, dtype=np.float64)
            known = known[np.isfinite(known)]
            if len(known) >= 20:
                tables[name] = tuple(np.quantile(known, LEVELS).tolist())
        return cls(**tables)

    def draw(self, rng: np.random.Generator, length: int) -> tuple[Singles, Singles, Singles]:
        """Margins [length] for each position: if accepted, if rejected, if behind a rejected draft.

        Accepted and rejected share one uniform: the margin of a position moves with its outcome, not with fresh luck.
        """
        level = rng.random(2 * length)
        place = _PLACE.take((100.0 * level).astype(np.int64))  # a search takes longer than to draw
        beyond = level - _LEVELS.take(place)
        shared, other = slice(0, length), slice(length, None)
        values = (
            (slope.take(place[part]) * beyond[part] + start.take(place[part])).astype(np.float32)
            for part, start, slope in zip((shared, shared, other), *self._lines, strict=True)
        )
        accepted, rejected, wrong = values
        return accepted, rejected, wrong

    @once
    def _lines(self) -> tuple[Floats, Floats]:
        """[3, levels - 1] the three margins between two levels: where they start and how they rise."""
        tables = np.array([self.accepted, self.rejected, self.wrong])
        return tables[:, :-1], np.diff(tables) / np.diff(_LEVELS)
