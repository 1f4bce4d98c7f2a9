"""What a draft step costs over a verification, by request, for `Aspire`: asked of the cost model in every plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from aspire.scheduler.features import FEATURES, CostModel, StepFeatures, cells_per_price_of
from aspire.scheduler.policies.base import Floats, Ints, PolicyView

_SLOW_TO_PRICE = 16_000  # cells times requests; a batch of fewer is priced whole
_STEPS_PER_OCTAVE = 3.0  # of contexts between which prices are straight lines
_STEPS = 128  # more than there are in any context
_LEAST_S = 1e-12


def asked_ratios(view: PolicyView, model: CostModel) -> Floats:
    """[n]: seconds of a step in which requests like each of ``view``, as many as there are, draft, over those of one
    in which they verify. In large batches some are priced, the others in proportion between them, where the model is
    slow to ask."""
    priced = None
    if cells_per_price_of(model) * len(view.slots) > _SLOW_TO_PRICE:
        priced = _PricedRows.of(view.drafted, view.context_tokens)
    if priced is None:
        return _exact_ratios(view, model, slice(None))
    return priced.between(_exact_ratios(view, model, priced.rows))


def _exact_ratios(view: PolicyView, model: CostModel, rows: Ints | slice) -> Floats:
    """[rows]: what `asked_ratios` says of the ``rows`` of ``view``, each of them priced."""
    copies = len(view.slots)
    names = ("slots", "drafted", "can_draft", "context_tokens", "sparse_tokens")
    some = replace(view, **{name: getattr(view, name)[rows] for name in names})
    count = len(some.slots)
    columns = np.empty((len(FEATURES), 2 * count))
    some.fill_draft_features(columns[:, :count], copies)
    some.fill_verify_features(columns[:, count:], copies)
    seconds = model.predict(StepFeatures.from_columns(columns))
    return np.asarray(seconds[:count] / np.maximum(seconds[count:], _LEAST_S))


@dataclass(frozen=True)
class _PricedRows:
    """The requests of a batch that are priced. What the others cost lies between two of them that hold as many
    drafts, in proportion to their contexts, which are at most a fourth apart."""

    rows: Ints  # [priced]
    below: Ints  # [n] place in ``rows`` of the one with the next shorter context
    above: Ints  # [n] and of the one with the next longer
    weight: Floats  # [n] of the latter

    @classmethod
    def of(cls, drafted: Ints, context_tokens: Ints) -> _PricedRows | None:
        """None where nearly all would be priced."""
        count = len(drafted)
        kind = drafted * _STEPS + (_STEPS_PER_OCTAVE * np.log2(context_tokens)).astype(np.int64)
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
