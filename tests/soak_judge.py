"""Is an output of the soak what autoregressive decoding gives? In half precision: measured, not guessed.

Scores are ``logits / T + noise`` and rounding acts on logits, so all margins here are in logits: times T where T > 0.
Where two texts part, the gap between the two tokens has moved from one sign to the other. A move within ``tie_logits``
is a tie. Everything else is an *appeal*: the token is decoded again from a cold start, many times, each time beside
other requests and strangers' prompts, with another share of the output before it computed as prompt. No copy drafts or
shares pages, so copies differ in rounding alone (a short text alone in the engine would always be rounded alike: steps
of few tokens go through one kernel). If a copy picks the disputed token, the two are a tie. That
happens in float32, too: the last token that top-p keeps (one of thousands, where a text has lost its thread) comes and
goes with the last bits, whatever its score. In half precision they are a tie also where the gap's mean over the copies
is within ``SPREADS`` of its own standard deviations from 0. Else the speculating engine is at fault.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from aspire import LLMEngine, SamplingParams
from aspire.compare import Difference, Text, compare

BF16_TIE = 0.25  # two steps of bfloat16 between 16 and 32, where the best logits of real models lie
SPREADS = 5.0
COPIES = (2, 4, 8, 16, 32)  # of a disputed token, until one decides
STRANGERS = 12  # requests beside the copies, with prompts of up to the tokens of a step
LEAST_GAPS = 8  # fewer say nothing of a spread


@dataclass(frozen=True)
class Asked:
    """A request as it was submitted."""

    name: str
    prompt: list[int]
    params: SamplingParams

    @property
    def logits_per_score(self) -> float:
        """What turns a margin of scores into one of logits."""
        return self.params.temperature or 1.0


@dataclass
class Appeal:
    """A disputed token, and what the copies say of it."""

    asked: Asked
    common: list[int]  # output before it
    picked: int  # by the speculating engine
    expected: int
    margin: float  # logits, of the autoregressive run
    shift: float  # logits
    half: bool
    onset: dict[str, Any]
    gaps: list[float] = field(default_factory=list)  # logits, expected minus picked token, of copies that chose one
    reproduced: bool = False

    def copy(self, name: str, cut: int) -> Asked:
        """The request up to the disputed token, its first ``cut`` output tokens given as prompt."""
        params = replace(self.asked.params, max_tokens=len(self.common) - cut + 1)
        return Asked(name, self.asked.prompt + self.common[:cut], params)

    def testify(self, cut: int, text: Text) -> None:
        """Take the outcome of a copy; one that parted earlier, or for a third token, says nothing."""
        *before, token = text.token_ids
        if before != self.common[cut:] or text.margins is None:
            return
        gap = float(text.margins[-1]) * self.asked.logits_per_score
        if token == self.picked:
            self.reproduced = True
            self.gaps.append(-gap)
        elif token == self.expected:
            self.gaps.append(gap)

    @property
    def verdict(self) -> str:
        """``reproduced``, ``within spread`` or ``denied``."""
        if self.reproduced:
            return "reproduced"
        measured = self.half and len(self.gaps) >= LEAST_GAPS
        return "within spread" if measured and np.mean(self.gaps) <= SPREADS * np.std(self.gaps, ddof=1) else "denied"

    def to_json(self) -> dict[str, Any]:
        """JSON object of the case."""
        spread = float(np.std(self.gaps, ddof=1)) if len(self.gaps) > 1 else None
        return {
            "request": self.asked.name,
            "position": len(self.common),
            **_asked(self.asked),
            "margin_logits": self.margin,
            "shift_logits": self.shift,
            "copies_heard": len(self.gaps),
            "gap_mean_logits": float(np.mean(self.gaps)) if self.gaps else None,
            "gap_std_logits": spread,
            **self.onset,
            "verdict": self.verdict,
        }


class Judge:
    """Compares outputs with those of ``reference``: an autoregressive engine without a prefix cache."""

    def __init__(self, reference: LLMEngine, dice: random.Random, tie_logits: float) -> None:
        self.reference = reference
        self.half = is_half(reference)
        self.tie_logits = tie_logits
        self.compared = 0
        self.ties = 0
        self.appeals: list[Appeal] = []
        self.problems: list[str] = []
        self._dice = dice
        self._margins: list[float] = []
        self._shifts: list[float] = []

    def check(self, finished: Sequence[tuple[Asked, Text]]) -> None:
        """Compare the finished requests with cold runs; what is no tie is added to ``problems``."""
        asked = {request.name: request for request, _ in finished}
        texts = {text.request_id: text for _, text in finished}
        expected = {text.request_id: text for text in self.decode([request for request, _ in finished])}
        comparison = compare(list(texts.values()), [expected[name] for name in texts])
        self.compared += comparison.compared
        open_cases = []
        for found in comparison.differences:
            case = self._judge(found, asked[found.request], texts[found.request], expected[found.request])
            if case is not None:
                open_cases.append(case)
        self.appeals += open_cases
        self._hear(open_cases)
        self.problems += [_fault(case.asked, len(case.common), case.to_json()) for case in open_cases if _denied(case)]

    def decode(self, requests: Iterable[Asked]) -> list[Text]:
        """Outputs and margins of autoregressive decoding, all requests at once, from a cold start."""
        self.reference.begin_record(margins=True)
        names, outputs = [], {}
        for request in requests:
            names.append(request.name)
            self.reference.add_request(request.name, request.prompt, request.params)
        while self.reference.has_unfinished_requests:
            for output in self.reference.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        margins = self.reference.recorder.margins() or []
        return [Text(name, outputs[name], found) for name, found in zip(names, margins, strict=True)]

    def _judge(self, found: Difference, asked: Asked, text: Text, expected: Text) -> Appeal | None:
        """Count a tie, note a problem, or return what must be heard."""
        at, scale = found.position, asked.logits_per_score
        ended = at >= min(len(text.token_ids), len(expected.token_ids))
        if ended or found.margin is None or found.shift is None:
            self.problems.append(_fault(asked, at, {"lengths": (len(text.token_ids), len(expected.token_ids))}))
            return None
        margin, shift = found.margin * scale, found.shift * scale
        self._margins.append(margin)
        self._shifts.append(shift)
        if shift <= self.tie_logits:
            self.ties += 1
            return None
        tokens, onset = list(text.token_ids), _onset(text, expected, at, scale)
        return Appeal(asked, tokens[:at], tokens[at], expected.token_ids[at], margin, shift, self.half, onset)

    def _hear(self, cases: list[Appeal]) -> None:
        """Decode copies of the cases beside each other, in random order, more of them until the token is reproduced."""
        for copies in COPIES:
            cases = [case for case in cases if not case.reproduced]
            if not cases:
                return
            witnesses = []
            for number, case in enumerate(cases):
                for copy in range(copies):
                    cut = self._dice.randrange(len(case.common) + 1)
                    witnesses.append((case, cut, case.copy(f"{number}/{copy}", cut)))
            asked = [request for _, _, request in witnesses] + self._strangers()
            self._dice.shuffle(asked)
            texts = {text.request_id: text for text in self.decode(asked)}
            for case, cut, request in witnesses:
                case.testify(cut, texts[request.name])

    def _strangers(self) -> list[Asked]:
        """Requests with random prompts."""
        vocab, most = self.reference.loaded.config.vocab_size, self.reference.scheduler_config.max_num_batched_tokens
        found = []
        for index in range(STRANGERS):
            prompt = [self._dice.randrange(vocab) for _ in range(self._dice.randint(1, most))]
            tokens = self._dice.randint(1, 16)
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            found.append(Asked(f"stranger/{index}", prompt, params))
        return found

    def to_json(self) -> dict[str, Any]:
        """JSON object of all figures."""
        verdicts = Counter(case.verdict for case in self.appeals)
        worst = sorted(self.appeals, key=lambda case: -case.margin)
        return {
            "compared": self.compared,
            "ties": self.ties,
            "tie_logits": self.tie_logits,
            "margin_at_differences_logits": _percentiles(self._margins),
            "shift_at_differences_logits": _percentiles(self._shifts),
            "appeals": {"heard": len(self.appeals), **verdicts},
            "appeals_of_largest_margin": [case.to_json() for case in worst[:10]],
        }


def is_half(engine: LLMEngine) -> bool:
    """Whether the model computes in half precision."""
    return engine.loaded.model.dtype.itemsize < 4


def _denied(case: Appeal) -> bool:
    return case.verdict == "denied"


def _fault(asked: Asked, at: int, known: dict[str, Any]) -> str:
    return f"{asked.name} differs from autoregressive decoding at token {at}: {_asked(asked) | known}"


def _asked(asked: Asked) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "repetition_penalty")
    return {"prompt_tokens": len(asked.prompt), **{name: getattr(asked.params, name) for name in names}}


def _onset(text: Text, expected: Text, at: int, scale: float) -> dict[str, Any]:
    """What margins before the token ``at`` tell of a fault: how far they moved at most, and where that began."""
    if text.margins is None or expected.margins is None or not at:
        return {}
    with np.errstate(invalid="ignore"):  # both infinite where filters left one token
        moved = np.nan_to_num(np.abs(text.margins[:at] - expected.margins[:at]) * scale, posinf=np.inf)
    far = np.flatnonzero(moved > max(10.0 * float(np.median(moved)), 1e-3))
    return {"moved_before_logits": float(moved.max()), "moved_since_token": int(far[0]) if len(far) else None}


def _percentiles(values: Sequence[float]) -> dict[str, float | int]:
    if not values:
        return {"n": 0}
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {"n": len(values), "p50": p50, "p90": p90, "p99": p99, "max": max(values)}
