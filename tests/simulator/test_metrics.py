"""Metrics: small cases worked by hand, and what must hold for any run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire.errors import UsageError
from aspire.rundir import Run
from aspire.runlog import RequestTable, StepLog
from aspire.scheduler.features import FEATURES
from aspire_simulator.metrics import acceptance, latencies, meets, oracle_gap, parse_goodput, summarize, throughput
from tests.simulator.helpers import random_run

ZERO = np.zeros(len(FEATURES))


def step(log: StepLog, start: float, seconds: float, *rows: tuple[int, int, int, int, int]) -> None:
    """rows: (request, mode, drafted, accepted, committed)"""
    request, mode, drafted, accepted, committed = (np.array(column) for column in zip(*rows, strict=True))
    log.append(
        start, seconds, ZERO, slot=request, request=request, mode=mode, query_tokens=1, context=0,
        drafted=drafted, accepted=accepted, committed=committed, finished=0,
    )  # fmt: skip


@pytest.fixture
def by_hand() -> Run:
    log = StepLog()
    step(log, 1.0, 1.0, (0, 1, 0, 0, 1))  # prefill of request 0 gives its first token at 2.0
    step(log, 2.0, 0.5, (0, 2, 0, 0, 0), (1, 1, 0, 0, 1))  # draft beside the prefill of request 1: first token at 2.5
    step(log, 2.5, 0.5, (0, 2, 1, 0, 0), (1, 3, 0, 0, 1))
    step(log, 3.0, 1.0, (0, 3, 2, 1, 2), (1, 3, 0, 0, 1))  # 1 of 2 drafts accepted
    table = RequestTable.empty(2)
    table.arrival_s[:] = (0.5, 1.0)
    table.prompt_tokens[:] = 8
    table.output_tokens[:] = (3, 3)
    table.finish_s[:] = 4.0
    return Run({"kv_bytes_per_token": 2}, table, log)


def test_by_hand(by_hand: Run) -> None:
    found = latencies(by_hand.requests, by_hand.steps)
    np.testing.assert_allclose(found.ttft_s, [1.5, 1.5])
    np.testing.assert_allclose(found.tpot_s, [1.0, 0.75])
    np.testing.assert_allclose(found.itl_chunk_s, [2.0, 0.5, 1.0])
    np.testing.assert_allclose(found.itl_token_s, [1.0, 1.0, 0.5, 1.0])
    rates = throughput(by_hand.steps)
    assert rates["decode_only_throughput"] == pytest.approx(4 / 1.5)
    assert rates["decode_only_share"] == pytest.approx(4 / 6)
    seen = acceptance(by_hand.steps)
    assert seen["acceptance_length"] == 2.0 and seen["acceptance_rate"] == 0.5 and seen["wasted_drafts"] == 1
    assert seen["acceptance_by_position"] == [1.0, 0.0]
    summary = summarize(by_hand, goodput=parse_goodput("tpot:800"))
    assert summary["goodput_share"] == 0.5 and summary["request_goodput"] == pytest.approx(1 / 3.5)
    assert summary["output_throughput"] == pytest.approx(6 / 3.5)
    assert sum(summary["phase_mix"].values()) == pytest.approx(1.0)


def test_full_batch_counts_the_steps_that_requests_sit_out() -> None:
    """Two requests share common rounds, in which the second waits while the first drafts on."""
    log = StepLog()
    step(log, 0.0, 1.0, (0, 1, 0, 0, 1), (1, 1, 0, 0, 1))
    step(log, 1.0, 0.5, (0, 2, 0, 0, 0), (1, 2, 0, 0, 0))
    step(log, 1.5, 0.5, (0, 2, 1, 0, 0))
    step(log, 2.0, 1.0, (0, 3, 2, 2, 3), (1, 3, 1, 0, 1))
    step(log, 3.0, 1.0, (0, 3, 0, 0, 1))  # alone: the tail
    found = throughput(log)
    assert found["full_batch_throughput"] == pytest.approx(4 / 2.0) and found["full_batch_time_s"] == 2.0
    assert found["decode_only_throughput"] == pytest.approx(5 / 3.0)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_run(seed: int) -> None:
    run = random_run(np.random.default_rng(seed))
    summary = summarize(run)
    assert summary["total_output_tokens"] == run.steps.column("committed").sum()
    found = latencies(run.requests, run.steps)
    # per-token gaps add up to the chunk gaps; both to last minus first token
    assert found.itl_token_s.sum() == pytest.approx(found.itl_chunk_s.sum())
    seen = acceptance(run.steps)
    if seen["rounds"]:
        by_position, denominators = seen["acceptance_by_position"], seen["rounds_by_position"]
        assert all(0 <= rate <= 1 for rate in by_position)
        # survival times rounds counts accepted tokens
        assert np.dot(by_position, denominators) == pytest.approx(seen["accepted_tokens"])
        assert denominators[0] == seen["rounds"] and sorted(denominators, reverse=True) == denominators


def test_acceptance_by_position_counts_rounds_that_drafted_that_far() -> None:
    log = StepLog()
    step(log, 0.0, 1.0, (0, 3, 1, 1, 2), (1, 3, 3, 3, 4), (2, 3, 3, 1, 2))
    seen = acceptance(log)
    assert seen["rounds_by_position"] == [3, 2, 2]
    assert seen["acceptance_by_position"] == [1.0, 0.5, 0.5]
    assert seen["conditional_acceptance_by_position"] == [1.0, 0.5, 1.0]


def test_goodput_text() -> None:
    assert parse_goodput("ttft:500 tpot:50") == {"ttft": 0.5, "tpot": 0.05}
    for bad in ("ttft", "ttft:-1", "tptt:5", "ttft:x"):
        with pytest.raises(UsageError):
            parse_goodput(bad)


def test_one_token_requests_meet_a_tpot_limit(by_hand: Run) -> None:
    found = latencies(by_hand.requests, by_hand.steps)
    found.tpot_s[0] = np.nan
    assert meets({"tpot": 0.8}, found).tolist() == [True, True]


def test_oracle_gap() -> None:
    assert oracle_gap(80.0, 100.0) == pytest.approx(0.2)
    with pytest.raises(UsageError):
        oracle_gap(1.0, 0.0)
