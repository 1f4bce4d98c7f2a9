"""The pace of a batch: steps priced together count as one by one, and promises are held against what came of them."""

from __future__ import annotations

import numpy as np
import pytest

from aspire.scheduler import Feedback, StepFeatures
from aspire.scheduler.policies.pace import Pace
from tests.simulator.helpers import LinearCost

MODEL = LinearCost(base=1e-3, token=1e-6, kv=1e-8)
ROWS = 8


def step(drafted: int, *, verifies: bool, seconds: float = np.nan, prompt: float = 0.0) -> Feedback:
    rows = float(ROWS)
    features = StepFeatures.of(
        rows=rows + (prompt > 0),
        query_tokens=(rows * (drafted + 1) if verifies else rows) + prompt,
        draft_rows=0.0 if verifies else rows,
        verify_rows=rows if verifies else 0.0,
        full_kv_tokens=rows * 4000.0 if verifies else 0.0,
        sparse_kv_tokens=0.0 if verifies else rows * 512.0,
        prefill_tokens=prompt,
        prefill_pairs=prompt * (prompt + 1) / 2,
    )
    return Feedback(
        slots=np.arange(ROWS),
        verified=np.full(ROWS, verifies),
        drafted=np.full(ROWS, drafted),
        accepted=np.full(ROWS, drafted if verifies else 0),
        margin=np.full(ROWS, np.nan),
        features=features,
        seconds=seconds,
    )


def pace(promise: float = 1.0, *, together: bool = False) -> Pace:
    made = Pace(window_tokens=6000.0)
    made.reprice(MODEL, ROWS / float(MODEL.predict(step(0, verifies=True).features)), promise, together=together)
    made.start(1.5, ROWS)
    return made


def test_steps_priced_together_count_as_one_by_one() -> None:
    now_and_then, at_once = pace(), pace()
    for index in range(40):
        seconds = 1.2e-3 * (1.0 + 0.1 * (index % 3))
        done = step(index % 4, verifies=index % 4 == 3, seconds=seconds, prompt=50.0 * (index % 5 == 0))
        tokens = ROWS * 4.0 if index % 4 == 3 else 0.0
        now_and_then.observe(done, tokens)
        at_once.observe(done, tokens)
        at_once.now()
    assert now_and_then.now() == pytest.approx(at_once.now(), rel=1e-12) and at_once.now() > 1.0


def test_plain_decoding_has_the_pace_one_whatever_the_machine() -> None:
    for stretch in (0.5, 1.0, 3.0):
        mine, done = pace(), step(0, verifies=True)
        for _ in range(4000):
            mine.observe(step(0, verifies=True, seconds=stretch * float(MODEL.predict(done.features))), float(ROWS))
        assert mine.now() == pytest.approx(1.0, abs=0.01)


def test_broken_promises_are_remembered_and_forgiven() -> None:
    mine = pace(promise=3.0, together=True)
    assert mine.kept == 1.0
    for _ in range(100):
        mine.observe(step(0, verifies=False), 0.0)
        mine.observe(step(1, verifies=True), float(ROWS))  # a draft each, none of them right
    mine.now()
    assert 0.1 < mine.kept < 0.5
    low = mine.kept
    for steps in (200, 20_000):
        for _ in range(steps):
            mine.observe(step(0, verifies=True), float(ROWS))
        mine.now()
        assert mine.kept > low
    assert mine.kept > 0.85
