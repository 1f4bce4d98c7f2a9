"""What a draft step costs over a verification, by request, for `Aspire`: as exact as its decisions need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aspire.scheduler.features import CostModel, cells_per_price_of
from aspire.scheduler.policies.base import Floats, Ints, PolicyView
from aspire.scheduler.policies.copy_prices import LINE_ERROR, CopyPrices, exact_ratio

_SLOW_TO_PRICE = 16_000  # cells times requests; a batch of fewer is priced whole
_STEPS_PER_OCTAVE = 3.0  # of contexts between which prices are straight lines
_STEPS = 128  # more than there are in any context
_NOBODY: Ints = np.empty(0, dtype=np.int64)


class CostRatios:
    """Ratios of the requests of ``view``: from the ``prices`` that are kept of batches of its size, if there are any,
    where they stand and tokens are counted (they are not for requests that have no page list); else from the model."""

    def __init__(self, view: PolicyView, model: CostModel, prices: CopyPrices | None) -> None:
        self._view, self._model, self._count = view, model, len(view.slots)
        drafted, sparse, cells = view.drafted, view.sparse_tokens, cells_per_price_of(model)
        self._priced: PricedRows | None = None
        rows: Ints | slice = slice(None)
        ratio: Floats | None = None
        if cells:  # else all are asked for
            octaves = np.log2(view.context_tokens)
            if cells * self._count > _SLOW_TO_PRICE:
                self._priced = PricedRows.of(drafted, view.context_tokens, octaves)
            if self._priced is not None:
                rows = self._priced.rows
            if prices is not None and sparse[sparse.argmin()] >= 0:
                ratio = prices.ratio(drafted[rows], sparse[rows], octaves[rows])
        self._kept = None if ratio is None else prices
        self._ratio = exact_ratio(view, model, self._count, rows) if ratio is None else ratio

    def now(self) -> Floats:
        """[n], by the prices known."""
        return self._ratio if self._priced is None else self._priced.between(self._ratio)

    def doubtful(self, gain: Floats, cost: Floats) -> Ints:
        """Requests of which the model itself might say the other of ``gain`` > ``cost`` [n], by `gain_and_cost`."""
        if self._kept is None:
            return _NOBODY
        apart = np.abs(gain - cost)
        close = (apart <= LINE_ERROR * cost).nonzero()[0]
        if not len(close):
            return close
        if self._priced is None:
            error = self._kept.error(close)
        else:
            error = np.maximum(*(self._kept.error(end[close]) for end in (self._priced.below, self._priced.above)))
        return np.asarray(close[apart[close] <= error * cost[close]])

    def ask_for(self, requests: Ints) -> None:
        """Ask the cost model itself for what `now` says of the ``requests``."""
        rows = asked = requests
        if self._priced is not None:
            asked = self._priced.beside(requests)
            rows = self._priced.rows[asked]
        self._ratio[asked] = exact_ratio(self._view, self._model, self._count, rows)


@dataclass(frozen=True)
class PricedRows:
    """The requests of a batch that are priced. What the others cost lies between two of them that hold as many
    drafts, in proportion to their contexts, which are at most a fourth apart."""

    rows: Ints  # [priced]
    below: Ints  # [n] place in ``rows`` of the one with the next shorter context
    above: Ints  # [n] and of the one with the next longer
    weight: Floats  # [n] of the latter

    @classmethod
    def of(cls, drafted: Ints, context_tokens: Ints, octaves: Floats) -> PricedRows | None:
        """None where nearly all would be priced. ``octaves`` [n]: logarithms of the contexts."""
        count = len(drafted)
        kind = drafted * _STEPS + (_STEPS_PER_OCTAVE * octaves).astype(np.int64)
        if 2 * int(np.minimum(np.bincount(kind), 2).sum()) > count:  # the first and the last of each kind
            return None
        order = np.lexsort((context_tokens, kind))
        kinds, context = kind[order], context_tokens[order].astype(np.float64)
        edge = kinds[1:] != kinds[:-1]
        priced = np.ones(count, dtype=bool)
        priced[1:-1] = edge[:-1] | edge[1:]
        rows = priced.nonzero()[0]
        below = priced.cumsum() - 1
        above = below + ~priced
        low = context[rows[below]]
        weight = (context - low) / np.maximum(context[rows[above]] - low, 1.0)
        place = np.empty(count, dtype=np.int64)
        place[order] = np.arange(count)
        return cls(order[rows], below[place], above[place], weight[place])

    def between(self, values: Floats) -> Floats:
        """[n] from ``values`` [priced]."""
        low = values[self.below]
        return np.asarray(low + self.weight * (values[self.above] - low))

    def beside(self, requests: Ints) -> Ints:
        """Places in ``rows`` of those that the ``requests`` lie between."""
        return np.unique(np.concatenate([self.below[requests], self.above[requests]]))
