"""What drafts and steps of the batch as it is cost, for `Goodput`: two calls of the cost model price it all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from aspire.scheduler.features import FEATURES, CostModel, StepFeatures
from aspire.scheduler.policies.base import Floats, PolicyView
from aspire.scheduler.policies.rounds import RoundPrices, price_rounds, round_work
from aspire.scheduler.survival import draft_price

_SPARSE_KV, _FULL_KV, _SELECT_KV, _SELECT_ROWS = map(
    FEATURES.index, ("sparse_kv_tokens", "full_kv_tokens", "select_kv_tokens", "select_rows")
)
_ONE_TOKEN: Floats = StepFeatures.of(query_tokens=1.0).columns()
EMPTY = StepFeatures.zeros()


@dataclass(frozen=True)
class Prices:
    """What the rows of a batch of ``requests`` cost, around the draft length that suits the batch on average.

    Seconds: ``row`` of a draft row of mean reach, ``sparse_token`` and ``context_token`` more for each token that it
    reads beyond the mean, ``token`` of one more verified token, ``shared`` by all. ``ar_rate``: tokens per second of
    the batch without drafts. ``speedup``: of the best common draft length over it, at the acceptance assumed.
    ``rounds``: prices of rounds in common.
    """

    requests: int
    row: float
    token: float
    sparse_token: float
    context_token: float
    shared: float
    ar_rate: float
    speedup: float
    mean_sparse: float
    mean_context: float
    rounds: RoundPrices

    @property
    def promise(self) -> float:
        """The best pace that the prices allow, in tokens per token of plain decoding; at least 1."""
        return max(1.0, self.speedup, self.rounds.rate / self.ar_rate)

    def of_drafts(self, view: PolicyView, rate: float = 1.0) -> Floats:
        """[n] seconds of one more draft of each request, its share of the step included; times ``rate``, tokens."""
        alike = float(draft_price(self.row, self.token, self.shared, self.requests))
        alike -= self.sparse_token * self.mean_sparse + self.context_token * self.mean_context
        price = (rate * self.sparse_token) * view.sparse_tokens + rate * alike
        if self.context_token:
            price += (rate * self.context_token) * view.context_tokens
        return np.asarray(price)


@dataclass(frozen=True)
class PriceCurve:
    """Half of the `Prices` of a batch of ``requests``: the ``best`` draft length, the seconds of the mean step of its
    rounds, ``step_s``, and their ``speedup``. The other half are chords `around` it. Each is a call of the cost model,
    so that two steps can share the work."""

    requests: int
    best: int
    step_s: float
    speedup: float
    ar_rate: float
    rounds: RoundPrices
    reach: Floats  # [len(FEATURES), 5] of the whole batch: a draft row, a token, a verification, its lists, its context
    half: StepFeatures  # of the mean step of the best draft length, beside what else is in it
    mean_sparse: float
    mean_context: float

    def around(self, model: CostModel) -> Prices:
        """The prices; ``model``: the one that priced the curve."""
        count, best = self.requests, self.best
        chords_s = model.marginal(self.half, StepFeatures.from_columns(self.reach))
        row, token, verify_s, sparse, context = (np.maximum(chords_s, 0.0) / count).tolist()
        rows_s = count * (best * (row + token) + verify_s) / (best + 1.0)
        return Prices(
            requests=count,
            row=row,
            token=token,
            sparse_token=sparse / max(self.mean_sparse, 1.0),
            context_token=context / max(self.mean_context, 1.0),
            shared=min(max(self.step_s - rows_s, 0.0), max(self.step_s, 0.0)),
            ar_rate=self.ar_rate,
            speedup=self.speedup,
            mean_sparse=self.mean_sparse,
            mean_context=self.mean_context,
            rounds=self.rounds,
        )


def means_of(view: PolicyView) -> tuple[float, float]:
    """Tokens that a draft and a verification of the requests of ``view`` read, on average."""
    count, sparse, context = len(view.slots), np.add.reduce(view.sparse_tokens), np.add.reduce(view.context_tokens)
    return float(sparse) / count, float(context) / count


def price_curve(view: PolicyView, model: CostModel, acceptance: Floats, empty_s: float | None = None) -> PriceCurve:
    """Price the rows of ``view``; ``acceptance`` [n, d_max] of draft 1..d_max given those before, margins unknown.

    The whole curve: seconds of the mean step when all requests draft g a round, for every g, stairs of the graph
    buckets included; the best g is where prices matter. Around it chords, wide enough to span a stair. The seconds of
    prefill chunks in the step are nobody's: they are due whatever the others do. ``empty_s``: `predict` of an empty
    step, where it is known already.
    """
    count, lengths = len(view.slots), np.arange(acceptance.shape[1] + 1.0)
    mean_sparse, mean_context = means_of(view)
    typical = replace(
        view,
        slots=view.slots[:1],
        drafted=np.zeros(1, dtype=np.int64),
        context_tokens=np.array([mean_context]),
        sparse_tokens=np.array([mean_sparse]),
    )
    draft, verify = typical.draft_features().columns(), typical.verify_features().columns()
    one_token, beside = _ONE_TOKEN[:, None], view.other.columns()[:, None]
    steps = (count / (lengths + 1.0)) * (lengths * (draft + one_token) + verify)
    plain = count * verify
    plain[[_SELECT_KV, _SELECT_ROWS]] = 0.0  # nobody drafts: no page lists
    common = round_work(draft, verify, one_token, count, len(lengths))
    share, reach = view.full_layer_share, np.zeros((len(FEATURES), 5))
    reach[:, 0], reach[:, 1], reach[:, 2] = draft[:, 0], _ONE_TOKEN, verify[:, 0]
    reach[_SPARSE_KV, 3] = (1.0 - share) * max(mean_sparse, 1.0)
    reach[_FULL_KV, 4] = reach[_SELECT_KV, 4] = share * max(mean_context, 1.0)
    curve = np.concatenate([steps, plain, common], axis=1)
    added_s = model.marginal(StepFeatures.from_columns(beside), StepFeatures.from_columns(curve))
    if empty_s is None:
        empty_s = float(model.predict(EMPTY))
    seconds = empty_s + added_s[: len(lengths)]
    tokens = np.ones(len(lengths))
    tokens[1:] += np.cumsum(np.add.reduce(np.cumprod(acceptance, axis=1), axis=0)) / count
    rates = count * tokens / (lengths + 1.0) / np.maximum(seconds, 1e-12)
    best = int(rates.argmax())
    ar_rate = count / max(empty_s + float(added_s[len(lengths)]), 1e-12)
    return PriceCurve(
        requests=count,
        best=best,
        step_s=float(seconds[best]),
        speedup=float(rates[best]) / ar_rate,
        ar_rate=ar_rate,
        rounds=price_rounds(added_s[len(lengths) + 1 :], empty_s, count, tokens),
        reach=count * reach,
        half=StepFeatures.from_columns(beside + 0.5 * steps[:, best : best + 1]),
        mean_sparse=mean_sparse,
        mean_context=mean_context,
    )
