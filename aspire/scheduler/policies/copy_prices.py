"""Prices of steps of rows that are all alike, for `Aspire`: asked for once, and read between the contexts asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from aspire.scheduler.features import FEATURES, CostModel, StepFeatures
from aspire.scheduler.policies.base import Floats, Ints, PolicyView

POINTS_PER_OCTAVE = 40  # of contexts that are priced: less than 2 % apart, no further than ranges of cost models give
LINE_ERROR = 5e-4  # relative: what a price between two of them may be off
_FEW = 4  # unknown prices that are asked for together with those that will be due soon
_LEAST_S = 1e-12


def exact_ratio(view: PolicyView, model: CostModel, copies: int, rows: Ints | slice) -> Floats:
    """[rows]: seconds of a step in which ``copies`` requests like each of the ``rows`` of ``view`` draft, over those of
    one in which they verify."""
    names = ("slots", "drafted", "can_draft", "context_tokens", "sparse_tokens")
    some = replace(view, **{name: getattr(view, name)[rows] for name in names})
    count = len(some.slots)
    columns = np.empty((len(FEATURES), 2 * count))
    some.fill_draft_features(columns[:, :count], copies)
    some.fill_verify_features(columns[:, count:], copies)
    seconds = model.predict(StepFeatures.from_columns(columns))
    return np.asarray(seconds[:count] / np.maximum(seconds[count:], _LEAST_S))


class CopyPrices:
    """`exact_ratio` to within `LINE_ERROR`, for batches of ``copies`` requests and a cost model of fixed prices.

    A verification is priced by the drafts that it judges and its context, a draft step by the tokens that a row reads
    and, where layers of it read the whole context, by that. What was asked for is kept. Few unknown prices are asked
    for with their neighbours: a call of the cost model takes as long as forty what-ifs of it.
    """

    def __init__(self, view: PolicyView, model: CostModel, copies: int, d_max: int) -> None:
        self._view, self._model, self._copies = view, model, copies
        self._verify, self._draft = _Lines(d_max + 1), _Lines(d_max + 1)
        self._drafts_alike = not view.full_layer_share  # at any context

    def ratio(self, drafted: Ints, sparse_tokens: Ints, octaves: Floats) -> Floats:
        """[n] of rows that hold ``drafted`` <= d_max tokens, would read ``sparse_tokens`` >= 0 to draft one more, and
        have contexts of 2^``octaves`` tokens."""
        at = POINTS_PER_OCTAVE * octaves
        point = at.astype(np.int64)
        share = at - point
        verify_s = self._verify.between(drafted, point, share)
        draft_s = (
            self._draft.at(sparse_tokens, 0) if self._drafts_alike else self._draft.between(sparse_tokens, point, share)
        )
        if verify_s is None or draft_s is None:
            self._ask(drafted, sparse_tokens, point)
            return self.ratio(drafted, sparse_tokens, octaves)
        return np.asarray(draft_s / verify_s)

    def _ask(self, drafted: Ints, sparse_tokens: Ints, point: Ints) -> None:
        """Have all prices that `ratio` reads."""
        ends = np.concatenate([point, point + 1])
        verify = self._verify.unknown(np.tile(drafted, 2), ends)
        draft = self._draft.unknown(np.tile(sparse_tokens, 2), 0 * ends if self._drafts_alike else ends)
        count = len(draft[0])
        columns = np.empty((len(FEATURES), count + len(verify[0])))
        self._what_if(*draft).fill_draft_features(columns[:, :count], self._copies)
        self._what_if(*verify).fill_verify_features(columns[:, count:], self._copies)
        seconds = np.maximum(self._model.predict(StepFeatures.from_columns(columns)), _LEAST_S)
        self._draft.seconds[draft], self._verify.seconds[verify] = seconds[:count], seconds[count:]

    def _what_if(self, tokens: Ints, point: Ints) -> PolicyView:
        """Rows that hold, or read, so many ``tokens``, with contexts of these points."""
        context = np.exp2(point / POINTS_PER_OCTAVE)
        return replace(self._view, slots=point, drafted=tokens, sparse_tokens=tokens, context_tokens=context)


class _Lines:
    """Seconds [numbers, points] by a whole number and a point on the grid of contexts; 0 where not asked for yet."""

    def __init__(self, block: int) -> None:
        self.seconds = np.zeros((block, 1))
        self._block = block  # numbers whose prices are asked for together

    def at(self, number: Ints, point: Ints | int) -> Floats | None:
        """[n] seconds, None where some are unknown."""
        if number[number.argmax()] >= len(self.seconds):
            return None
        seconds = self.seconds[number, point]
        return seconds if np.count_nonzero(seconds) == len(seconds) else None

    def between(self, number: Ints, point: Ints, share: Floats) -> Floats | None:
        """[n] seconds at ``share`` of the way from ``point`` to the next; None where some are unknown."""
        if point[point.argmax()] + 1 >= self.seconds.shape[1]:
            return None
        low, high = self.at(number, point), self.at(number, point + 1)
        return None if low is None or high is None else np.asarray(low + share * (high - low))

    def unknown(self, numbers: Ints, points: Ints) -> tuple[Ints, Ints]:
        """Those of the pairs [n], each once, that are not priced yet; where they are few, with their blocks."""
        self._hold(int(numbers.max()), int(points.max()))
        lacking = self._lacking(numbers, points)
        if len(lacking[0]) > _FEW:
            return lacking
        first = lacking[0] // self._block * self._block
        return self._lacking((first[:, None] + np.arange(self._block)).ravel(), lacking[1].repeat(self._block))

    def _lacking(self, numbers: Ints, points: Ints) -> tuple[Ints, Ints]:
        unknown = self.seconds[numbers, points] == 0.0
        return np.divmod(np.unique(numbers[unknown] * self.seconds.shape[1] + points[unknown]), self.seconds.shape[1])

    def _hold(self, number: int, point: int) -> None:
        """Make room for them."""
        numbers, points = self.seconds.shape
        if number >= numbers or point >= points:
            more = np.zeros((max(numbers, number // self._block * self._block + self._block), max(points, point + 1)))
            more[:numbers, :points] = self.seconds
            self.seconds = more
