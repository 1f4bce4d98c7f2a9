"""Files are written aside and renamed: a reader sees the old file or the whole new one, never half."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from aspire.errors import InputError


@contextmanager
def open_atomic(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file beside ``path`` and rename it over ``path`` when the block ends without an error.

    Raises `InputError` when the folder cannot be written or the disk is full; nothing is left behind then.
    """
    target = Path(path)
    temporary = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except OSError as error:
        raise InputError(
            f"cannot write {target}: {error.strerror or error}; free space or choose another path"
        ) from error
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def write_text_atomic(path: str | Path, text: str) -> Path:
    """Write ``text`` to ``path`` in one piece and return the path."""
    with open_atomic(path) as stream:
        stream.write(text)
    return Path(path)


def write_json_atomic(path: str | Path, data: Any, *, indent: int | None = 1) -> Path:
    """Write ``data`` as JSON to ``path`` in one piece and return the path. NaN and infinity are refused."""
    return write_text_atomic(path, json.dumps(data, indent=indent, allow_nan=False) + "\n")


def read_json(path: str | Path, what: str = "file") -> Any:
    """Parse the JSON file ``path``; raise `InputError` that names ``what`` it should have been."""
    source = Path(path)
    try:
        return json.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{what} {source} does not exist; check the path") from error
    except IsADirectoryError as error:
        raise InputError(f"{what} {source} is a folder; give the file in it") from error
    except OSError as error:
        raise InputError(f"{what} {source} cannot be read: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{what} {source} is not valid JSON ({error}); write it again with the command that makes it"
        ) from error
