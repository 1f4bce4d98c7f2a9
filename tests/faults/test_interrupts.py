"""Runs that are killed, interrupted once or twice: what was finished is on disk, whole, and can be continued."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.cli.helpers import run
from tests.faults.helpers import TINY, random_prompts, records, start, texts, wait_for, written

COUNT, TOKENS = 16, 160
WORK = ["generate", *TINY, *random_prompts(COUNT, 20, TOKENS), "--policy", "fixed:g=3"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """The outputs of a run that nothing disturbs."""
    path = tmp_path_factory.mktemp("whole") / "outputs.jsonl"
    assert run(*WORK, "-q", "-o", path).code == 0
    return texts(path)


def resumes(output: Path, whole: dict[str, list[int]]) -> None:
    done = run(*WORK, "-q", "-o", output, "--resume")
    assert done.code == 0, done.err
    assert texts(output) == whole


def test_a_killed_run_keeps_what_it_finished_and_is_continued(tmp_path: Path, whole: dict[str, list[int]]) -> None:
    output = tmp_path / "outputs.jsonl"
    process = start(*WORK, "-o", output)
    wait_for(lambda: written(output), process)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    lines = output.read_bytes().splitlines(keepends=True)
    assert 1 <= len(lines) < COUNT
    with output.open("ab") as stream:
        stream.write(b'{"id": "prompt-15", "tok')  # killed in the middle of a line
    resumes(output, whole)


def test_the_first_interrupt_finishes_what_runs(tmp_path: Path, whole: dict[str, list[int]]) -> None:
    output = tmp_path / "outputs.jsonl"
    process = start(*WORK, "-o", output, "--output-dir", tmp_path / "run")
    wait_for(lambda: written(output), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "aspire: warning: interrupted: finishing what runs, then writing; interrupt again to stop now" in err
    assert "requests did not finish; run again with --resume" in err and "Traceback" not in err
    kept = records(output)
    assert 4 <= len(kept) < COUNT and all(len(record["token_ids"]) == TOKENS for record in kept.values())
    assert (tmp_path / "run" / "summary.json").is_file()
    resumes(output, whole)


def test_the_second_interrupt_stops_now(tmp_path: Path, whole: dict[str, list[int]]) -> None:
    output = tmp_path / "outputs.jsonl"
    long = ["generate", *TINY, *random_prompts(COUNT, 20, 480), "--policy", "fixed:g=3"]
    process = start(*long, "-o", output, "--output-dir", tmp_path / "run")
    wait_for(lambda: written(output), process)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    said = ""
    while "interrupted: finishing" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGINT)
    err = process.stderr.read()
    assert process.wait(timeout=60) == 130, err
    assert err.splitlines()[-1] == "aspire: error: interrupted; what was finished is on disk"
    assert "Traceback" not in err and not (tmp_path / "run").exists()
    kept = records(output)
    assert 1 <= len(kept) < COUNT and all(len(record["token_ids"]) == 480 for record in kept.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outputs.jsonl"], "something half-written is left"
