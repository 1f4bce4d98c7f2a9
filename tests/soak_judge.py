"""Is an output of the soak what autoregressive decoding gives? In half precision: measured, not guessed.

Scores are ``logits / T + noise`` and rounding acts on logits, so all margins here are in logits: times T where T > 0.
Where two texts part, the gap between the two tokens has moved from one sign to the other. A move within ``tie_logits``
is a tie. Everything else is an *appeal*: the token is decoded again from a cold start, many times, each time beside
other requests and strangers' prompts, with another share of the output before it computed as prompt. No copy drafts or
shares pages, so copies differ in rounding alone. What rounds a row is the size of its step (few tokens go through one
kernel, many through others) and the rows of its own request beside it. So every step has a budget of its own, drawn at
random: steps are of all sizes, and a prompt is cut wherever a budget ends. If a copy picks the disputed token, the two
are a tie. That happens in float32, too: the last token that top-p keeps (one of thousands, where a text has lost its
thread) comes and goes with the last bits, whatever its score. In half precision they are a tie also where the gap's
mean is within ``SPREADS`` of its own standard deviations from 0. Copies that agree to the last bit were rounded alike
and count once; while too few differ, more are heard. Else the speculating engine is at fault.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from aspire import LLMEngine, SamplingParams
from aspire.compare import Difference, Text, compare

BF16_TIE = 0.25  # two steps of bfloat16 between 16 and 32, where the best logits of real models lie
SPREADS = 5.0
COPIES = (2, 4, 8, 16, 16, 16)  # of a disputed token by round, until one decides
MORE_COPIES = (16,) * 8  # where fewer than LEAST_GAPS of them differed, in FEW cases: many are no rounding
FEW = 4
STRANGERS = 12  # requests beside the copies at most
LEAST_GAPS = 4  # that differ; fewer say nothing of a spread
REPLAYS = 5  # denied cases written in full, to be decoded again


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
    def distinct(self) -> list[float]:
        """Gaps of copies that were rounded differently."""
        return sorted(set(self.gaps))

    @property
    def measured(self) -> bool:
        """Whether enough copies differed to tell what rounding does to this gap."""
        return len(self.distinct) >= LEAST_GAPS

    @property
    def verdict(self) -> str:
        """``reproduced``, ``within spread`` or ``denied``."""
        if self.reproduced:
            return "reproduced"
        tie = self.half and self.measured and np.mean(self.distinct) <= SPREADS * np.std(self.distinct, ddof=1)
        return "within spread" if tie else "denied"

    def replay(self) -> dict[str, Any]:
        """JSON object of all that is needed to decode the token again."""
        return {
            "request": self.asked.name,
            "params": asdict(self.asked.params),
            "prompt": self.asked.prompt,
            "output_before": self.common,
            "picked": self.picked,
            "expected": self.expected,
        }

    def to_json(self) -> dict[str, Any]:
        """JSON object of the case; mean and deviation are those of the distinct gaps."""
        distinct = self.distinct
        spread = float(np.std(distinct, ddof=1)) if len(distinct) > 1 else None
        return {
            "request": self.asked.name,
            "position": len(self.common),
            **_asked(self.asked),
            "margin_logits": self.margin,
            "shift_logits": self.shift,
            "copies_heard": len(self.gaps),
            "distinct_gaps": len(distinct),
            "gap_mean_logits": float(np.mean(distinct)) if distinct else None,
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

    def decode(self, requests: Iterable[Asked], widest: int | None = None) -> list[Text]:
        """Outputs and margins of autoregressive decoding, all requests at once, from a cold start.

        ``widest``: every step has a token budget drawn anew, of at most so many.
        """
        self.reference.begin_record(margins=True)
        names, outputs = [], {}
        for request in requests:
            names.append(request.name)
            self.reference.add_request(request.name, request.prompt, request.params)
        limits, scheduler = self.reference.scheduler_config, self.reference.scheduler
        while self.reference.has_unfinished_requests:
            if widest is not None:
                budget = self._between(limits.max_num_seqs, widest)
                scheduler.config = replace(limits, max_num_batched_tokens=budget)
            for output in self.reference.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        scheduler.config = limits
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
        limits = self.reference.scheduler_config
        for number, copies in enumerate(COPIES + MORE_COPIES):
            cases = [case for case in cases if not case.reproduced]
            if number >= len(COPIES):
                cases = [case for case in cases if case.half and not case.measured]
                if len(cases) > FEW:
                    return
            if not cases:
                return
            witnesses = []
            for place, case in enumerate(cases):
                for copy in range(copies):
                    cut = self._dice.randrange(len(case.common) + 1)
                    witnesses.append((case, cut, case.copy(f"{place}/{copy}", cut)))
            widest = limits.max_num_batched_tokens
            if number % 2 == 0:  # else few copies of a short prompt would be cut
                widest = self._between(limits.max_num_seqs, widest)
            asked = [request for _, _, request in witnesses] + self._strangers(widest)
            self._dice.shuffle(asked)
            texts = {text.request_id: text for text in self.decode(asked, widest)}
            for case, cut, request in witnesses:
                case.testify(cut, texts[request.name])

    def _between(self, least: int, most: int) -> int:
        """A random number of any order of magnitude between these."""
        return min(most, int(least * ((most + 1) / least) ** self._dice.random()))

    def _strangers(self, longest: int) -> list[Asked]:
        """Requests with random prompts of up to ``longest`` tokens; sometimes none."""
        vocab = self.reference.loaded.config.vocab_size
        found = []
        for index in range(self._dice.randint(0, STRANGERS)):
            prompt = [self._dice.randrange(vocab) for _ in range(self._dice.randint(1, longest))]
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
            "denied": [case.replay() for case in worst if _denied(case)][:REPLAYS],
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
