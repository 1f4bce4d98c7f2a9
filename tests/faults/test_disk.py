"""A disk that is full, or an output that is no file."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.cli.helpers import assert_one_error, run
from tests.faults.helpers import TINY, random_prompts, start, texts

FULL = Path("/dev/full")
WORK = ["generate", *TINY, *random_prompts(3)]
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


@needs_full
def test_a_full_disk_under_the_outputs() -> None:
    done = run(*WORK, "-q", "-o", FULL)
    assert_one_error(done, 1, "cannot append to /dev/full: No space left on device; free space or choose another")


@needs_full
def test_a_full_disk_under_stdout() -> None:
    with FULL.open("w") as stream:
        process = start(*WORK, "-q", stdout=stream)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert [line for line in err.splitlines() if line.startswith("aspire: error: ")] == [
        "aspire: error: cannot write to stdout: No space left on device; free space or send it elsewhere"
    ]
    assert "Traceback" not in err and "Exception ignored" not in err


def test_outputs_may_go_to_a_pipe_or_device() -> None:
    process = start(*WORK, "-q", "-o", "/dev/stdout")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert sorted(json.loads(line)["id"] for line in out.splitlines()) == ["prompt-0", "prompt-1", "prompt-2"]


def test_a_disk_that_fills_while_the_run_directory_is_written(tmp_path: Path) -> None:
    def little_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))

    process = start(*WORK, "-q", "--output-dir", tmp_path / "run", preexec_fn=little_room)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    errors = [line for line in err.splitlines() if line.startswith("aspire: error: ")]
    assert len(errors) == 1 and "cannot write" in errors[0] and "free space or choose another path" in errors[0]
    assert "Traceback" not in err and list(tmp_path.iterdir()) == [], "something half-written is left"


def test_a_disk_that_fills_among_the_outputs_keeps_whole_lines(tmp_path: Path) -> None:
    output = tmp_path / "outputs.jsonl"
    assert run(*WORK, "-q", "-o", tmp_path / "whole.jsonl").code == 0
    room = len((tmp_path / "whole.jsonl").read_bytes()) - 40

    def little_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    process = start(*WORK, "-q", "-o", output, preexec_fn=little_room)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "cannot append to" in err and "Traceback" not in err
    done = run(*WORK, "-q", "-o", output, "--resume")
    assert done.code == 0, done.err
    assert texts(output) == texts(tmp_path / "whole.jsonl")
