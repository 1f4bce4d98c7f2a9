"""The pure core imports where torch, transformers and triton are not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

_BLOCKER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (hidden by the test)", name=name)
sys.meta_path.insert(0, Absent())
sys.path[:0] = {path!r}
"""


def _run_without(hidden: list[str], code: str) -> subprocess.CompletedProcess[str]:
    path = [entry for entry in sys.path if entry]
    script = _BLOCKER.format(hidden=hidden, path=path) + code
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)


_CORE = ["aspire", "aspire.scheduler", "aspire_simulator", "aspire_calibration", "aspire.cli.main"]


@pytest.mark.parametrize("module", _CORE)
def test_core_imports_without_torch(module: str) -> None:
    done = _run_without(["torch", "transformers", "triton", "tokenizers", "safetensors"], f"import {module}")
    assert done.returncode == 0, done.stderr


def test_scheduler_needs_neither_torch_nor_simpy_nor_scipy() -> None:
    hidden = ["torch", "transformers", "triton", "simpy", "scipy", "matplotlib", "typer", "rich"]
    done = _run_without(hidden, "import aspire.scheduler")
    assert done.returncode == 0, done.stderr


def test_cli_help_does_not_import_torch() -> None:
    code = """
from aspire.cli.main import main
try:
    main(["--help"])
except SystemExit as done:
    assert not done.code, done.code
heavy = {"torch", "transformers", "scipy", "simpy", "matplotlib", "optuna", "ray"} & set(sys.modules)
assert not heavy, heavy
"""
    done = _run_without([], code)
    assert done.returncode == 0, done.stderr
