"""What a command says: data on stdout, progress on stderr.

Progress is one live line on a terminal, a line every ``HEARTBEAT_S`` seconds elsewhere, nothing with ``--quiet``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aspire.errors import InputError

HEARTBEAT_S = 10.0


class Console:
    """The output of one command. ``quiet``: no progress. ``json``: stdout carries one JSON document."""

    def __init__(self, *, quiet: bool = False, json: bool = False) -> None:
        self.quiet = quiet
        self.json = json

    def say(self, text: str) -> None:
        """A line of progress on stderr."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """A warning on stderr, also with ``--quiet``."""
        print(f"aspire: warning: {text}", file=sys.stderr, flush=True)

    def wrote(self, path: str | Path, what: str) -> None:
        """Say which file was written."""
        self.say(f"wrote {path}  ({what})")

    def next(self, command: str) -> None:
        """Name the command that reads what this one wrote."""
        self.say(f"next: {command}")

    def data(self, text: str) -> None:
        """A line of the result on stdout; left out with ``--json``, where `result` carries it."""
        if not self.json:
            _print(text)

    def result(self, document: Mapping[str, Any]) -> None:
        """The whole result as JSON on stdout, with ``--json`` only."""
        if self.json:
            _print(json.dumps(plain(document), indent=1, allow_nan=False))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str | None = None) -> None:
        """A table on stdout: numbers to the right; plain text where stdout is no terminal."""
        if self.json:
            return
        from rich import box
        from rich.console import Console as RichConsole
        from rich.table import Table

        table = Table(*columns, title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for index, column in enumerate(table.columns):
            if rows and all(isinstance(row[index], (int, float)) or row[index] is None for row in rows):
                column.justify = "right"
            column.no_wrap = index > 0
        for row in rows:
            table.add_row(*(cell(value) for value in row))
        terminal = sys.stdout.isatty()
        console = RichConsole(file=sys.stdout, width=None if terminal else 400, highlight=False, markup=False)
        with console.capture() as captured:
            console.print(table)
        lines = captured.get().splitlines()
        _print("\n".join(line.rstrip() for line in lines if line.strip()))

    @contextmanager
    def progress(self, label: str, total: float | None = None) -> Iterator[Progress]:
        """Progress of a long step; the block calls ``update`` as often as it likes."""
        progress = Progress(label, total, self.quiet)
        try:
            yield progress
        finally:
            progress.close()


def _print(text: str) -> None:
    """A line on stdout; raises `InputError` when there is no room for it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer has nowhere to go
        raise InputError(
            f"cannot write to stdout: {error.strerror or error}; free space or send it elsewhere"
        ) from error


class Progress:
    """A live line (terminal) or a heartbeat (elsewhere) for one step that takes long."""

    def __init__(self, label: str, total: float | None, quiet: bool) -> None:
        self.label = label
        self.total = total
        self._start_s = time.monotonic()
        self._quiet = quiet
        self._live = not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._period_s = 0.1 if self._live else HEARTBEAT_S
        self._next_s = self._start_s + (0.0 if self._live else HEARTBEAT_S)
        self._shown = False

    def update(self, done: float | None = None, note: str = "", *, total: float | None = None) -> None:
        """Say how far the step is: ``done`` of ``total``, and a few words."""
        if total is not None:
            self.total = total
        now_s = time.monotonic()
        if self._quiet or now_s < self._next_s:
            return
        self._next_s = now_s + self._period_s
        line = self._line(done, note, now_s - self._start_s)
        if self._live:
            width = max(20, os.get_terminal_size(sys.stderr.fileno()).columns - 1)
            print(f"\r\x1b[2K{line[:width]}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
        self._shown = True

    def close(self) -> None:
        """Take the live line away."""
        if self._live and self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)

    def _line(self, done: float | None, note: str, elapsed_s: float) -> str:
        parts = [self.label]
        if done is not None and self.total:
            share = min(1.0, done / self.total)
            parts.append(f"{done:g}/{self.total:g} ({share:.0%})")
            parts.append(f"{duration(elapsed_s)} elapsed")
            if 0 < share < 1:
                parts.append(f"about {duration(elapsed_s / share - elapsed_s)} left")
        else:
            parts += [f"{done:g}"] if done is not None else []
            parts.append(f"{duration(elapsed_s)} elapsed")
        return "  ".join([*parts, note] if note else parts)


def duration(seconds: float) -> str:
    """``75`` -> ``1m15s``."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def cell(value: Any) -> str:
    """A table cell: four significant digits for a float, ``-`` for None and NaN."""
    if value is None or (isinstance(value, float) and value != value):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def plain(value: Any) -> Any:
    """``value`` as JSON types: numpy becomes numbers and lists, paths strings, NaN and infinity null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return plain(value.tolist())
    if isinstance(value, float) and not (value == value and abs(value) != float("inf")):
        return None
    return str(value) if isinstance(value, Path) else value
