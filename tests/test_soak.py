"""A few seconds of the soak that `make soak` runs for minutes, and faults that it must find."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from aspire import EngineConfig, LLMEngine, SamplingParams
from aspire.compare import Text
from tests.soak import Soak
from tests.soak_judge import BF16_TIE, COPIES, Asked, Judge

DTYPES = ["float32", "bfloat16"]


def _soak(dtype: str) -> Soak:
    """In bfloat16 every difference is heard: logits of the tiny model are of size 1, and so is its tie margin."""
    return Soak(seed=1, model="tiny-llama", dtype=dtype, tie_logits=None if dtype == "float32" else 0.0)


def _corrupt_pages(engine: LLMEngine) -> None:
    """From now on a page that a request holds is filled with other numbers before every step."""
    launch, dice = engine.runner.launch, np.random.default_rng(0)

    def corrupted(plan: Any, *rest: Any) -> Callable[[], Any]:
        page = int(dice.choice(np.flatnonzero(engine.scheduler.pages.owners)))
        engine.pool.values[0][page].normal_(std=3.0)
        return launch(plan, *rest)

    engine.runner.launch = corrupted  # type: ignore[method-assign]


def _mistake_tokens(engine: LLMEngine) -> None:
    """From now on the host reads one token of every tenth step wrong."""
    unpack, steps = engine.runner.unpack, 0

    def mistaken(*given: Any) -> Any:
        nonlocal steps
        result = unpack(*given)
        steps += 1
        if steps % 10 == 0 and len(result.tokens):
            result.tokens[0] = 3 + (result.tokens[0] + 1) % 100
        return result

    engine.runner.unpack = mistaken  # type: ignore[method-assign]


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_traffic_loses_and_changes_nothing(dtype: str) -> None:
    soak = _soak(dtype)
    for _ in range(2):
        soak.round(2.0)
    assert soak.problems == []
    ended = soak.counts["finished"] + soak.counts["aborted"] + soak.counts["rejected"]
    assert ended == soak.counts["submitted"] > 0
    assert soak.judge.compared == soak.counts["finished"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [_corrupt_pages, _mistake_tokens])
def test_a_fault_of_the_engine_is_found(fault: Callable[[LLMEngine], None], dtype: str) -> None:
    soak = _soak(dtype)
    fault(soak.engine)
    soak.round(0.5)
    assert soak.judge.problems, soak.judge.to_json()


class _ScriptedJudge(Judge):
    """Autoregressive runs give token 7, or 8 where rounding makes the gap, drawn anew each time, negative.

    The first ``alike`` copies, and those in steps that may hold more than ``fits`` tokens, are rounded alike.
    """

    def __init__(
        self, reference: LLMEngine, gap: float, rounding: float, *, alike: int = 0, fits: int | None = None
    ) -> None:
        super().__init__(reference, random.Random(0), BF16_TIE)
        self.first, self.alike, self.fits = gap, alike, fits
        self._gap, self._rounding, self._noise = gap, rounding, np.random.default_rng(0)

    def decode(self, requests: Iterable[Asked], widest: int | None = None) -> list[Text]:
        texts = []
        for request in requests:
            scale = 1 / request.logits_per_score
            copy = "/" in request.name and not request.name.startswith("stranger")
            alike = not copy or self.alike > 0 or (self.fits is not None and (widest is None or widest > self.fits))
            self.alike -= copy
            drawn = self.first if alike else self._noise.normal(self._gap, self._rounding)
            tokens = [5] * (request.params.max_tokens - 1) + [7 if drawn >= 0 else 8]
            margins = [9.0 * scale] * (len(tokens) - 1) + [abs(drawn) * scale]
            texts.append(Text(request.name, tokens, np.array(margins, dtype=np.float32)))
        return texts


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize(
    ("gap", "rounding", "ties", "verdict"),
    [
        (0.05, 0.0, 1, None),
        (0.4, 0.3, 0, "reproduced"),
        (0.4, 0.09, 0, "within spread"),
        (0.4, 0.02, 0, "denied"),
        (0.4, 0.0, 0, "denied"),
    ],
)
def test_an_appeal_measures_rounding(
    gap: float, rounding: float, ties: int, verdict: str | None, temperature: float, engine: LLMEngine
) -> None:
    judge = _ScriptedJudge(engine, gap, rounding)
    asked = Asked("r", [3, 4], SamplingParams(temperature=temperature, max_tokens=5))
    margins = np.array([9, 9, 9, 9, 0.1], dtype=np.float32) / asked.logits_per_score
    judge.check([(asked, Text("r", [5, 5, 5, 5, 8], margins))])
    assert judge.ties == ties
    assert [case.verdict for case in judge.appeals] == ([] if verdict is None else [verdict])
    assert len(judge.problems) == (verdict == "denied")
    assert judge.to_json()["shift_at_differences_logits"]["max"] == pytest.approx(gap + 0.1)


@pytest.mark.parametrize("how", [{"alike": sum(COPIES)}, {"fits": 30}])
@pytest.mark.parametrize(
    ("rounding", "verdict"), [(0.3, "reproduced"), (0.12, "within spread"), (0.02, "denied"), (0.0, "denied")]
)
def test_copies_that_were_rounded_alike_count_once(
    how: dict[str, int], rounding: float, verdict: str, engine: LLMEngine
) -> None:
    judge = _ScriptedJudge(engine, 0.4, rounding, **how)
    asked = Asked("r", [3, 4], SamplingParams(temperature=0.0, max_tokens=1))
    judge.check([(asked, Text("r", [8], np.array([0.1], dtype=np.float32)))])
    (case,) = judge.appeals
    assert case.verdict == verdict
    assert (len(case.gaps) > sum(COPIES)) >= ("alike" in how or rounding == 0.0)
    denied = judge.to_json()["denied"]
    assert [(each["prompt"], each["picked"], each["expected"]) for each in denied] == (
        [([3, 4], 8, 7)] if verdict == "denied" else []
    )


def test_copies_of_a_short_prompt_are_cut_and_in_steps_of_many_sizes() -> None:
    """Whole, in the largest steps, they would all be rounded alike: another kernel serves steps of few tokens."""
    limits = {"max_model_len": 2100, "max_num_seqs": 32, "max_num_batched_tokens": 2048, "num_pages": 4300}
    alone = {"async_scheduling": False, "enable_prefix_caching": False}
    reference = LLMEngine(EngineConfig(model="tiny-llama", load_format="dummy", dtype="bfloat16", **limits, **alone))
    schedule, sizes = reference.scheduler.schedule, []
    ends: list[int] = []  # prompt tokens that copies had computed after a step

    def recorded() -> Any:
        plan = schedule()
        if plan is not None:
            copies = [row for row, name in enumerate(plan.requests) if name.startswith("0/")]
            ends.extend((plan.start + plan.query_tokens)[copies].tolist())
            sizes.extend([plan.num_query_tokens] * len(copies))
        return plan

    reference.scheduler.schedule = recorded  # type: ignore[method-assign]
    judge = Judge(reference, random.Random(0), 0.0)
    asked = Asked("r", list(range(3, 20)), SamplingParams(temperature=0.0, max_tokens=1, detokenize=False))
    text = judge.decode([asked])[0]
    picked = 3 if text.token_ids[0] != 3 else 4
    judge.check([(asked, Text("r", [picked], np.array([9.0], dtype=np.float32)))])
    assert judge.appeals[0].verdict == "denied"
    assert len(set(ends) - {17}) >= 6
    assert (np.histogram(sizes, (1, 65, 257, 1025, 2049))[0] >= 10).all()


def test_a_text_that_ends_early_is_no_tie(engine: LLMEngine) -> None:
    judge = _ScriptedJudge(engine, 0.0, 0.0)
    asked = Asked("r", [3, 4], SamplingParams(max_tokens=5))
    judge.check([(asked, Text("r", [5, 5], np.full(2, 9, dtype=np.float32)))])
    assert len(judge.problems) == 1 and not judge.appeals


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    """In half precision, so that appeals are heard."""
    return _soak("bfloat16").engine
