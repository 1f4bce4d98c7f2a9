"""Workloads and traces."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire.errors import InputError, UsageError
from aspire.rundir import write_run
from aspire_simulator.traces import detect_format, load_trace
from aspire_simulator.workload import Workload, arrivals, lengths, synthetic, trace_stats
from tests.simulator.helpers import random_run, real_data


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 300),
    rate=st.one_of(st.just(math.inf), st.floats(0.1, 1e4)),
    burst=st.floats(0.05, 20),
    seed=st.integers(0, 1000),
    kind=st.sampled_from(
        ["7", "fixed:300", "uniform:5:90", "lognormal:400:1.5:2000", "zipf:1.3:16:4096", "zipf:1:2:9"]
    ),
)
def test_synthetic_is_ordered_positive_and_repeatable(
    count: int, rate: float, burst: float, seed: int, kind: str
) -> None:
    made = [synthetic(count, kind, kind, request_rate=rate, burstiness=burst, seed=seed) for _ in range(2)]
    work = made[0]
    assert len(work) == count and (np.diff(work.arrival_s) >= 0).all() and work.arrival_s[0] == 0
    assert work.prompt_tokens.min() >= 1 and work.output_tokens.min() >= 1
    assert (work.arrival_s == made[1].arrival_s).all() and (work.prompt_tokens == made[1].prompt_tokens).all()


def test_arrivals_have_the_rate_and_burstiness_asked_for() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        made = arrivals(20_000, 5.0, burstiness, seed=3)
        stats = trace_stats(Workload("w", made, np.ones(20_000, int), np.ones(20_000, int)))
        assert stats["request_rate"] == pytest.approx(5.0, rel=0.06)
        assert stats["burstiness"] == pytest.approx(burstiness, rel=0.1)


def test_lengths_have_the_mean_asked_for() -> None:
    assert lengths("lognormal:1000:0.5", 20_000).mean() == pytest.approx(1000, rel=0.03)
    assert lengths(64, 3).tolist() == [64, 64, 64]


@pytest.mark.parametrize(
    "bad", ["gauss:1", "fixed:0", "uniform:9:5", "lognormal:100", "fixed:x", "zipf:1:2", "uniform:1:2:3"]
)
def test_bad_length_specs(bad: str) -> None:
    with pytest.raises(UsageError):
        lengths(bad, 3)


def test_scaling() -> None:
    work = synthetic(10, 100, 10, request_rate=2.0).scaled(time_scale=0.5, length_scale=0.1, limit=4)
    assert len(work) == 4 and work.prompt_tokens.tolist() == [10] * 4 and work.output_tokens.tolist() == [1] * 4
    for bad in ({"time_scale": 0.0}, {"length_scale": -1.0}, {"limit": 0}):
        with pytest.raises(UsageError):
            work.scaled(**bad)  # type: ignore[arg-type]


SAMPLES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.5+00:00,7,1\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,C\n6,GPT-4,9,0,9,C\n45,GPT-4,10,20,30,C\n",
    "vidur": ",num_prefill_tokens,num_decode_tokens,pd_ratio\n0,2500.0,4,6.2\n1,12,30,0.4\n",
    "mooncake": '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}\n'
    '{"timestamp": 2500, "input_length": 1300, "output_length": 7, "hash_ids": [1, 2, 9]}\n',
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_formats_are_detected_from_content(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace.dat"
    path.write_text(SAMPLES[kind])
    assert detect_format(path) == kind
    work = load_trace(path)
    assert len(work) == 2 and work.arrival_s[0] == 0
    spans = {"azure": 1.49007, "burstgpt": 40.0, "vidur": 0.0, "mooncake": 2.5}
    assert work.arrival_s[1] == pytest.approx(spans[kind], abs=1e-5)
    assert work.detail["dropped"] == (kind == "burstgpt")
    if kind == "mooncake":
        assert work.prefix_tokens is not None and work.prefix_tokens.tolist() == [0, 1024]


def test_own_run_directory_is_a_trace(tmp_path: Path) -> None:
    run = random_run(np.random.default_rng(5))
    run.requests.output_tokens[:] = 4
    write_run(tmp_path / "run", run)
    assert load_trace(tmp_path / "run").output_tokens.tolist() == [4] * 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("hello\n", "line 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.1,5,5\n2023-11-16 18:17:04,x,5\n", "line 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.1,5\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.1,-5,5\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\n{"timestamp": 0}\n', "line 2"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\n{"time\n', "line 2"),
        ('{"input": 5}\n', "line 1"),
    ],
)
def test_bad_traces_are_named_by_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        load_trace(path)


def test_missing_trace(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("name", "rows", "mean_output"),
    [
        ("azure_code_2023.csv", 8819, 27.9),
        ("azure_conv_2023.csv", 19366, 211),
        ("mooncake_conversation.jsonl", 12031, 343),
    ],
)
def test_real_traces(name: str, rows: int, mean_output: float) -> None:
    work = load_trace(real_data(name))
    assert len(work) == rows and work.output_tokens.mean() == pytest.approx(mean_output, rel=0.01)
    stats = trace_stats(work)
    assert stats["burstiness"] < 0.1 if "code" in name else stats["burstiness"] > 0.1
    assert len(json.dumps(stats)) > 10
