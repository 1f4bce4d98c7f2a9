"""Did two runs of the same prompts give the same text, and where they did not, was it a tie?

Both runs draw with the same noise, so a token is the argmax of the same perturbed scores (logits / T + Gumbel noise; at
T = 0 the logits). Batches of other shapes round these scores differently in half precision, so two texts can part where
the two best scores are close. Two figures tell a tie from a fault: the *margin* (best minus second best score) at the
first token that differs, and how far the same margins moved between the runs wherever the tokens before were equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import InputError

Singles = NDArray[np.float32]


@dataclass(frozen=True)
class Text:
    """Output tokens of a request, and the margin of each where it was recorded."""

    request_id: str
    token_ids: Sequence[int]
    margins: Singles | None = None  # [tokens]


@dataclass(frozen=True)
class Difference:
    """The first output token in which a request's texts differ. A margin is None where it was not recorded."""

    request: str
    position: int  # output token, from 0
    margin: float | None  # of the baseline
    other_margin: float | None

    @property
    def shift(self) -> float | None:
        """How far the gap between the two tokens moved between the runs: from ``margin`` to minus the other's."""
        return None if self.margin is None or self.other_margin is None else self.margin + self.other_margin


@dataclass(frozen=True)
class Comparison:
    """Texts of a run against those of a baseline, request by request."""

    compared: int
    differences: list[Difference]
    moved: Singles = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    """Absolute change of the margin at every token before the first difference."""

    @property
    def equal(self) -> int:
        """Requests with the same text."""
        return self.compared - len(self.differences)

    @property
    def equal_share(self) -> float | None:
        """Share of the compared requests whose texts are equal; None when there were none."""
        return self.equal / self.compared if self.compared else None

    @property
    def largest_margin(self) -> float | None:
        """The baseline's largest margin at a first difference."""
        return max((each.margin for each in self.differences if each.margin is not None), default=None)

    @property
    def first_difference(self) -> str:
        """The first one in words; empty when there is none."""
        if not self.differences:
            return ""
        first = self.differences[0]
        gap = "" if first.margin is None else f", where the two best scores are {first.margin:.3g} apart"
        return f"request {first.request} differs first at output token {first.position}{gap}"

    def __add__(self, other: Comparison) -> Comparison:
        """Both together."""
        moved = np.concatenate([self.moved, other.moved])
        return Comparison(self.compared + other.compared, [*self.differences, *other.differences], moved)

    def to_json(self) -> dict[str, Any]:
        """JSON object of all figures. ``margin_shift`` describes what rounding does to margins of equal tokens."""
        shift: dict[str, Any] = {"tokens": len(self.moved)}
        if len(self.moved):
            shift |= {
                "median": float(np.median(self.moved)),
                "p99": float(np.percentile(self.moved, 99)),
                "max": float(self.moved.max()),
            }
        return {
            "compared_outputs": self.compared,
            "equal_outputs": self.equal,
            "text_equal_share": self.equal_share,
            "largest_margin": self.largest_margin,
            "differences": [
                {
                    "request": each.request,
                    "position": each.position,
                    "margin": each.margin,
                    "other_margin": each.other_margin,
                }
                for each in self.differences
            ],
            "margin_shift": shift,
        }


def compare(
    texts: Sequence[Text | None], baseline: Sequence[Text | None], *, common_length: bool = False
) -> Comparison:
    """Compare prompt by prompt; pairs of which one is None (it did not finish) are left out.

    With ``common_length`` a text that is a beginning of the other equals it: one run was ended earlier. Raises
    `InputError` when the runs have not the same requests.
    """
    if len(texts) != len(baseline):
        raise InputError(f"{len(texts)} and {len(baseline)} outputs cannot be compared; run the same prompts")
    compared = 0
    differences: list[Difference] = []
    moved: list[Singles] = []
    for mine, other in zip(texts, baseline, strict=True):
        if mine is None or other is None:
            continue
        if mine.request_id != other.request_id:
            raise InputError(f"request '{mine.request_id}' cannot be compared with '{other.request_id}'")
        compared += 1
        pairs = zip(mine.token_ids, other.token_ids, strict=False)
        common = min(len(mine.token_ids), len(other.token_ids))
        at = next((place for place, (left, right) in enumerate(pairs) if left != right), common)
        if mine.margins is not None and other.margins is not None:
            with np.errstate(invalid="ignore"):  # one token left by the filters: both margins are infinite
                change = np.abs(mine.margins[:at] - other.margins[:at])
            moved.append(change[np.isfinite(change)])
        if at < common or (len(mine.token_ids) != len(other.token_ids) and not common_length):
            gaps = [_at(text, at) for text in (other, mine)]
            differences.append(Difference(mine.request_id, at, *gaps))
    return Comparison(compared, differences, np.concatenate(moved) if moved else np.empty(0, dtype=np.float32))


def _at(text: Text, place: int) -> float | None:
    return float(text.margins[place]) if text.margins is not None and place < len(text.margins) else None
