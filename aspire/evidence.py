"""Evidence files: measured figures with what is needed to measure them again.

Format: ``{"meta": {command, commit, date, hardware, driver, torch, triton, clocks},
"results": [{id, value, unit, n, spread, detail}]}``.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from aspire.fileio import write_json_atomic


def _output_of(command: Sequence[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def package_version(name: str) -> str | None:
    """Installed version of distribution ``name``, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def current_commit() -> str | None:
    """Commit of this source tree, ``-dirty`` if it was changed. ``ASPIRE_COMMIT`` says it for a copy of a commit's
    files, which may lie inside another repository."""
    if given := os.environ.get("ASPIRE_COMMIT"):
        return given
    here = str(Path(__file__).resolve().parent)
    head = _output_of(["git", "-C", here, "rev-parse", "HEAD"])
    if head is None:
        return None
    dirty = _output_of(["git", "-C", here, "status", "--porcelain", "--untracked-files=no"])
    return f"{head}-dirty" if dirty else head


def provenance(command: str | None = None) -> dict[str, Any]:
    """What a reader needs to measure again: command, commit, date, hardware, driver, versions, clocks."""
    gpu = _output_of(["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"])
    fields = [part.strip() for part in gpu.splitlines()[0].split(",")] if gpu else []
    on_gpu = len(fields) == 4
    return {
        "command": command or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": current_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": fields[0] if on_gpu else f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "driver": fields[1] if on_gpu else None,
        "clocks": {"sm": fields[2], "memory": fields[3]} if on_gpu else None,
        "python": platform.python_version(),
        **{name: package_version(name) for name in ("torch", "triton", "transformers", "numpy")},
    }


def write_evidence(path: str | Path, results: Sequence[dict[str, Any]], *, command: str | None = None) -> Path:
    """Write an evidence file; each result holds at least ``id`` and ``value``."""
    return write_json_atomic(path, {"meta": provenance(command), "results": list(results)})
