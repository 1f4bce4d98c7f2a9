"""Read request traces. The format is detected from the content, not from the name.

| format    | recognised by                                                             |
|-----------|---------------------------------------------------------------------------|
| azure     | CSV header TIMESTAMP,ContextTokens,GeneratedTokens (2023 and 2024)         |
| burstgpt  | CSV header with Timestamp, Request tokens, Response tokens                |
| vidur     | CSV header with num_prefill_tokens, num_decode_tokens (arrived_at if known) |
| mooncake  | JSON lines with timestamp (ms), input_length, output_length (hash_ids)    |
| run       | a run directory of this project, or its requests.csv                       |
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from aspire.errors import InputError
from aspire.runlog import OLD_REQUEST_COLUMNS, REQUEST_COLUMNS
from aspire.scheduler.prefix_links import shared_prefixes
from aspire_simulator.workload import Workload

_LINKS = ("prefix_of", "prefix_tokens")
MOONCAKE_BLOCK_TOKENS = 512  # tokens behind one hash id of a Mooncake trace

# time column (Vidur traces may lack it), prompt column, output column
_CSV: dict[str, tuple[str, str, str]] = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    "run": ("arrival_s", "prompt_tokens", "output_tokens"),
}
FORMATS: tuple[str, ...] = (*_CSV, "mooncake")


def detect_format(path: str | Path) -> str:
    """One of `FORMATS`. Raises `InputError` when the first line fits none."""
    source = _file(path)
    head = _first_line(source)
    if head.lstrip().startswith("{"):
        keys = _json_line(source, 1, head)
        if {"timestamp", "input_length", "output_length"} <= keys.keys():
            return "mooncake"
        raise InputError(
            f"{source} line 1: JSON keys {sorted(keys)}; a Mooncake trace has timestamp, input_length, output_length"
        )
    columns = {column.strip() for column in next(csv.reader([head]), [])}
    if columns in (set(REQUEST_COLUMNS), set(OLD_REQUEST_COLUMNS)):
        return "run"
    for name in ("azure", "burstgpt", "vidur"):
        if set(_CSV[name][1:]) <= columns and (name == "vidur" or _CSV[name][0] in columns):
            return name
    raise InputError(
        f"{source} line 1: '{head[:80]}' is no trace this reads; "
        "allowed: Azure, BurstGPT or Vidur CSV with its header line, "
        "Mooncake JSON lines, or a run directory"
    )


def load_trace(
    path: str | Path,
    *,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    limit: int | None = None,
) -> Workload:
    """Read a trace as a workload whose first request arrives at 0.

    Requests without prompt or output tokens (failed calls in public traces) are left out; ``detail["dropped"]`` counts
    them. ``limit`` counts requests kept. Raises `InputError` with the line number of the first line that cannot be
    read.
    """
    source = _file(path)
    kind = detect_format(source)
    records = _mooncake(source) if kind == "mooncake" else _csv_records(source, kind)
    kept, dropped = [], 0
    for record in records:
        if record[1] < 1 or record[2] < 1:
            dropped += 1
            continue
        kept.append(record)
        if limit is not None and len(kept) >= limit:
            break
    if not kept:
        raise InputError(f"trace {source} has no requests with prompt and output tokens")
    arrival_s = np.array([record[0] for record in kept], dtype=np.float64)
    prefix_of, prefix_tokens = _prefixes(kept, kind)
    workload = Workload(
        name=f"{kind}:{source.name}",
        arrival_s=arrival_s - arrival_s.min(),
        prompt_tokens=np.array([record[1] for record in kept], dtype=np.int64),
        output_tokens=np.array([record[2] for record in kept], dtype=np.int64),
        prefix_of=prefix_of,
        prefix_tokens=prefix_tokens,
        detail={"format": kind, "file": source.name, "dropped": dropped},
    )
    return workload.ordered().scaled(time_scale=time_scale, length_scale=length_scale, limit=limit)


def _prefixes(records: list[Any], kind: str) -> tuple[Any, Any]:
    """``(prefix_of, prefix_tokens)`` of the ``records``; None where the trace says nothing of prefixes."""
    if kind == "mooncake":
        prefix_of, tokens = shared_prefixes([record[3] for record in records], MOONCAKE_BLOCK_TOKENS)
        tokens = np.minimum(tokens, [record[1] for record in records])
    elif kind == "run":
        prefix_of, tokens = np.array([record[3:5] for record in records], dtype=np.int64).T
        place = {record[5]: index for index, record in enumerate(records)}
        prefix_of = np.array([place.get(row, -1) for row in prefix_of.tolist()], dtype=np.int64)
    else:
        return None, None
    return (prefix_of, tokens) if (prefix_of >= 0).any() else (None, None)


def _file(path: str | Path) -> Path:
    source = Path(path)
    if source.is_dir():
        source = source / "requests.csv"
    if not source.is_file():
        raise InputError(f"trace {path} does not exist; give a trace file or a run directory")
    return source


def _lines(source: Path) -> Iterator[str]:
    try:
        with source.open(encoding="utf-8-sig", newline="") as stream:
            yield from stream
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"trace {source} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _first_line(source: Path) -> str:
    lines = list(islice(_lines(source), 1))
    if not lines or not lines[0].strip():
        raise InputError(f"trace {source} is empty")
    return lines[0].rstrip("\r\n")


def _csv_records(source: Path, kind: str) -> Iterator[tuple[Any, ...]]:
    reader = csv.reader(_lines(source))
    header = [column.strip() for column in next(reader)]
    time_name, prompt_name, output_name = _CSV[kind]
    when = header.index(time_name) if time_name in header else None
    prompt, output = header.index(prompt_name), header.index(output_name)
    seconds = _timestamp_s if kind == "azure" else float
    for line in reader:
        if not line:
            continue
        try:
            arrival_s = 0.0 if when is None else seconds(line[when])
            links = [int(line[header.index(name)]) for name in _LINKS] if kind == "run" else []
            yield (*_checked(arrival_s, _count(line[prompt]), _count(line[output])), *links, reader.line_num - 2)
        except IndexError as error:
            raise InputError(f"{source} line {reader.line_num}: {len(line)} fields, expected {len(header)}") from error
        except ValueError as error:
            raise InputError(f"{source} line {reader.line_num}: {error}") from error


def _mooncake(source: Path) -> Iterator[tuple[float, int, int, list[int]]]:
    for number, text in enumerate(_lines(source), start=1):
        if not text.strip():
            continue
        record = _json_line(source, number, text)
        try:
            arrival_s, prompt, output = _checked(
                float(record["timestamp"]) / 1e3, _count(record["input_length"]), _count(record["output_length"])
            )
            blocks = [int(block) for block in record.get("hash_ids", ())]
        except KeyError as error:
            raise InputError(f"{source} line {number}: no key {error}") from error
        except (TypeError, ValueError) as error:
            raise InputError(f"{source} line {number}: {error}") from error
        yield arrival_s, prompt, output, blocks


def _json_line(source: Path, number: int, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{source} line {number}: not valid JSON ({error.msg})") from error
    if not isinstance(record, dict):
        raise InputError(f"{source} line {number}: expected a JSON object")
    return record


def _checked(arrival_s: float, prompt: int, output: int) -> tuple[float, int, int]:
    if not np.isfinite(arrival_s) or prompt < 0 or output < 0:
        raise ValueError(f"arrival {arrival_s}, {prompt} prompt and {output} output tokens: negative or not finite")
    return arrival_s, prompt, output


def _count(value: Any) -> int:
    """A whole number of tokens; ``"12.0"`` passes, ``"12.5"`` and ``"x"`` do not."""
    number = float(value)
    if not number.is_integer():
        raise ValueError(f"'{value}' is not a whole number of tokens")
    return int(number)


def _timestamp_s(text: str) -> float:
    """Seconds since the epoch of ``2023-11-16 18:17:03.9799600`` (UTC, seven digits) or an ISO time with an offset."""
    main, dot, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    moment = datetime.fromisoformat(main + rest[len(digits) :] if dot else main)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)
