"""The documents say what is: figures from evidence, files that exist, examples that run, commands that parse."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_table_agrees_with_the_evidence() -> None:
    command = [sys.executable, str(ROOT / "reports" / "make_readme_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_linked_and_named_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    if document.name == "map.md":
        named = re.findall(r"`((?:aspire|kernels|calibration|simulator|tests|reports|examples)/[\w./-]+)`", text)
        missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_simulation_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    (example,) = [block for block in blocks if "aspire_simulator" in block]
    paths = ":".join(str(ROOT / part) for part in (".", "kernels", "calibration", "simulator"))
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=120, env={"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


def test_commands_and_options_in_the_readme_exist() -> None:
    from aspire.cli.main import COMMANDS
    from tests.cli.helpers import run

    shell = "\n".join(re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL))
    used = [line.split() for line in shell.splitlines() if line.startswith("aspire ")]
    assert used
    for _, name, *words in used:
        assert name in COMMANDS
        help_text = run(name, "--help").out
        for option in (word for word in words if word.startswith("--")):
            assert option in help_text, (name, option)
