"""Prefixes in the simulator: found as in the engine, by the same scheduler; recorded, replayed, read from traces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.rundir import read_run, write_run
from aspire.runlog import PREFILL
from aspire.scheduler import SchedulerConfig
from aspire.scheduler.prefix_links import names_from_links, shared_prefixes
from aspire_calibration import LoadedCostModel, analytic_model
from aspire_simulator.acceptance import Iid
from aspire_simulator.executor import simulate
from aspire_simulator.oracle import parse_policy
from aspire_simulator.replaying import replay
from aspire_simulator.scenario import Scenario
from aspire_simulator.traces import load_trace
from aspire_simulator.validation import validate_run
from aspire_simulator.workload import Workload
from tests.simulator.helpers import LinearCost

pytestmark = pytest.mark.usefixtures("short_prefixes_are_waited_for")

CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024, num_pages=300, watermark=0.0)


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=9))
def test_links_say_what_names_say(chains: list[list[int]]) -> None:
    """Chained names: a block is named after everything before it."""
    names = [[hash(tuple(chain[: place + 1])) for place in range(len(chain))] for chain in chains]
    prefix_of, tokens = shared_prefixes(names)
    again = names_from_links(prefix_of, tokens, np.array([16 * len(chain) for chain in chains], dtype=np.int64))
    for one in range(len(chains)):
        assert len(again[one]) == len(chains[one])
        for other in range(len(chains)):
            for place in range(min(len(chains[one]), len(chains[other]))):
                same = names[one][place] == names[other][place]
                assert (again[one][place] == again[other][place]) is same


def family(count: int, prefix: int = 320, tail: int = 40, output: int = 20, gap_s: float = 0.0) -> Workload:
    parents = np.full(count, 0)
    parents[0] = -1
    shared = np.where(parents < 0, 0, prefix)
    lengths = np.full(count, prefix + tail)
    return Workload("family", np.arange(count) * gap_s, lengths, np.full(count, output), parents, shared)


def test_a_common_prefix_is_prefilled_once() -> None:
    for gap_s in (0.0, 0.01, 10.0):
        run = simulate(family(12, gap_s=gap_s), parse_policy("fixed:g=3"), LinearCost(), Iid(0.8), CONFIG)
        log = run.steps
        assert log.column("query_tokens")[log.column("mode") == PREFILL].sum() == 360 + 11 * 40
        assert run.requests.cached_tokens.tolist() == [0] + [320] * 11
        off = replace(CONFIG, enable_prefix_caching=False)
        cold = simulate(family(12, gap_s=gap_s), parse_policy("fixed:g=3"), LinearCost(), Iid(0.8), off)
        assert cold.requests.cached_tokens.sum() == 0
        assert run.requests.first_token_s[1:].mean() < cold.requests.first_token_s[1:].mean()


def test_a_run_with_prefixes_is_written_read_and_replayed(tmp_path: Path) -> None:
    for pages in (60, 300):
        config = replace(CONFIG, num_pages=pages)
        run = simulate(family(12, gap_s=0.002), parse_policy("fixed:g=3"), LinearCost(), Iid(0.8), config)
        again = read_run(write_run(tmp_path / str(pages), run))
        assert again.requests.prefix_of.tolist() == [-1] + [0] * 11
        assert again.requests.cached_tokens.tolist() == run.requests.cached_tokens.tolist()
        report = replay(again, LinearCost())
        assert report.equal_share == 1.0, report.difference
        work = load_trace(tmp_path / str(pages))
        assert work.prefix_tokens is not None and work.prefix_tokens.tolist() == [0] + [320] * 11


def test_a_recorded_run_is_simulated_with_its_prefixes(tmp_path: Path) -> None:
    model = LoadedCostModel(analytic_model("h200", "smollm2-135m"))
    run = simulate(family(12, gap_s=0.002), parse_policy("fixed:g=3"), model, Iid(0.8), CONFIG)
    check = validate_run(write_run(tmp_path / "run", run))
    assert check.composition.equal_share == 1.0 and check.passed, check.to_dict()
    assert all(abs(one.simulated / one.measured - 1) < 1e-6 for one in check.comparisons)


def test_the_flag_of_a_scenario_turns_it_off(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
    path.write_text("\n".join([json.dumps(line)] * 4), encoding="utf-8")
    scenario = Scenario("analytic:h200:smollm2-135m", dataset_path=str(path))
    found, cold = scenario.run().summary, scenario.with_(enable_prefix_caching=False).run().summary
    assert found["total_cached_tokens"] == 3 * 1088 and cold["total_cached_tokens"] == 0
    assert found["mean_ttft_ms"] < cold["mean_ttft_ms"]


def test_a_mooncake_trace_tells_with_whom_a_prefix_is_shared(tmp_path: Path) -> None:
    blocks = [[1, 2, 3], [9], [1, 2, 7, 8], [1, 2, 7, 8, 5], [9, 4]]
    lines = [
        {"timestamp": 1000 * index, "input_length": 512 * len(ids) - 100, "output_length": 5, "hash_ids": ids}
        for index, ids in enumerate(blocks)
    ]
    lines.insert(1, {"timestamp": 500, "input_length": 0, "output_length": 5, "hash_ids": [1]})  # dropped
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    work = load_trace(path)
    assert work.prefix_of is not None and work.prefix_tokens is not None
    assert work.prefix_of.tolist() == [-1, -1, 0, 2, 1]
    assert work.prefix_tokens.tolist() == [0, 0, 1024, 2048, 512]
    kept = work.take(np.array([1, 2, 3]))
    assert kept.prefix_of is not None and kept.prefix_tokens is not None
    assert kept.prefix_of.tolist() == [-1, -1, 1] and kept.prefix_tokens.tolist() == [0, 0, 2048]
