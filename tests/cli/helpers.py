"""Run `aspire` as a user does, in a process of its own, and in this process where speed matters."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "calibration", "simulator"))


@dataclass(frozen=True)
class Done:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        """Lines of stderr that report an error."""
        return [line for line in self.err.splitlines() if line.startswith("aspire: error: ")]


def run_process(*arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> Done:
    """`aspire` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **(env or {})}
    command = [sys.executable, "-m", "aspire", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment)
    return Done(done.returncode, done.stdout, done.stderr)


def run(*arguments: str | Path) -> Done:
    """`aspire` in this process: the same entry point, without the time to start Python and import torch."""
    from aspire.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else (0 if exit_.code is None else 1)
    return Done(code, out.getvalue(), err.getvalue())


def assert_one_error(done: Done, code: int, *parts: Sequence[str] | str) -> None:
    """Exit ``code``, exactly one error line that holds every part, no traceback, nothing on stdout."""
    assert done.code == code, (done.code, done.err)
    assert len(done.error_lines) == 1, done.err
    assert "Traceback" not in done.err
    assert done.out == ""
    for part in parts:
        assert str(part) in done.error_lines[0], (part, done.error_lines[0])
