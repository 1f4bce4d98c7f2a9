"""Prices of steps of rows that are all alike, for `Aspire`: asked for once, and read between the contexts asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from aspire.scheduler.features import FEATURES, CostModel, StepFeatures, what_if_of
from aspire.scheduler.policies.base import Floats, Ints, PolicyView

POINTS_PER_OCTAVE = 24  # of contexts that are priced: 3 % apart
_GROWTH = 2.0 ** (1.0 / POINTS_PER_OCTAVE)
LINE_ERROR = 8e-4  # relative: what a ratio between two of them may be off
_SMOOTH_ERROR = 1.5e-5  # where lines bend nowhere
_LIST_ERROR = 2e-4  # of what another token read costs
_SPAN = 8  # points that are asked for together
_SAME = 4  # points over which what another token read costs is about the same
_PATIENCE = 4
_AHEAD_TOKENS = 32  # more than contexts grow by while plans rest: a round of d drafts yields d + 1 in as many steps
_REST = 8  # plans after one that lacked nothing ahead
_AT_ONCE = 32  # prices asked for ahead, at most
_LIST_TOKENS, _ALIKE_TOKENS = 16, 64  # lists grow by whole pages; those of about so many cost alike
_LEAST_S = 1e-12

_Pairs = tuple[Ints, Ints]  # points on the grid of contexts, and tokens held or read


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
    and, where layers of it read the whole context, by that, too: it costs what one does that reads a round number of
    tokens, and what the tokens that it reads less cost in contexts nearby. What was asked for is kept, and `ask_ahead`
    asks for what will be due soon: a call of the cost model takes as long as some twenty what-ifs of it. A batch of a
    new size may be another one soon: until `_PATIENCE` plans lacked prices, `ratio` knows none.
    """

    def __init__(self, view: PolicyView, model: CostModel, copies: int, d_max: int) -> None:
        self._rows, self._seconds, self._copies, self._d_max = replace(view), what_if_of(model), copies, d_max
        self._verify, self._draft = _Known(), _Known()
        self._drafts_alike = not view.full_layer_share  # at any context
        self._lacked = 0  # plans
        self._latest: tuple[Floats, Ints, Ints] | None = None  # batch of the latest plan, until `ask_ahead` saw it
        self._at: tuple[Ints, ...] = ()  # points, drafts and lists at which the latest ratios were read
        self._longest = 0  # most drafts that a row of any plan may hold after it
        self._rest = 0  # plans still to come that are not looked ahead of
        self._ready: set[tuple[int, int]] = set()  # spans, and first tokens of lists there, that lack nothing

    def ratio(self, drafted: Ints, sparse_tokens: Ints, octaves: Floats) -> Floats | None:
        """[n] of rows that hold ``drafted`` <= d_max tokens, would read ``sparse_tokens`` >= 0 to draft one more, and
        have contexts of 2^``octaves`` tokens; None where some are unknown and the size of the batch is new."""
        at = POINTS_PER_OCTAVE * octaves
        point = at.astype(np.int64)
        ends = np.array([point, point + 1])
        if self._drafts_alike:
            read_at, read, like = 0 * point, sparse_tokens, sparse_tokens
        else:
            middle, like = point // _SAME * _SAME + _SAME // 2, _round(sparse_tokens - drafted)
            read_at, read = np.array([*ends, middle, middle]), np.array([like, like, like, sparse_tokens])
        verify, draft = self._verify.seconds(ends, drafted), self._draft.seconds(read_at, read)
        if verify is None or draft is None:
            self._lacked += 1
            if self._lacked <= _PATIENCE:
                return None
            self._ask(self._verify.unknown(ends, drafted), self._draft.unknown(read_at, read))
            return self.ratio(drafted, sparse_tokens, octaves)
        self._at = point, drafted, like
        if self._rest:
            self._rest -= 1
        else:
            self._latest = octaves, drafted, sparse_tokens
        share = (np.exp2((at - point) / POINTS_PER_OCTAVE) - 1.0) / (_GROWTH - 1.0)
        if not self._drafts_alike:
            draft = _between(draft, share) + draft[3] - draft[2]
        return np.asarray(draft / _between(verify, share))

    def error(self, rows: Ints) -> Floats:
        """[rows]: what each of these of the latest `ratio` may be off, relative: as much as its lines bend."""
        point, drafted, like = (values[rows] for values in self._at)
        around = np.array([point - 1, point, point + 1, point + 2])
        error = np.full(len(rows), _SMOOTH_ERROR)
        error += _bend(self._verify.seconds(around, drafted))
        if not self._drafts_alike:
            error += _LIST_ERROR + _bend(self._draft.seconds(around, like))
        return np.asarray(np.minimum(error, LINE_ERROR))

    def ask_ahead(self) -> None:
        """Have some of the prices that the batch of the latest plan will need when its contexts are longer."""
        if self._latest is None:
            return
        (octaves, drafted, sparse_tokens), self._latest = self._latest, None
        longest = min(int(drafted[drafted.argmax()]) + 1, self._d_max)
        if longest > self._longest:
            self._longest = longest
            self._ready.clear()
        point = (POINTS_PER_OCTAVE * np.log2(np.exp2(octaves) + _AHEAD_TOKENS)).astype(np.int64)
        lists = (sparse_tokens - drafted - 1) // _LIST_TOKENS * _LIST_TOKENS + 1
        soon = set(zip((point // _SPAN).tolist(), lists.tolist(), strict=True)) - self._ready
        for span, first in sorted(soon):
            verify, draft = self._unknown_of(span, first)
            lacking = len(verify[0]) + len(draft[0])
            if lacking <= _AT_ONCE:
                self._ready.add((span, first))
            if lacking:
                rest = max(_AT_ONCE - len(verify[0]), 0)
                self._ask((verify[0][:_AT_ONCE], verify[1][:_AT_ONCE]), (draft[0][:rest], draft[1][:rest]))
                return
        self._rest = _REST

    def _unknown_of(self, span: int, first: int) -> tuple[_Pairs, _Pairs]:
        """Verifications and draft steps of rows in a span of contexts whose lists hold ``first`` tokens or as many more
        as a page."""
        points = np.maximum(_SPAN * span + np.arange(-1, _SPAN + 2), 0)  # as far as lines of the span bend
        verify = self._verify.unknown(points[:, None], np.arange(self._longest + 1))
        tokens = np.arange(max(first, 0), first + _LIST_TOKENS + self._longest)
        if self._drafts_alike:
            return verify, self._draft.unknown(0 * tokens, tokens)
        like = np.full(len(points), _round(first))
        middle = (_SPAN * span + np.arange(_SAME // 2, _SPAN + _SAME, _SAME)).repeat(len(tokens))
        return verify, self._draft.unknown(np.append(points, middle), np.append(like, np.resize(tokens, len(middle))))

    def _ask(self, verify: _Pairs, draft: _Pairs) -> None:
        """Ask for these prices, in one call."""
        rows, split = self._rows, len(verify[0])
        columns = np.empty((len(FEATURES), split + len(draft[0])))
        rows.context_tokens, rows.drafted = np.exp2(verify[0] / POINTS_PER_OCTAVE), verify[1]
        rows.fill_verify_features(columns[:, :split], self._copies)
        rows.context_tokens, rows.sparse_tokens = np.exp2(draft[0] / POINTS_PER_OCTAVE), draft[1]
        rows.fill_draft_features(columns[:, split:], self._copies)
        seconds = np.maximum(self._seconds(StepFeatures.from_columns(columns)), _LEAST_S)
        self._verify.keep(*verify, seconds[:split])
        self._draft.keep(*draft, seconds[split:])


def _round(tokens: Any) -> Any:
    """The next round number of tokens."""
    return -(-tokens // _ALIKE_TOKENS) * _ALIKE_TOKENS


def _between(seconds: Floats, share: Floats) -> Floats:
    """[n] at ``share`` of the way from the first of ``seconds`` [>= 2, n] to the second."""
    return np.asarray(seconds[0] + share * (seconds[1] - seconds[0]))


def _bend(seconds: Floats | None) -> Floats | float:
    """[n]: how far, relative, the outer two of ``seconds`` [4, n] are off the lines through the others: what lies
    between the middle two is off their line by less, unless two corners are near and hide each other."""
    if seconds is None:
        return LINE_ERROR
    before, low, high, after = seconds
    rise = high - low
    below, above = before - low + rise / _GROWTH, after - high - rise * _GROWTH
    return np.asarray(np.maximum(np.abs(below), np.abs(above)) / low)


class _Known:
    """Seconds [points, tokens], the points counted from the first that is held; 0 where not asked for yet."""

    def __init__(self) -> None:
        self._first = 0
        self._seconds = np.zeros((0, 0))

    def seconds(self, point: Ints, tokens: Ints) -> Floats | None:
        """Of pairs in any shape; None where some are unknown."""
        row = point - self._first
        points, most = self._seconds.shape
        if row.item(row.argmin()) < 0 or row.item(row.argmax()) >= points or tokens.item(tokens.argmax()) >= most:
            return None
        seconds = self._seconds[row, tokens]
        return seconds if np.count_nonzero(seconds) == seconds.size else None

    def unknown(self, point: Ints, tokens: Ints) -> _Pairs:
        """Those of the pairs, each once, that are not priced yet."""
        self._hold(int(point.min()), int(point.max()), int(tokens.max()))
        width = self._seconds.shape[1]
        place = (point - self._first) * width + tokens
        row, tokens = np.divmod(np.unique(place[self._seconds.take(place) == 0.0]), width)
        return row + self._first, tokens

    def keep(self, point: Ints, tokens: Ints, seconds: Floats) -> None:
        """The ``seconds`` > 0 of pairs that were `unknown`."""
        self._seconds[point - self._first, tokens] = seconds

    def _hold(self, low: int, high: int, tokens: int) -> None:
        """Make room for points from ``low`` to ``high`` and for the ``tokens``, with some to spare."""
        points, most = self._seconds.shape
        first, end = (self._first, self._first + points) if points else (low, high + 1)
        if points and first <= low and high < end and tokens < most:
            return
        self._first, end = max(min(first, low - _SPAN), 0), max(end, high + 1 + _SPAN)
        more = np.zeros((end - self._first, max(most, tokens + 1 + _LIST_TOKENS)))
        more[first - self._first :][:points, :most] = self._seconds
        self._seconds = more
