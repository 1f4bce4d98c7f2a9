"""How fast a batch goes, in tokens per token that plain decoding would have made in the same time, for `Goodput`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from aspire.scheduler.features import FEATURES, CostModel, StepFeatures, prefill_context
from aspire.scheduler.policies.base import Feedback, Floats
from aspire.scheduler.policies.prices import EMPTY
from aspire.scheduler.survival import RateTracker

_ROWS, _QUERY, _SELECT_ROWS, _DRAFT_ROWS, _VERIFY_ROWS, _FULL_KV, _PREFILL, _PREFILL_PAIRS = map(
    FEATURES.index,
    (
        "rows",
        "query_tokens",
        "select_rows",
        "draft_rows",
        "verify_rows",
        "full_kv_tokens",
        "prefill_tokens",
        "prefill_pairs",
    ),
)
_PRIOR_TOKENS = 16.0  # of each request, that what is assumed at the start counts for
_STRETCH_GAIN = 0.02
_CLOCKED = 8  # of so many plain steps one is held against the clock
_MOST_PENDING = 32  # steps to price
_KEPT_WINDOWS = 10.0  # promises are judged over so many windows: a batch at rest is not to forget soon why


@dataclass(frozen=True)
class _Terms:
    """What a step is held against, see `Pace.reprice`."""

    ar_rate: float = 0.0
    promise: float = 1.0
    together: bool = False


class Pace:
    """The batch's speed over its own autoregressive speed, from its steps; it survives batches that grow and shrink.

    Steps are kept until `settle`, then priced in one call of the cost model (at once where it learns from them). A step
    of plain decoding has the pace 1 and needs no price.
    """

    def __init__(self, window_tokens: float) -> None:
        self._window = window_tokens
        self._tracker: RateTracker | None = None
        self._kept: RateTracker | None = None  # tokens of common rounds per token that prices promised
        self._model: CostModel | None = None
        self._terms = _Terms()
        self._stretch = 1.0  # measured over predicted seconds, fading
        self._plain = 0  # plain steps since one was held against the clock
        self._empty_s = 0.0  # an empty step of the model
        self._unpaid = 0.0  # time of the drafts of a common round, in tokens of plain decoding
        self._steps: list[tuple[Feedback, float, _Terms | None]] = []  # with tokens committed; None: plain
        self._committed = False  # whether any of them committed tokens

    @property
    def started(self) -> bool:
        """Whether there is a pace to ask for."""
        return self._tracker is not None

    def start(self, pace: float, requests: int) -> None:
        """Assume ``pace`` until ``requests`` requests have shown their own."""
        self._tracker = RateTracker(pace, self._window, prior_tokens=_PRIOR_TOKENS * requests)
        self._kept = RateTracker(1.0, _KEPT_WINDOWS * self._window, prior_tokens=_PRIOR_TOKENS * requests)

    def reprice(self, model: CostModel, ar_rate: float, promise: float, *, together: bool) -> None:
        """From now on plain decoding makes ``ar_rate`` tokens per second of ``model``. ``together``: the batch goes in
        common rounds, whose drafts are paid for by their verification; they ``promise`` that pace."""
        if model is not self._model:
            self._settle()
            self._empty_s = float(model.predict(EMPTY))
        self._model, self._terms = model, _Terms(ar_rate, promise, together)

    def limit(self, change: float) -> None:
        """The batch became another one, whose prices promise ``change`` times the pace that those before did. Where it
        is less the pace falls with it: a few requests that are left of many could never reach the pace of those, would
        stop drafting, and would rest for as long as the mean remembers."""
        if change < 1.0 and self._tracker is not None:
            self._tracker.scale(change)

    @property
    def kept(self) -> float:
        """What common rounds gave over what they promised, 1 before there were any; fades while the batch rests."""
        return 1.0 if self._kept is None else self._kept.rate

    @property
    def learns(self) -> bool:
        """Whether the cost model learns from each step: what it learns counts for the next one."""
        return hasattr(self._model, "observe")

    def observe(self, feedback: Feedback, tokens: float) -> None:
        """A step committed ``tokens``."""
        if self._model is None:
            return
        self._steps.append((feedback, tokens, self._terms))
        self._committed |= tokens > 0
        if self.learns:
            self._settle()

    def observe_plain(self, steps: list[Feedback]) -> None:
        """Each of ``steps`` committed a token of each of its requests, which held no drafts."""
        if self._model is None:
            return
        learns = self.learns
        for feedback in steps:
            tokens = float(len(feedback.slots))
            if learns or feedback.features.columns()[_SELECT_ROWS]:  # page lists are for drafts to come
                self.observe(feedback, tokens)
                continue
            self._count(tokens, tokens, self._terms)
            self._plain = (self._plain + 1) % _CLOCKED
            if not self._plain:
                self._steps.append((feedback, tokens, None))

    def observe_time(self, tokens: float, time: float) -> None:
        """``tokens`` took ``time``, in tokens of plain decoding."""
        if self._tracker is not None:
            self._tracker.observe(tokens, time)

    @property
    def rate(self) -> float:
        """Tokens lately over those of plain decoding in the same time; never below 1. Steps that are not priced yet
        are left out."""
        return 1.0 if self._tracker is None else max(1.0, self._tracker.rate)

    def now(self) -> float:
        """`rate`, steps up to the last that committed tokens included."""
        self.settle()
        return self.rate

    def settle(self, pending: int = 0) -> None:
        """Price the steps that are not, if more than ``pending`` are."""
        if len(self._steps) > pending and (self._committed or len(self._steps) >= _MOST_PENDING):
            self._settle()

    def _settle(self) -> None:
        if not self._steps or self._model is None:
            return
        steps, self._steps, self._committed = self._steps, [], False
        for (feedback, tokens, terms), spent_s in zip(steps, self._decode_seconds(self._model, steps), strict=True):
            if terms is None:
                continue
            self._unpaid += terms.ar_rate * spent_s
            if tokens or not terms.together:
                drafted = np.count_nonzero(feedback.drafted) > 0
                self._count(tokens, self._unpaid, terms, terms.promise if drafted else 1.0)
                self._unpaid = 0.0

    def _count(self, tokens: float, time: float, terms: _Terms, promise: float = 1.0) -> None:
        self.observe_time(tokens, time)
        if terms.together and self._kept is not None:
            self._kept.observe(tokens, time * promise)

    def _decode_seconds(self, model: CostModel, steps: list[tuple[Feedback, float, _Terms | None]]) -> list[float]:
        """Seconds of each step less those of its prefill chunks, in the cost model's own scale.

        A machine that is slower than its cost model makes every price dearer alike, and so changes no decision. What a
        step with prompts took says little of its other rows: they take what they are predicted to.
        """
        features = np.stack([feedback.features.columns() for feedback, _, _ in steps], axis=1)
        prompts = features[_PREFILL] > 0
        if not np.count_nonzero(prompts):
            decode = model.predict(StepFeatures.from_columns(features))
        else:
            decode, others = np.empty(len(steps)), ~prompts
            decode[prompts] = self._empty_s + model.marginal(EMPTY, _without_prefill(features[:, prompts]))
            if np.count_nonzero(others):
                decode[others] = model.predict(StepFeatures.from_columns(features[:, others]))
        out, learn = [], getattr(model, "observe", None)
        for (feedback, _, terms), prompt, decode_s in zip(steps, prompts.tolist(), decode.tolist(), strict=True):
            if math.isfinite(feedback.seconds) and feedback.seconds > 0:
                if learn is not None:
                    learn(feedback.features, feedback.seconds)
                if decode_s > 0 and not prompt:
                    ratio = feedback.seconds / decode_s
                    ratio = min(max(ratio, 0.5 * self._stretch), 2.0 * self._stretch)  # stalls clipped
                    gain = 1.0 - (1.0 - _STRETCH_GAIN) ** (_CLOCKED if terms is None else 1)
                    self._stretch += gain * (ratio - self._stretch)
                    decode_s *= ratio / self._stretch
            out.append(decode_s)
        return out


def _without_prefill(columns: Floats) -> StepFeatures:
    """The decoding rows of steps [len(FEATURES), steps]; contexts of prefill rows are taken at their mean."""
    columns = columns.copy()
    tokens, rows = columns[_PREFILL], columns[_DRAFT_ROWS] + columns[_VERIFY_ROWS]
    context = prefill_context(columns[_ROWS] - rows, tokens, columns[_PREFILL_PAIRS])
    columns[_ROWS] = rows
    columns[_QUERY] -= tokens
    columns[_FULL_KV] = np.maximum(columns[_FULL_KV] - context, 0.0)
    columns[[_PREFILL, _PREFILL_PAIRS]] = 0.0
    return StepFeatures.from_columns(columns)
