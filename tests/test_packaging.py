"""What is in the source tree is in the distribution: packages, data files, pins for every dependency."""

from __future__ import annotations

import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("tomllib comes with Python 3.11", allow_module_level=True)
import tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ROOTS = {name: ROOT / folder for name, folder in PROJECT["tool"]["setuptools"]["package-dir"].items()}


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


@pytest.mark.parametrize("name", ROOTS)
def test_every_folder_with_code_is_a_package(name: str) -> None:
    folders = {path.parent for path in _files(ROOTS[name]) if path.suffix == ".py"}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("name", ROOTS)
def test_every_data_file_is_package_data(name: str) -> None:
    declared = PROJECT["tool"]["setuptools"]["package-data"]
    patterns = [*declared["*"], *declared.get(name, [])]
    data = [path for path in _files(ROOTS[name]) if path.suffix != ".py"]
    left_out = [p for p in data if not any(fnmatch(p.name, pattern.rpartition("/")[2]) for pattern in patterns)]
    assert left_out == []


def test_every_dependency_is_pinned_without_local_versions() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+(; python_version [<>]=? \"3\.\d+\")?", line) for line in lines)
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["engine"], *extras["tune"], *extras["dev"]]
    names = {re.match(r"[\w-]+", item)[0].lower().replace("_", "-") for item in wanted}  # type: ignore[index]
    assert names <= pinned
