"""Prices of batches whose requests are all alike, for `Aspire`: tables, read as straight lines between contexts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, proxy

import numpy as np

from aspire.scheduler.features import FEATURES, CostModel, StepFeatures, cells_per_price_of, fixed_prices_of, what_if_of
from aspire.scheduler.policies.base import Floats, Ints, PolicyView

POINTS_PER_OCTAVE = 24  # of contexts that are priced: 3 % apart
LISTS_PER_OCTAVE = 8  # of tokens that a draft reads besides, in steps some layers of which read the whole context
LINE_ERROR = 3e-3  # relative: what a ratio between two of them may be off at most; mostly it is a tenth of that
_SHORT = 64.0  # tokens: octaves begin at so many, shorter contexts lie closer together
_LEAST_S = 1e-12
_MOST_FILLED = 2_000_000  # prices

_tables: WeakKeyDictionary[CostModel, dict[Any, PriceTables]] = WeakKeyDictionary()


def has_tables(model: CostModel) -> bool:
    """Not one that learns, or that has no cells and so is quick to ask."""
    return bool(cells_per_price_of(model)) and fixed_prices_of(model)


def tables_of(model: CostModel, view: PolicyView, d_max: int) -> PriceTables:
    """The tables of ``model``, whose prices must be fixed, for rows like those of ``view``; made once."""
    of, known = (view.full_layer_share, view.select_layer_share, d_max), _tables.setdefault(model, {})
    if of not in known:
        known[of] = PriceTables(view, model, d_max)
    return known[of]


def best_round_of(
    view: PolicyView, d_max: int, requests: int, sparse_tokens: float, context_tokens: float
) -> float | None:
    """`PriceTables.best_round` of ``requests`` rows like those of ``view`` with such means; None where the cost model
    has no tables, or the requests no page lists."""
    model = view.cost_model
    if model is None or not has_tables(model) or sparse_tokens < 0:
        return None
    return tables_of(model, view, d_max).best_round(requests, sparse_tokens, context_tokens)


class PriceTables:
    """Seconds of a step in which all requests of a batch draft over those of one in which all verify, within
    `LINE_ERROR`.

    A verification is priced by the drafts that it judges and its context, a draft step by the tokens that a row reads
    and, where layers of it read the whole context, by that, too. A plan that needs an octave of contexts for the first
    time asks for it, which takes as long as a step of a large batch; `fill` asks for all there can be.
    """

    def __init__(self, view: PolicyView, model: CostModel, d_max: int) -> None:
        self._shares = view.full_layer_share, view.select_layer_share
        self._model: CostModel = proxy(model)  # whose tables go when it does
        self._d_max = d_max
        self._drafts_alike = not view.full_layer_share  # at any context
        self._lists = 1  # points of draft steps by the tokens of a list, where contexts are told apart
        self._verify: dict[int, _Table] = {}  # by requests
        self._draft: dict[int, _Table] = {}

    def ratio(self, copies: int, drafted: Ints, sparse_tokens: Ints, context_tokens: Ints) -> Floats:
        """[n] of rows that hold ``drafted`` <= d_max tokens, would read ``sparse_tokens`` >= 0 to draft one more, and
        have contexts of ``context_tokens`` > 0 tokens, each in a batch of ``copies`` requests like it."""
        point, share = _places(context_tokens, POINTS_PER_OCTAVE)
        return np.asarray(
            self._draft_s(copies, sparse_tokens, point, share) / self._verify_s(copies, drafted, point, share)
        )

    def best_round(self, copies: int, sparse_tokens: float, context_tokens: float) -> float:
        """Tokens per token of plain decoding in the same time, of the best round in common whose drafts are all right,
        for a batch of ``copies`` requests with such means."""
        drafts = np.arange(self._d_max + 1)
        point, share = _places(np.array([context_tokens]), POINTS_PER_OCTAVE)
        verify_s = self._verify_s(copies, drafts, point, share)
        draft_s = self._draft_s(copies, np.array([sparse_tokens]), point, share)
        rounds_s = drafts * draft_s + verify_s
        return float(((drafts + 1) * verify_s[0] / rounds_s).max())

    def fill(self, sizes: range, longest: int, longest_list: int) -> None:
        """Ask for the prices of batches of ``sizes`` requests, contexts of up to ``longest`` tokens and draft steps
        that read up to ``longest_list`` of them: half a million prices take a second. Where they would be more than
        `_MOST_FILLED`, they are left to the plans that need them."""
        per_octave = POINTS_PER_OCTAVE if self._drafts_alike else LISTS_PER_OCTAVE
        contexts = _places(np.array([0, longest]), POINTS_PER_OCTAVE)[0]
        lists = _places(np.array([0, longest_list]), per_octave)[0]
        drafts = int(lists[1]) * (1 if self._drafts_alike else int(contexts[1]))
        if len(sizes) * (int(contexts[1]) * (self._d_max + 1) + drafts) > _MOST_FILLED:
            return
        if not self._drafts_alike:
            self._hold_lists(int(lists[1]) + 2)
        for copies in sizes:
            self._verifications(copies).upto(contexts)
            self._drafts(copies).upto(lists if self._drafts_alike else contexts)

    def _verify_s(self, copies: int, drafted: Ints, point: Ints, share: Floats) -> Floats:
        verify = self._verifications(copies).upto(point)
        return _between(verify[point, drafted], verify[point + 1, drafted], share)

    def _draft_s(self, copies: int, sparse_tokens: Any, point: Ints, share: Floats) -> Floats:
        if self._drafts_alike:
            read, part = _places(sparse_tokens, POINTS_PER_OCTAVE)
            draft = self._drafts(copies).upto(read)[:, 0]
            return _between(draft[read], draft[read + 1], part)
        read, part = _places(sparse_tokens, LISTS_PER_OCTAVE)
        self._hold_lists(int(read[read.argmax()]) + 2)
        draft = self._drafts(copies).upto(point)
        low, high = (_between(draft[at, read], draft[at, read + 1], part) for at in (point, point + 1))
        return _between(low, high, share)

    def _hold_lists(self, points: int) -> None:
        if points > self._lists:
            self._lists = -(-points // LISTS_PER_OCTAVE) * LISTS_PER_OCTAVE
            self._draft.clear()

    def _verifications(self, copies: int) -> _Table:
        if copies in self._verify:
            return self._verify[copies]

        def ask(tokens: Floats) -> Floats:
            shape = len(tokens), self._d_max + 1
            context, drafted = tokens.repeat(shape[1]), np.resize(np.arange(shape[1]), shape[0] * shape[1])
            return self._ask(PolicyView.fill_verify_features, copies, drafted, context, context).reshape(shape)

        table = self._verify[copies] = _Table(ask, self._d_max + 1)
        return table

    def _drafts(self, copies: int) -> _Table:
        if copies in self._draft:
            return self._draft[copies]

        def ask(tokens: Floats) -> Floats:
            if self._drafts_alike:
                return self._ask(PolicyView.fill_draft_features, copies, tokens, tokens, tokens)[:, None]
            shape = len(tokens), self._lists
            context = tokens.repeat(shape[1])
            lists = np.resize(_tokens(np.arange(shape[1]), LISTS_PER_OCTAVE), len(context))
            return self._ask(PolicyView.fill_draft_features, copies, lists, lists, context).reshape(shape)

        table = self._draft[copies] = _Table(ask, self._lists)
        return table

    def _ask(self, fill: Callable[..., None], copies: int, drafted: Any, sparse: Any, context: Any) -> Floats:
        """Seconds [n] of steps of ``copies`` rows, whose features ``fill`` of `PolicyView` knows."""
        rows = PolicyView(_NOBODY, drafted, _NOBODY > 0, context, sparse, *self._shares, _NOTHING, None)
        columns = np.empty((len(FEATURES), len(context)))
        fill(rows, columns, copies)
        return np.maximum(what_if_of(self._model)(StepFeatures.from_columns(columns)), _LEAST_S)


class _Table:
    """Seconds [points, columns] that ``ask(tokens [n])`` gives for contexts, octave by octave, when they are needed."""

    def __init__(self, ask: Callable[[Floats], Floats], columns: int) -> None:
        self._ask = ask
        self._known = np.zeros(0, dtype=bool)  # by octave
        self._seconds = np.zeros((0, columns))

    def upto(self, point: Ints) -> Floats:
        """The table, known where the points [n] lie and between each and the next."""
        first = point.item(point.argmin()) // POINTS_PER_OCTAVE
        end = (point.item(point.argmax()) + 1) // POINTS_PER_OCTAVE + 1
        if end > len(self._known) or np.count_nonzero(self._known[first:end]) < end - first:
            self._have(first, end)
        return self._seconds

    def _have(self, first: int, end: int) -> None:
        if end > len(self._known):
            more = end - len(self._known)
            self._known = np.append(self._known, np.zeros(more, dtype=bool))
            columns = self._seconds.shape[1]
            self._seconds = np.concatenate([self._seconds, np.zeros((more * POINTS_PER_OCTAVE, columns))])
        octaves = first + (~self._known[first:end]).nonzero()[0]
        points = (octaves[:, None] * POINTS_PER_OCTAVE + np.arange(POINTS_PER_OCTAVE)).ravel()
        self._seconds[points] = self._ask(_tokens(points, POINTS_PER_OCTAVE))
        self._known[octaves] = True


_NOTHING = StepFeatures.zeros()
_NOBODY: Ints = np.empty(0, dtype=np.int64)


def _tokens(points: Ints, per_octave: int) -> Floats:
    return np.asarray(_SHORT * (np.exp2(points / per_octave) - 1.0))


def _places(tokens: Ints, per_octave: int) -> tuple[Ints, Floats]:
    """([n], [n]): the last point that is not beyond ``tokens`` [n], and how far from it to the next they lie."""
    point = (per_octave * np.log2(tokens / _SHORT + 1.0)).astype(np.int64)
    low = _tokens(point, per_octave)
    return point, (tokens - low) / ((low + _SHORT) * (2.0 ** (1.0 / per_octave) - 1.0))


def _between(low: Floats, high: Floats, share: Floats) -> Floats:
    return low + share * (high - low)
