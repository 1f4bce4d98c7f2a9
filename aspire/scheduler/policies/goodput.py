"""The `goodput` policy: draft while the next draft earns more than its time would earn elsewhere (docs/goodput.md).

Acceptance comes from `SurvivalModel`, prices from the cost model at the batch as it is, and the rate they are weighed
against from what the batch reached lately, counted in units of its own autoregressive rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aspire.errors import UsageError
from aspire.scheduler.features import FEATURES, CostModel, StepFeatures
from aspire.scheduler.policies.base import Action, Feedback, Floats, Ints, Policy, PolicyView
from aspire.scheduler.policies.rounds import RoundPrices, plan_round, price_rounds
from aspire.scheduler.survival import RateTracker, SurvivalModel, best_rate, draft_price, worth_drafting

_MODE_HYSTERESIS = 0.02
REPRICE_STEPS = 16  # contexts grow by a token or so a step: prices of the same batch hold for a few steps
_TOKENS = FEATURES.index("query_tokens")
_ONE_TOKEN: Floats = StepFeatures.of(query_tokens=1.0).matrix()
_EMPTY = StepFeatures.zeros()
_DRAFT, _VERIFY = np.int8(Action.DRAFT), np.int8(Action.VERIFY)
_REST_STEPS = 8  # a batch in which nobody drafts is asked again after so many steps, less where it explores often


@dataclass(frozen=True)
class GoodputParams:
    """Parameters with their defaults; none needs tuning to be safe.

    ``hysteresis``: a draft must earn this much more than its price. Estimates are noisy, and a draft is made where they
    err on the high side; a request for which drafting hardly pays does not flip between the two either.
    ``explore_rounds``: a request that does not draft tries one draft after so many rounds, if a sure one would pay.
    ``window_tokens``: memory of the rate. ``cost_ratio`` c and ``verify_ratio`` v: a round of g drafts takes
    1 + (c + v) g verifications; when c is None, prices come from the cost model.
    """

    hysteresis: float = 0.05
    explore_rounds: int = 128
    window_tokens: float = 6000.0
    cost_ratio: float | None = None
    verify_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.hysteresis < 0 or self.verify_ratio < 0:
            raise UsageError(
                f"policy parameters hysteresis={self.hysteresis}, verify_ratio={self.verify_ratio} must not be negative"
            )
        if self.explore_rounds < 1 or self.window_tokens <= 0:
            raise UsageError(
                f"policy parameters explore_rounds={self.explore_rounds}, window_tokens={self.window_tokens} "
                "must be positive"
            )
        if self.cost_ratio is not None and self.cost_ratio <= 0:
            raise UsageError(f"policy parameter cost_ratio={self.cost_ratio} is not positive; give T_draft / T_verify")


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

    def of_drafts(self, view: PolicyView) -> Floats:
        """[n] seconds of one more draft of each request, its share of the step included."""
        row = np.asarray(self.row + self.sparse_token * (view.sparse_tokens - self.mean_sparse), dtype=np.float64)
        if self.context_token:
            row += self.context_token * (view.context_tokens - self.mean_context)
        return draft_price(row, np.full(len(row), self.token), self.shared, self.requests)


def price_batch(view: PolicyView, model: CostModel, acceptance: Floats) -> Prices:
    """Price the rows of ``view``; ``acceptance`` [n, d_max] of draft 1..d_max given those before, margins unknown.

    First the whole curve: seconds of the mean step when all requests draft g a round, for every g, stairs of the graph
    buckets included; the best g is where prices matter. Then chords around it, wide enough to span a stair. The seconds
    of prefill chunks in the step are nobody's: they are due whatever the others do.
    """
    count = len(view.slots)
    mean_context, mean_sparse = float(view.context_tokens.mean()), float(view.sparse_tokens.mean())
    typical = replace(
        view,
        drafted=np.zeros(1, dtype=np.int64),
        context_tokens=np.array([mean_context]),
        sparse_tokens=np.array([mean_sparse]),
    )
    draft, verify = typical.draft_features().matrix()[0], typical.verify_features().matrix()[0]
    lengths = np.arange(acceptance.shape[1] + 1.0)[:, None]
    steps = count * (lengths * (draft + _ONE_TOKEN) + verify) / (lengths + 1.0)
    empty_s = float(model.predict(_EMPTY))
    seconds = empty_s + model.marginal(view.other, StepFeatures.from_matrix(steps))
    tokens = 1.0 + np.concatenate([[0.0], np.cumsum(np.cumprod(acceptance, axis=1).mean(axis=0))])
    rates = count * tokens / (lengths[:, 0] + 1.0) / np.maximum(seconds, 1e-12)
    best = int(np.argmax(rates))
    plain = replace(typical, select_layer_share=0.0).verify_features().matrix()[0]  # nobody drafts: no page lists
    plain_s = empty_s + float(model.marginal(view.other, StepFeatures.from_matrix(count * plain)))
    ar_rate = count / max(plain_s, 1e-12)

    share = view.full_layer_share
    reach = np.stack(
        [
            draft,
            _ONE_TOKEN,
            verify,
            StepFeatures.of(sparse_kv_tokens=1.0 - share).matrix() * max(mean_sparse, 1.0),
            StepFeatures.of(full_kv_tokens=share, select_kv_tokens=share).matrix() * max(mean_context, 1.0),
        ]
    )
    width = float(count)
    around = StepFeatures.from_matrix(view.other.matrix() + 0.5 * steps[best])
    row, token, verify_s, sparse, context = (
        np.maximum(model.marginal(around, StepFeatures.from_matrix(width * reach)), 0.0) / width
    ).tolist()
    rows_s = count * (best * (row + token) + verify_s) / (best + 1.0)
    return Prices(
        requests=count,
        row=row,
        token=token,
        sparse_token=sparse / max(mean_sparse, 1.0),
        context_token=context / max(mean_context, 1.0),
        shared=float(np.clip(seconds[best] - rows_s, 0.0, seconds[best])),
        ar_rate=ar_rate,
        speedup=float(rates[best]) / ar_rate,
        mean_sparse=mean_sparse,
        mean_context=mean_context,
        rounds=price_rounds(model, view.other, draft, verify, _ONE_TOKEN, count, tokens, empty_s),
    )


class Goodput(Policy):
    """Draft again iff survival x next acceptance > rate x price; a first draft that does not pay is not made."""

    kind = "goodput"
    needs_cost_model = True
    Params = GoodputParams

    def __init__(self, params: GoodputParams, max_slots: int, d_max: int) -> None:
        super().__init__(params, max_slots, d_max)
        self.survival = SurvivalModel(max_slots, max(d_max, 1))
        self._idle: Ints = np.zeros(max_slots, dtype=np.int64)  # rounds since the last draft
        # requests that gave up together must not all explore in the same step: +-25 %, spread by the golden ratio
        spread = np.asarray(np.arange(max_slots) * 0.6180339887 % 1.0, dtype=np.float64)
        self._patience: Floats = params.explore_rounds * (0.75 + 0.5 * spread)
        self._tracker: RateTracker | None = None  # of tokens per token that plain decoding makes in the same time
        self._prices: Prices | None = None
        self._priced_for: tuple[int, float] = (0, 0.0)
        self._age = 0
        self._common = False  # whether the batch goes in common rounds
        self._model: CostModel | None = None
        self._stretch = 1.0  # measured over predicted seconds, fading
        self._unpaid = 0.0  # time of the drafts of a common round, in tokens of plain decoding
        self._plain: list[Feedback] = []  # steps without drafts, not learned from yet
        self._plain_rounds: Ints = np.zeros(max_slots, dtype=np.int64)  # of each slot in them
        self._rest = 0  # steps to come that stay autoregressive while the batch is what it was
        self._rests_for: tuple[int, float] = (0, 0.0)

    @property
    def drafts(self) -> bool:
        return self.d_max > 0

    @property
    def speedup(self) -> float:
        """Tokens lately over those of autoregressive decoding in the same time; never below 1."""
        self._catch_up()
        return 1.0 if self._tracker is None else max(1.0, self._tracker.rate)

    def reset(self, slots: Ints) -> None:
        self._catch_up()
        self._rest = 0
        self.survival.reset(slots)
        self._idle[slots] = 0

    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        if not len(view.slots) or not self.d_max:
            return np.full(len(view.slots), _VERIFY)
        batch = (len(view.slots), float(view.other.query_tokens))
        if self._rest and batch == self._rests_for and not np.count_nonzero(view.drafted):
            self._rest -= 1
            self._age += 1
            return np.full(len(view.slots), _VERIFY)
        self._catch_up()
        price, ar_rate = self._price(view, batch)
        rate = ar_rate * self.speedup
        fresh = view.drafted == 0
        survival = self.survival.survival(view.slots, view.drafted)
        upcoming = self.survival.next_acceptance(view.slots, view.drafted)
        wanted = price * (1.0 + self.params.hysteresis)
        if self._common and self._prices is not None:
            gain = np.where(view.drafted < self.d_max, survival * upcoming[:, 0], 0.0)
            actions = plan_round(self._prices.rounds, view, gain, rate, self.params.hysteresis)
            if (actions == _DRAFT).any() or (view.drafted > 0).any():
                self.resting, self._rest = False, 0
                self._idle[view.slots] = 0
                return actions
            draft = np.zeros(len(fresh), dtype=bool)
        else:
            draft = worth_drafting(survival, upcoming, wanted, rate)
        draft |= fresh & (self._idle[view.slots] >= self._patience[view.slots]) & (rate * wanted < 1.0)
        # at once: what comes of this round may be observed only after the next one was planned
        self._idle[view.slots[draft & fresh & view.can_draft]] = 0
        # autoregressive for now: no page mass is paid for; who holds drafts will want a list for the next ones
        self.resting = not np.count_nonzero(draft) and bool(fresh.all())
        self._rests_for = batch
        self._rest = max(min(_REST_STEPS, self.params.explore_rounds // 16) - 1, 0) if self.resting else 0
        return np.where(draft & (view.drafted < self.d_max), _DRAFT, _VERIFY)

    def observe(self, feedback: Feedback) -> None:
        if not len(feedback.slots):
            return
        verified = feedback.verified
        decodes = np.count_nonzero(verified)
        if decodes == len(verified) and not np.count_nonzero(feedback.drafted):
            self._plain_rounds[feedback.slots] += 1
            self._plain.append(feedback)
            return
        self._catch_up()
        if decodes < len(verified):
            drew = ~verified
            place = np.minimum(feedback.drafted[drew], self.d_max - 1)
            self.survival.observe_drafts(feedback.slots[drew], place, feedback.margin[drew])
        if not decodes:
            self._observe_rate(feedback, 0.0, 0.0)
            return
        slots = feedback.slots[verified]
        drafted = np.minimum(feedback.drafted[verified], self.survival.d_max)
        accepted = np.minimum(feedback.accepted[verified], drafted)
        self.survival.observe_verified(slots, drafted, accepted)
        self._idle[slots] = (self._idle[slots] + 1) * (drafted == 0)
        self._observe_rate(feedback, float(accepted.sum() + len(slots)), float(drafted.sum()))

    def _catch_up(self) -> None:
        """Learn from the steps without drafts: a batch that rests need not do so in each of them."""
        if not self._plain:
            return
        steps, self._plain = self._plain, []
        slots = self._plain_rounds.nonzero()[0]
        rounds = self._plain_rounds[slots]
        self._plain_rounds[slots] = 0
        self.survival.pass_rounds(slots, rounds)
        self._idle[slots] += rounds
        predicted_s: list[float | None] = [None] * len(steps)
        if self._model is not None and len(steps) > 1 and not hasattr(self._model, "observe"):
            columns = np.stack([feedback.features.columns() for feedback in steps], axis=1)
            predicted_s = self._model.predict(StepFeatures.from_columns(columns)).tolist()
        for feedback, seconds in zip(steps, predicted_s, strict=True):
            self._observe_rate(feedback, float(len(feedback.slots)), 0.0, seconds)

    def _price(self, view: PolicyView, batch: tuple[int, float]) -> tuple[Floats, float]:
        """Prices [n] of one more draft, and the autoregressive rate in the same unit of time."""
        p = self.params
        if p.cost_ratio is not None:
            each = p.cost_ratio + p.verify_ratio
            if self._tracker is None:
                acceptance = self.survival.params.prior_acceptance
                self._tracker = self._started(best_rate(acceptance, each, self.d_max), len(view.slots))
            return np.full(len(view.slots), each), 1.0
        if view.cost_model is None:
            raise UsageError(
                "policy 'goodput' needs a cost model or the parameter cost_ratio; run 'aspire calibrate' first"
            )
        self._age += 1
        old = self._age >= (2 * REPRICE_STEPS if self.resting else REPRICE_STEPS)
        if self._prices is None or batch != self._priced_for or old:
            self._prices = price_batch(view, view.cost_model, self._acceptance(view.slots))
            self._priced_for, self._age, self._model = batch, 0, view.cost_model
            common = self._prices.rounds.rate / self._prices.ar_rate
            # one step in which all verify beats some verifying in every step, or the other way round
            self._common = common > self._prices.speedup * (
                1.0 - _MODE_HYSTERESIS if self._common else 1.0 + _MODE_HYSTERESIS
            )
            if self._tracker is None:
                self._tracker = self._started(max(common, self._prices.speedup), len(view.slots))
        return self._prices.of_drafts(view), self._prices.ar_rate

    def _acceptance(self, slots: Ints) -> Floats:
        """[n, d_max] of each draft of a round given those before it, margins not known."""
        unknown = np.full(self.d_max, np.nan)
        return self.survival.acceptance(slots[:, None], np.arange(self.d_max), unknown)

    def _started(self, speedup: float, requests: int) -> RateTracker:
        return RateTracker(speedup, self.params.window_tokens, prior_tokens=16.0 * requests)

    def _observe_rate(
        self, feedback: Feedback, tokens: float, drafted: float, predicted_s: float | None = None
    ) -> None:
        if self._tracker is None:
            return
        p = self.params
        if p.cost_ratio is not None:
            rounds = float(np.count_nonzero(feedback.verified))
            self._tracker.observe(tokens, rounds + (p.cost_ratio + p.verify_ratio) * drafted)
        elif self._model is not None and self._prices is not None:
            self._unpaid += self._prices.ar_rate * self._decode_seconds(feedback, predicted_s)
            if tokens or not self._common:  # the drafts of a common round are paid for by its verification
                self._tracker.observe(tokens, self._unpaid)
                self._unpaid = 0.0

    def _decode_seconds(self, feedback: Feedback, predicted_s: float | None) -> float:
        """Seconds of the step less those of its prefill chunks, in the cost model's own scale.

        A machine that is slower than its cost model makes every price dearer alike, and so changes no decision.
        """
        model, features = self._model, feedback.features
        if model is None:
            return 0.0
        if predicted_s is None:
            predicted_s = float(model.predict(features))
        decode_s = predicted_s
        if features.prefill_tokens > 0:
            decode_s = float(model.predict(_EMPTY) + model.marginal(_EMPTY, _without_prefill(features)))
        if not (math.isfinite(feedback.seconds) and feedback.seconds > 0 and predicted_s > 0):
            return decode_s
        learn = getattr(model, "observe", None)
        if learn is not None:
            learn(features, feedback.seconds)
        ratio = min(max(feedback.seconds / predicted_s, 0.5 * self._stretch), 2.0 * self._stretch)  # stalls clipped
        self._stretch += 0.02 * (ratio - self._stretch)
        return decode_s * ratio / self._stretch


def _without_prefill(features: StepFeatures) -> StepFeatures:
    """The decoding rows of a step (0-d); contexts of prefill rows are taken at their mean."""
    prefill_rows = features.rows - features.draft_rows - features.verify_rows
    context = features.prefill_qkv / np.maximum(features.prefill_tokens, 1.0) * prefill_rows
    return replace(
        features,
        rows=features.draft_rows + features.verify_rows,
        query_tokens=features.query_tokens - features.prefill_tokens,
        full_kv_tokens=np.maximum(features.full_kv_tokens - context, 0.0),
        prefill_tokens=np.zeros(()),
        prefill_qkv=np.zeros(()),
    )
