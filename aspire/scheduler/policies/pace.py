"""How fast a batch goes, in tokens per token that plain decoding would have made in the same time, for `Goodput`."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from aspire.scheduler.features import CostModel, StepFeatures
from aspire.scheduler.policies.base import Feedback
from aspire.scheduler.policies.prices import EMPTY
from aspire.scheduler.survival import RateTracker

_PRIOR_TOKENS = 16.0  # of each request, that what is assumed at the start counts for
_KEPT_WINDOWS = 10.0  # promises are judged over so many windows: a batch at rest is not to forget soon why


class Pace:
    """The batch's speed over its own autoregressive speed, from its steps; it survives batches that grow and shrink.

    Steps are kept until somebody asks for the pace, then priced in one call of the cost model (at once where it learns
    from them).
    """

    def __init__(self, window_tokens: float) -> None:
        self._window = window_tokens
        self._tracker: RateTracker | None = None
        self._kept: RateTracker | None = None  # tokens of common rounds per token that prices promised
        self._promise = 1.0
        self._model: CostModel | None = None
        self._ar_rate = 0.0
        self._together = False
        self._stretch = 1.0  # measured over predicted seconds, fading
        self._unpaid = 0.0  # time of the drafts of a common round, in tokens of plain decoding
        self._steps: list[tuple[Feedback, float]] = []  # with tokens committed; not priced yet
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
        self._settle()
        self._model, self._ar_rate, self._promise, self._together = model, ar_rate, promise, together

    @property
    def kept(self) -> float:
        """What common rounds gave over what they promised, 1 before there were any; fades while the batch rests."""
        return 1.0 if self._kept is None else self._kept.rate

    def observe(self, feedback: Feedback, tokens: float) -> None:
        """A step committed ``tokens``."""
        if self._model is None:
            return
        self._steps.append((feedback, tokens))
        self._committed |= tokens > 0
        if hasattr(self._model, "observe"):  # what it learns from a step counts for the next one
            self._settle()

    def observe_time(self, tokens: float, time: float) -> None:
        """``tokens`` took ``time``, in tokens of plain decoding."""
        if self._tracker is not None:
            self._tracker.observe(tokens, time)

    def now(self) -> float:
        """Tokens lately over those of plain decoding in the same time; never below 1."""
        if self._committed or not self._together:
            self._settle()
        return 1.0 if self._tracker is None else max(1.0, self._tracker.rate)

    def _settle(self) -> None:
        if not self._steps or self._model is None:
            return
        steps, self._steps, self._committed = self._steps, [], False
        seconds = self._decode_seconds(self._model, [feedback for feedback, _ in steps])
        for (feedback, tokens), spent_s in zip(steps, seconds, strict=True):
            self._unpaid += self._ar_rate * spent_s
            if tokens or not self._together:
                self.observe_time(tokens, self._unpaid)
                if self._together and self._kept is not None:
                    drafted = np.count_nonzero(feedback.drafted) > 0
                    self._kept.observe(tokens, self._unpaid * (self._promise if drafted else 1.0))
                self._unpaid = 0.0

    def _decode_seconds(self, model: CostModel, steps: list[Feedback]) -> list[float]:
        """Seconds of each step less those of its prefill chunks, in the cost model's own scale.

        A machine that is slower than its cost model makes every price dearer alike, and so changes no decision.
        """
        whole = steps[0].features.columns()[:, None]
        if len(steps) > 1:
            whole = np.stack([feedback.features.columns() for feedback in steps], axis=1)
        features = StepFeatures.from_columns(whole)
        predicted = decode = model.predict(features)
        if np.count_nonzero(features.prefill_tokens):
            alone = model.predict(EMPTY) + model.marginal(EMPTY, _without_prefill(features))
            decode = np.where(features.prefill_tokens > 0, alone, predicted)
        out, learn = [], getattr(model, "observe", None)
        for feedback, predicted_s, decode_s in zip(steps, predicted.tolist(), decode.tolist(), strict=True):
            if math.isfinite(feedback.seconds) and feedback.seconds > 0 and predicted_s > 0:
                if learn is not None:
                    learn(feedback.features, feedback.seconds)
                ratio = feedback.seconds / predicted_s
                ratio = min(max(ratio, 0.5 * self._stretch), 2.0 * self._stretch)  # stalls clipped
                self._stretch += 0.02 * (ratio - self._stretch)
                decode_s *= ratio / self._stretch
            out.append(decode_s)
        return out


def _without_prefill(features: StepFeatures) -> StepFeatures:
    """The decoding rows of steps; contexts of prefill rows are taken at their mean."""
    prefill_rows = features.rows - features.draft_rows - features.verify_rows
    context = features.prefill_qkv / np.maximum(features.prefill_tokens, 1.0) * prefill_rows
    return replace(
        features,
        rows=features.draft_rows + features.verify_rows,
        query_tokens=features.query_tokens - features.prefill_tokens,
        full_kv_tokens=np.maximum(features.full_kv_tokens - context, 0.0),
        prefill_tokens=np.zeros_like(features.prefill_tokens),
        prefill_qkv=np.zeros_like(features.prefill_qkv),
    )
