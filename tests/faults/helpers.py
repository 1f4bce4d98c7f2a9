"""A tiny model behind the command line, and processes that are interrupted in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.helpers import PATH

TINY = ["--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--max-num-seqs", "4"]
TINY += ["--max-model-len", "512", "--max-num-batched-tokens", "256"]


def random_prompts(count: int, input_len: int = 20, output_len: int = 16) -> list[str]:
    """Options for ``count`` random prompts, none of which ends early."""
    lengths = ["--input-len", str(input_len), "--output-len", str(output_len), "--ignore-eos"]
    return ["--dataset-name", "random", "--num-prompts", str(count), *lengths]


def prompt_file(folder: Path, *lines: Any) -> Path:
    """A JSONL file; a line that is bytes or text is written as it is, anything else as JSON."""
    raw = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path = folder / "prompts.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def records(path: Path) -> dict[str, dict[str, Any]]:
    """The records of an output file by id; every line must be whole, and every id there once."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {record["id"]: record for record in lines}
    assert len(found) == len(lines), "a request was written twice"
    return found


def texts(path: Path) -> dict[str, list[int]]:
    """Output tokens by request id."""
    return {name: record["token_ids"] for name, record in records(path).items()}


def start(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """`aspire` in a process that the test goes on without."""
    environment = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "aspire", *map(str, arguments)]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, **options}
    return subprocess.Popen(command, text=True, env=environment, **pipes)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    """Wait until ``condition`` holds; fail when the process ended before or time is up."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.01)


def written(path: Path) -> bool:
    """Whether ``path`` holds anything: a file is there before its first line is."""
    return path.exists() and path.stat().st_size > 0
