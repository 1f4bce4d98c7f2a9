"""Prices of steps of rows that are all alike, for `Aspire`: asked for once, and read between the contexts asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from aspire.scheduler.features import FEATURES, CostModel, StepFeatures
from aspire.scheduler.policies.base import Floats, Ints, PolicyView

POINTS_PER_OCTAVE = 40  # of contexts that are priced: less than 2 % apart, no further than ranges of cost models give
LINE_ERROR = 5e-4  # relative: what a price between two of them may be off
_PATIENCE = 4
_AT_ONCE = 64  # prices: where fewer are unknown, some that will be due soon are asked for with them
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
    and, where layers of it read the whole context, by that. What was asked for is kept, and few unknown prices are
    asked for with their neighbours: a call of the cost model takes as long as forty what-ifs of it. A batch of a new
    size may be another one soon: until `_PATIENCE` plans lacked prices, `ratio` knows none.
    """

    def __init__(self, view: PolicyView, model: CostModel, copies: int, d_max: int) -> None:
        self._view, self._model, self._copies = view, model, copies
        self._verify, self._draft = _Lines(d_max + 1), _Lines(d_max + 1)
        self._drafts_alike = not view.full_layer_share  # at any context
        self._lacked = 0  # plans

    def ratio(self, drafted: Ints, sparse_tokens: Ints, octaves: Floats) -> Floats | None:
        """[n] of rows that hold ``drafted`` <= d_max tokens, would read ``sparse_tokens`` >= 0 to draft one more, and
        have contexts of 2^``octaves`` tokens; None where some are unknown and the size of the batch is new."""
        at = POINTS_PER_OCTAVE * octaves
        point = at.astype(np.int64)
        share = at - point
        verify_s = self._verify.between(point, drafted, share)
        if self._drafts_alike:
            draft_s = self._draft.at(0 * point, sparse_tokens)
        else:
            draft_s = self._draft.between(point, sparse_tokens, share)
        if verify_s is not None and draft_s is not None:
            return np.asarray(draft_s / verify_s)
        self._lacked += 1
        if self._lacked <= _PATIENCE:
            return None
        ends = np.concatenate([point, point + 1])
        if verify_s is None:
            self._ask(self._verify, PolicyView.fill_verify_features, ends, drafted)
        if draft_s is None:
            self._ask(
                self._draft, PolicyView.fill_draft_features, 0 * ends if self._drafts_alike else ends, sparse_tokens
            )
        return self.ratio(drafted, sparse_tokens, octaves)

    def _ask(
        self, lines: _Lines, fill_features: Callable[[PolicyView, Floats, int], None], point: Ints, tokens: Ints
    ) -> None:
        """Have the prices of ``lines`` at the points [2 n] of rows that hold, or read, so many ``tokens`` [n]."""
        point, number = lines.unknown(point, np.concatenate([tokens, tokens]))
        context = np.exp2(point / POINTS_PER_OCTAVE)
        rows = replace(self._view, slots=point, drafted=number, sparse_tokens=number, context_tokens=context)
        columns = np.empty((len(FEATURES), len(point)))
        fill_features(rows, columns, self._copies)
        lines.fill(point, number, np.maximum(self._model.predict(StepFeatures.from_columns(columns)), _LEAST_S))


class _Lines:
    """Seconds [points, numbers] by a point on the grid of contexts, counted from the first that is held, and a whole
    number; 0 where not asked for yet."""

    def __init__(self, block: int) -> None:
        self._block = block  # numbers whose prices are asked for together
        self._first = 0
        self._seconds = np.zeros((0, 0))

    def at(self, point: Ints, number: Ints) -> Floats | None:
        """[n] seconds, None where some are unknown."""
        row = point - self._first
        points, numbers = self._seconds.shape
        if row[row.argmin()] < 0 or row[row.argmax()] >= points or number[number.argmax()] >= numbers:
            return None
        seconds = self._seconds[row, number]
        return seconds if np.count_nonzero(seconds) == len(seconds) else None

    def between(self, point: Ints, number: Ints, share: Floats) -> Floats | None:
        """[n] seconds at ``share`` of the way from ``point`` to the next; None where some are unknown."""
        low, high = self.at(point, number), self.at(point + 1, number)
        return None if low is None or high is None else np.asarray(low + share * (high - low))

    def unknown(self, point: Ints, number: Ints) -> tuple[Ints, Ints]:
        """Those of the pairs [n], each once, that are not priced yet; the fewer they are, with the more of the numbers
        that follow each in its block, around its end."""
        self._hold(int(point.min()), int(point.max()), int(number.max()))
        point, number = self._lacking(point, number)
        more = min(self._block, _AT_ONCE // max(len(point), 1))
        if more < 2:
            return point, number
        place = (number[:, None] + np.arange(more)) % self._block
        return self._lacking(point.repeat(more), (number // self._block * self._block)[:, None] + place)

    def fill(self, point: Ints, number: Ints, seconds: Floats) -> None:
        """Keep the ``seconds`` > 0 of pairs that were `unknown`."""
        self._seconds[point - self._first, number] = seconds

    def _lacking(self, point: Ints, number: Ints) -> tuple[Ints, Ints]:
        row, number, width = point - self._first, number.ravel(), self._seconds.shape[1]
        unknown = self._seconds[row, number] == 0.0
        row, number = np.divmod(np.unique(row[unknown] * width + number[unknown]), width)
        return row + self._first, number

    def _hold(self, low: int, high: int, number: int) -> None:
        """Make room for points from ``low`` to ``high``, with some to spare, and for the ``number``."""
        points, numbers = self._seconds.shape
        first, end = (self._first, self._first + points) if points else (low, high + 1)
        if points and first <= low and high < end and number < numbers:
            return
        spare = POINTS_PER_OCTAVE // 4
        self._first, end = max(min(first, low - spare), 0), max(end, high + 1 + spare)
        more = np.zeros((end - self._first, max(numbers, (number // self._block + 1) * self._block)))
        more[first - self._first :][:points, :numbers] = self._seconds
        self._seconds = more
