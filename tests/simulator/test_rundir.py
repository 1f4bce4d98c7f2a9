"""Run directories: what is written is what is read, exactly, and nothing else is ever touched."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire.errors import InputError
from aspire.rundir import Run, directory_atomic, read_run, write_run
from aspire.runlog import PREFILL, ROW_COLUMNS, RequestTable, StepLog
from aspire.scheduler.features import FEATURES
from aspire_simulator.traces import detect_format
from tests.simulator.helpers import random_run


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(0, 60))
def test_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, seed: int, steps: int) -> None:
    run = random_run(np.random.default_rng(seed), steps)
    path = tmp_path_factory.mktemp("run") / "dir"
    write_run(path, run)
    again = read_run(path)
    assert again.config == run.config and again.meta == run.meta
    assert (again.steps.start_s == run.steps.start_s).all() and (again.steps.duration_s == run.steps.duration_s).all()
    assert (again.steps.features == run.steps.features).all() and (again.steps.row_end == run.steps.row_end).all()
    for name in ROW_COLUMNS:
        assert (again.steps.column(name) == run.steps.column(name)).all(), name
    np.testing.assert_array_equal(again.steps.margin, run.steps.margin)
    np.testing.assert_array_equal(again.requests.finish_s, run.requests.finish_s)
    assert again.requests.status == run.requests.status


def test_log_grows_beyond_its_first_allocation() -> None:
    run = random_run(np.random.default_rng(1), steps=3000, slots=16)
    assert len(run.steps) == 3000
    assert run.steps.num_rows == run.steps.row_end[-1] > 16384
    assert np.isnan(run.steps.margin[run.steps.column("mode") != 2]).all()
    assert not np.isnan(run.steps.margin[run.steps.column("mode") == 2]).any()


def test_old_run_directory_is_replaced_and_other_folders_are_not(tmp_path: Path) -> None:
    run = random_run(np.random.default_rng(2))
    write_run(tmp_path / "run", run)
    write_run(tmp_path / "run", Run({"policy": "second"}, run.requests, run.steps))
    assert read_run(tmp_path / "run").config == {"policy": "second"}
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"thesis\.txt"):
        write_run(tmp_path / "home", run)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "run"]


def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), directory_atomic(tmp_path / "run") as folder:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_broken_files_are_named_with_their_line(tmp_path: Path) -> None:
    run = random_run(np.random.default_rng(3))
    path = write_run(tmp_path / "run", run)
    lines = gzip.decompress((path / "steps.jsonl.gz").read_bytes()).decode().splitlines()
    lines[5] = lines[5][:20]
    (path / "steps.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    with pytest.raises(InputError, match="line 6"):
        read_run(path)
    (path / "requests.csv").write_text((path / "requests.csv").read_text().replace(",10,", ",ten,", 1))
    with pytest.raises(InputError, match="line 2"):
        read_run(path)
    with pytest.raises(InputError, match="does not exist"):
        read_run(tmp_path / "absent")


def test_a_folder_of_runs_is_told_from_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "bench" / "00", random_run(np.random.default_rng(0), steps=3))
    with pytest.raises(InputError, match=r"bench is a folder of runs; name one of them, or all: .*/bench/\*"):
        read_run(tmp_path / "bench")


def test_trace_is_chrome_json_and_bounded(tmp_path: Path) -> None:
    run = random_run(np.random.default_rng(4), steps=2000)
    path = write_run(tmp_path / "run", run, trace_events=500)
    trace = json.loads((path / "trace.json").read_text())
    events = trace["traceEvents"]
    assert 100 < len(events) < 520 and trace["otherData"]["steps_shown"] < 2000
    assert all(event["dur"] > 0 for event in events if event["ph"] == "X")


def test_empty_run_can_be_written(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", Run({}, RequestTable.empty(0), StepLog()))
    assert len(read_run(path).steps) == 0


def test_earlier_recordings_are_read_as_runs_and_as_traces(tmp_path: Path) -> None:
    run = random_run(np.random.default_rng(3), 20)
    folder = write_run(tmp_path / "run", run)
    table = folder / "requests.csv"
    lines = [line.split(",") for line in table.read_text(encoding="utf-8").splitlines()]
    dropped = lines[0].index("queued_s")
    table.write_text("\n".join(",".join(line[:dropped] + line[dropped + 1 :]) for line in lines), encoding="utf-8")
    again = read_run(folder).requests
    assert np.array_equal(again.queued_s, again.arrival_s)
    assert detect_format(folder) == "run"


def as_before_prefill_pairs(folder: Path) -> None:
    """Rewrites the steps of a run as releases did whose features told the attention of prompts in another way."""
    file = folder / "steps.jsonl.gz"
    header, *lines = (json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines())
    header["features"][FEATURES.index("prefill_pairs")] = "prefill_qkv"
    file.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in [header, *lines]).encode()))


def test_attention_of_prompts_is_counted_again_from_the_rows_of_earlier_recordings(tmp_path: Path) -> None:
    run = random_run(np.random.default_rng(5), 30)
    folder = write_run(tmp_path / "run", run)
    as_before_prefill_pairs(folder)
    steps, place = read_run(folder).steps, FEATURES.index("prefill_pairs")
    for step in range(len(steps)):
        rows = run.steps.rows_of(step)
        mode, query, context = (run.steps.column(name)[rows] for name in ("mode", "query_tokens", "context"))
        seen = [
            start + token + 1
            for start, tokens, of in zip(context.tolist(), query.tolist(), mode.tolist(), strict=True)
            for token in range(tokens)
            if of == PREFILL
        ]
        assert steps.features[step, place] == sum(seen)
    others = [index for index in range(len(FEATURES)) if index != place]
    assert (steps.features[:, others] == run.steps.features[:, others]).all()
    write_run(folder, run, rows=False)
    assert (read_run(folder).steps.features == run.steps.features).all()
    as_before_prefill_pairs(folder)
    with pytest.raises(InputError, match="without rows by an earlier release.*record the run again"):
        read_run(folder)
