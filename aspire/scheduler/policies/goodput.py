"""The `goodput` policy: draft while the next draft earns more than its time would earn elsewhere (docs/goodput.md).

Acceptance comes from `SurvivalModel`, prices from the cost model at the batch as it is (`prices`), and the rate they
are weighed against from what the batch reached lately, in units of its own autoregressive rate (`pace`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aspire.errors import UsageError
from aspire.scheduler.features import CostModel
from aspire.scheduler.policies.base import Action, Feedback, Floats, Ints, Policy, PolicyView, draft_where
from aspire.scheduler.policies.pace import Pace
from aspire.scheduler.policies.price_tables import best_round_of
from aspire.scheduler.policies.prices import EMPTY, PriceCurve, Prices, means_of, price_curve
from aspire.scheduler.policies.rounds import plan_round
from aspire.scheduler.slots import index_of
from aspire.scheduler.survival import SurvivalModel, best_rate, worth_drafting

_MODE_HYSTERESIS = 0.02
_BLOCK_ROUNDS = 64  # of the thousands that the population remembers
REPRICE_STEPS = 16  # contexts grow by a token or so a step: prices of the same batch hold for a few steps
_REPRICE_CHANGED = 4  # steps that they hold of a batch that changed, for one that may change again in the next
# Where not even a sure draft pays, prices hold until contexts are longer by such a factor: by the first, or, where
# tables show whether drafts gained by it, by the second.
_REPRICE_GROWTH, _LOOKED_AT_GROWTH = 1.05, 1.3
_DOUBT = 0.9  # a batch that rests where its prices promise more thinks too much of its pace
_DRAFT, _VERIFY = np.int8(Action.DRAFT), np.int8(Action.VERIFY)
# a batch in which nobody drafts is asked again after so many steps, less where it explores often, and no later than
# that after another request moved in
_REST_STEPS = 8
_LONG_REST_STEPS = 64  # twice as many each time where not even a sure draft pays, up to this
_REST_GROWTH = 1 / 16  # a rest ends when contexts are longer by this share


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


def _alike(requests: int, others: int) -> bool:
    """Whether batches of so many requests are priced alike: they differ by an eighth at most."""
    return 8 * abs(requests - others) <= others


def _comparable(requests: int, others: int) -> bool:
    """Whether prices of a batch of ``others`` will do for a few steps of this one: neither is twice the other."""
    return requests < 2 * others and others < 2 * requests


@dataclass
class _Standing:
    """Prices that stand until they are old or the batch is another one; ``curve``: half of those to come. ``age``:
    steps in which they stood; ``common``: by them the batch goes in common rounds."""

    prices: Prices | None = None
    curve: PriceCurve | None = None
    age: int = 0
    common: bool = False


class Goodput(Policy):
    """Draft again iff survival x next acceptance > rate x price; a first draft that does not pay is not made."""

    kind = "goodput"
    needs_cost_model = True
    Params = GoodputParams

    def __init__(self, params: GoodputParams, max_slots: int, d_max: int) -> None:
        super().__init__(params, max_slots, d_max)
        self.survival = SurvivalModel(max_slots, max(d_max, 1), block_rounds=_BLOCK_ROUNDS)
        self._idle: Ints = np.zeros(max_slots, dtype=np.int64)  # rounds since the last draft
        # requests that gave up together must not all explore in the same step: +-25 %, spread by the golden ratio
        spread = np.asarray(np.arange(max_slots) * 0.6180339887 % 1.0, dtype=np.float64)
        self._patience: Floats = params.explore_rounds * (0.75 + 0.5 * spread)
        self._pace = Pace(params.window_tokens)
        self._alone, self._beside = _Standing(), _Standing()  # of steps without and with prompts
        self._standing = self._alone
        self._stale: PolicyView | None = None  # the batch whose standing prices are old
        self._asked = False  # the cost model, since the last plan
        self._drafting = False  # the step planned last only drafts
        self._model: CostModel | None = None
        self._empty_s = 0.0  # an empty step of the model
        self._plain: list[Feedback] = []  # of steps without drafts, not learned from yet
        self._moved_in: list[Ints] = []  # slots of requests that came after those steps
        self._rest = 0  # steps to come that stay autoregressive while the batch is what it was
        self._rests_for = 0  # requests
        self._long_rest = 0  # steps of the last rest, where not even a sure draft paid
        self._lacking = 1.0  # times that drafts must gain there before they pay

    @property
    def drafts(self) -> bool:
        return self.d_max > 0

    @property
    def speedup(self) -> float:
        """Tokens lately over those of autoregressive decoding in the same time; never below 1."""
        return self._pace.now()

    def reset(self, slots: Ints) -> None:
        self._rest = min(self._rest, _REST_STEPS)
        self._moved_in.append(slots)

    def rests(self, requests: int) -> bool:
        if not self._rest or not _alike(requests, self._rests_for):
            return False
        self._rest -= 1
        self._standing.age += 1
        return True

    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        count, held = len(view.slots), np.count_nonzero(view.drafted)
        self._drafting = self._asked = False
        if not count or not self.d_max:
            return np.full(count, _VERIFY)
        self._catch_up()
        rate = self._rate(view)
        at = index_of(view.slots)
        survival = self.survival.survival(at, view.drafted)
        upcoming = self.survival.next_acceptance(at, view.drafted)
        wanted = self._wanted(view, rate)
        common, prices = self._standing.common, self._standing.prices
        if common and prices is not None and (held or self._promising(prices)):
            actions = plan_round(prices.rounds, view, survival * upcoming[:, 0], rate, self.params.hysteresis)
            self._drafting = bool(np.count_nonzero(actions == _DRAFT))
            if held or self._drafting:
                self.resting, self._rest, self._long_rest = False, 0, 0
                self._idle[at] = 0
                return actions
        draft = np.zeros(count, dtype=bool) if common else worth_drafting(survival, upcoming, wanted, 1.0)
        if held < count:
            idle, fresh = self._idle[at], view.drafted == 0
            turn = fresh & (idle >= self._patience[at])
            if np.count_nonzero(turn):
                draft |= turn & (wanted < 1.0)
            if np.count_nonzero(idle):
                # at once: what comes of this round may be observed only after the next one was planned
                self._idle[view.slots[draft & fresh & view.can_draft]] = 0
        # autoregressive for now: no page mass is paid for; who holds drafts will want a list for the next ones
        self.resting = not held and not np.count_nonzero(draft)
        self._rest = 0
        if self.resting and self._stale is None:  # asked again as soon as there are new prices
            if self._standing is self._alone:  # prices beside prompts say little of the steps without that follow
                self._rest = self._rest_steps(view, wanted)
                self._lacking = self._lacks(wanted)
            if prices is not None and prices.promise * self._pace.kept > 1.0 + self.params.hysteresis:
                self._pace.limit(_DOUBT)
        self._rests_for = count
        return draft_where(draft & (view.drafted < self.d_max))

    def observe(self, feedback: Feedback) -> None:
        self.learn()
        count = len(feedback.slots)
        if not count or not self.d_max:
            return
        verified, drafted, p = feedback.verified, feedback.drafted, self.params
        decodes = np.count_nonzero(verified)
        if decodes == count and not np.count_nonzero(drafted):
            self._plain.append(feedback)
            if self._pace.learns:
                self._catch_up()
            return
        self._catch_up()
        if not decodes:
            self.survival.observe_drafts(index_of(feedback.slots), drafted, feedback.margin)
            self._count_rate(feedback, 0.0, 0.0)
            return
        slots, accepted = feedback.slots, feedback.accepted
        if decodes < count:
            drew = (~verified).nonzero()[0]
            self.survival.observe_drafts(slots[drew], drafted[drew], feedback.margin[drew])
            judged = verified.nonzero()[0]
            slots, drafted, accepted = slots[judged], drafted[judged], accepted[judged]
        drafted = np.minimum(drafted, self.survival.d_max)
        accepted = np.minimum(accepted, drafted)
        self.survival.end_rounds(slots, drafted, accepted)
        self._idle[slots] = (self._idle[slots] + 1) * (drafted == 0)
        tokens = float(np.add.reduce(accepted) + len(slots))
        self._count_rate(feedback, tokens, float(np.add.reduce(drafted)) if p.cost_ratio is not None else 0.0)

    def learn(self) -> None:
        """Learn from the rounds that ended last, and from a rest that is over; price the batch anew, or its latest
        steps, where it is time to.

        To price takes longer than a step in which a batch drafts or few requests verify: a common round is waited for,
        its verification is long enough; else two steps share the work.
        """
        self.survival.learn()
        if self._moved_in or (self.resting and not self._rest):  # the next step is planned again
            self._catch_up()
        view, now, model = self._stale, self._standing, self._model
        if self._asked:
            return
        patience = 3 * REPRICE_STEPS if self._drafting else REPRICE_STEPS
        if view is not None and model is not None and not (self._drafting and now.age < patience):
            self._asked = True
            if now.curve is not None or now.common:
                self._reprice(now, view, model)
            else:
                now.curve = self._curve_of(view, model)
        elif now.age:  # prices that are as new as the plan: one call of the cost model a step is enough
            self._pace.settle(patience)

    def _catch_up(self) -> None:
        """Learn from the steps without drafts, and forget who made room for others since: a batch that rests need not
        do so in each step."""
        if self._plain:
            self._learn_plain()
        if self._moved_in:
            slots = np.concatenate(self._moved_in)
            self._moved_in = []
            self.survival.reset(slots)
            self._idle[slots] = 0

    def _learn_plain(self) -> None:
        steps, self._plain = self._plain, []
        rounds_of = np.bincount(np.concatenate([step.slots for step in steps]), minlength=self.max_slots)
        slots = rounds_of.nonzero()[0]
        self.survival.pass_rounds(slots, rounds_of[slots])
        self._idle[slots] += rounds_of[slots]
        if self.params.cost_ratio is None:
            self._pace.observe_plain(steps)
        else:
            for step in steps:
                self._pace.observe_time(float(len(step.slots)), float(len(step.slots)))

    def _rest_steps(self, view: PolicyView, wanted: Floats) -> int:
        """Steps after this one that nobody need be asked in.

        Where not even a sure draft pays, only other prices can change that, and those follow the contexts: each rest is
        twice as long as the one before.
        """
        p, count = self.params, len(view.slots)
        shortest: int = min(_REST_STEPS, p.explore_rounds // 16)
        if np.count_nonzero(wanted < 1.0):
            self._long_rest = 0
            return max(shortest - 1, 0)
        grown = int(_REST_GROWTH * float(np.add.reduce(view.context_tokens)) / count)
        longest = max(min(_LONG_REST_STEPS, p.explore_rounds // 2, grown), shortest)
        twice = 2 * self._long_rest if _alike(count, self._rests_for) else 0
        self._long_rest = min(max(twice, shortest), longest)
        return max(self._long_rest - 1, 0)

    def _rate(self, view: PolicyView) -> float:
        """Tokens per second of this batch lately, in the unit of its prices. Where there are none to go by they are
        made here; those of a batch that aged or changed a little are left to `learn`."""
        p = self.params
        if p.cost_ratio is not None:
            if not self._pace.started:
                acceptance = self.survival.params.prior_acceptance
                self._pace.start(best_rate(acceptance, p.cost_ratio + p.verify_ratio, self.d_max), len(view.slots))
            return self._pace.rate
        if view.cost_model is None:
            raise UsageError(
                "policy 'goodput' needs a cost model or the parameter cost_ratio; run 'aspire calibrate' first"
            )
        prompt_tokens, model = float(view.other.query_tokens), view.cost_model
        if model is not self._model:
            self._model, self._empty_s = model, float(model.predict(EMPTY))
            self._alone, self._beside = _Standing(), _Standing()
        now = self._standing = self._beside if prompt_tokens else self._alone
        now.age += 1
        prices, self._stale = now.prices, None
        if prices is None or not _comparable(len(view.slots), prices.requests):
            now.curve = None
            prices = self._reprice(now, view, model)
        elif self._outdated(prices, view):
            self._stale = view
        return prices.ar_rate * self._pace.rate

    def _curve_of(self, view: PolicyView, model: CostModel) -> PriceCurve:
        return price_curve(view, model, self.survival.unseen_acceptance(view.slots), self._empty_s)

    def _reprice(self, now: _Standing, view: PolicyView, model: CostModel) -> Prices:
        """Prices of the batch of ``view``, or of the one whose curve there is, which stand from ``now`` on."""
        before, curve = now.prices, now.curve or self._curve_of(view, model)
        prices = now.prices = curve.around(model)
        now.age, now.curve, self._stale = 0, None, None
        common = prices.rounds.rate / prices.ar_rate
        if before is not None and before.requests != prices.requests and now is self._alone:
            self._pace.limit(prices.promise / before.promise)
        # one step in which all verify beats some verifying in every step, or the other way round
        now.common = common > prices.speedup * (1.0 - _MODE_HYSTERESIS if now.common else 1.0 + _MODE_HYSTERESIS)
        if now is self._alone or self._alone.prices is None:  # the pace leaves prompts out of account
            self._pace.reprice(model, prices.ar_rate, common, together=now.common)
        if not self._pace.started:
            self._pace.start(prices.promise, prices.requests)
        return prices

    def _promising(self, prices: Prices) -> bool:
        """Whether common rounds are faster than plain decoding, by their prices and by what came of such promises.

        A draft is weighed against the next step alone, in a round that is going on; that the verification is dear, and
        makes page lists, is nobody's price.
        """
        promise = prices.rounds.rate / prices.ar_rate * self._pace.kept
        return promise > (1.0 + self.params.hysteresis if self.resting else 1.0)

    def _outdated(self, prices: Prices, view: PolicyView) -> bool:
        alike = _alike(len(view.slots), prices.requests)
        if self._long_rest:
            if alike and means_of(view)[1] <= _REPRICE_GROWTH * prices.mean_context:
                return False
            gained = self._gained(prices, view) if self._lacking > 1.0 else None
            if gained is not None:
                return gained > math.sqrt(self._lacking)
        if not alike:
            return self._standing.age > _REPRICE_CHANGED
        return bool(self._long_rest) or self._standing.age >= (2 * REPRICE_STEPS if self.resting else REPRICE_STEPS)

    def _gained(self, prices: Prices, view: PolicyView) -> float | None:
        """How many times more a sure round in common earns now than it did in the batch that was priced, by the tables
        of the cost model; None where it has none, or this batch is quite another one."""
        (sparse, context), count = means_of(view), len(view.slots)
        if context > _LOOKED_AT_GROWTH * prices.mean_context or 2 * abs(count - prices.requests) > prices.requests:
            return None
        before = best_round_of(view, self.d_max, prices.requests, prices.mean_sparse, prices.mean_context)
        now = best_round_of(view, self.d_max, count, sparse, context)
        return None if before is None or now is None else now / before

    def _lacks(self, wanted: Floats) -> float:
        """How many times more drafts would have to earn before one of them, or a common round, pays."""
        prices, sure = self._standing.prices, float(wanted[wanted.argmin()])
        if prices is None:
            return sure
        rounds: float = (1.0 + self.params.hysteresis) * prices.ar_rate / (prices.rounds.rate * self._pace.kept)
        return min(sure, rounds)

    def _wanted(self, view: PolicyView, rate: float) -> Floats:
        """[n] tokens that one more draft of each request must earn at ``rate``."""
        p = self.params
        rate *= 1.0 + p.hysteresis
        prices = self._standing.prices
        if p.cost_ratio is not None or prices is None:
            return np.full(len(view.slots), rate * ((p.cost_ratio or 0.0) + p.verify_ratio))
        return prices.of_drafts(view, rate)

    def _count_rate(self, feedback: Feedback, tokens: float, drafted: float) -> None:
        """``tokens`` were committed in a step that verified ``drafted`` drafts."""
        p = self.params
        if p.cost_ratio is None:
            self._pace.observe(feedback, tokens)
        elif tokens:
            rounds = float(np.count_nonzero(feedback.verified))
            self._pace.observe_time(tokens, rounds + (p.cost_ratio + p.verify_ratio) * drafted)
