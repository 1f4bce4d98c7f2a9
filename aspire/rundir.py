"""A run directory: what the engine or the simulator did, step by step, in one format.

    config.json     settings of the run, as given
    meta.json       provenance: command, commit, date, hardware, versions
    requests.csv    one line per request (`RequestTable`)
    steps.jsonl.gz  one line per step, with the rows it ran (`StepLog`); enough to replay the run exactly
    summary.json    metrics under the key names of vLLM's serving benchmark
    trace.json      Chrome / Perfetto trace, bounded in size

In memory everything is columnar (numpy): recording a step costs a few slice copies, never an object per row.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aspire.errors import InputError
from aspire.fileio import open_atomic, read_json, write_json_atomic
from aspire.runlog import MODES, OLD_REQUEST_COLUMNS, PREFILL, REQUEST_COLUMNS, ROW_COLUMNS, RequestTable, StepLog
from aspire.runtrace import write_trace
from aspire.scheduler.features import FEATURES, causal_pairs

STEPS_FORMAT = "aspire-steps/1"
_PREFILL_PAIRS = FEATURES.index("prefill_pairs")
FILES = ("config.json", "meta.json", "requests.csv", "steps.jsonl.gz", "summary.json", "trace.json", "report.html")


@dataclass
class Run:
    """A run in memory."""

    config: dict[str, Any]
    requests: RequestTable
    steps: StepLog
    meta: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


@contextmanager
def directory_atomic(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder beside ``path``; rename it to ``path`` when the block ends without an error.

    A run directory that is already there is replaced. Any other folder with files in it is left alone: `InputError`.
    """
    target = Path(path)
    if target.exists():
        if not target.is_dir():
            raise InputError(f"{target} is a file, not a run directory; choose another path")
        strangers = sorted(entry.name for entry in target.iterdir() if entry.name not in FILES)
        if strangers:
            raise InputError(
                f"{target} holds other files ({strangers[0]}); choose an empty folder or an old run directory"
            )
    building = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building = tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.")
        os.chmod(building, 0o755)
        yield Path(building)
        if target.exists():
            retired = tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.")
            os.replace(target, Path(retired) / "old")
            os.replace(building, target)
            shutil.rmtree(retired, ignore_errors=True)
        else:
            os.replace(building, target)
    except OSError as error:
        raise InputError(
            f"cannot write {target}: {error.strerror or error}; free space or choose another path"
        ) from error
    finally:
        if building and os.path.isdir(building):
            shutil.rmtree(building, ignore_errors=True)


def write_run(path: str | Path, run: Run, *, trace_events: int = 60_000, rows: bool = True) -> Path:
    """Write ``run`` to the directory ``path`` in one piece and return the path.

    ``rows=False`` leaves the rows out of steps.jsonl.gz (much smaller; such a run cannot be replayed).
    ``trace_events`` bounds trace.json; 0 leaves it out.
    """
    with directory_atomic(path) as folder:
        write_json_atomic(folder / "config.json", _plain(run.config))
        write_json_atomic(folder / "meta.json", _plain(run.meta))
        write_json_atomic(folder / "summary.json", _plain(run.summary))
        _write_requests(folder / "requests.csv", run.requests)
        _write_steps(folder / "steps.jsonl.gz", run.steps, rows)
        if trace_events:
            write_trace(folder / "trace.json", run.steps, run.requests.request_id, trace_events)
    return Path(path)


def read_run(path: str | Path) -> Run:
    """Read the run directory ``path``. Raises `InputError` that names the file and line that is missing or broken."""
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"run directory {folder} does not exist; make one with: aspire simulate, generate or bench")
    if not (folder / "config.json").exists() and any(folder.glob("*/config.json")):
        raise InputError(f"{folder} is a folder of runs; name one of them, or all: {folder}/*")
    files = {
        name: read_json(folder / f"{name}.json", f"run file {name}.json") for name in ("config", "meta", "summary")
    }
    requests = read_requests(folder / "requests.csv")
    return Run(requests=requests, steps=_read_steps(folder / "steps.jsonl.gz"), **files)


def _write_requests(path: Path, table: RequestTable) -> None:
    columns = [getattr(table, name) for name in REQUEST_COLUMNS]
    lists = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns]
    with open_atomic(path) as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(REQUEST_COLUMNS)
        for values in zip(*lists, strict=True):
            writer.writerow(["" if isinstance(value, float) and math.isnan(value) else value for value in values])


def read_requests(path: str | Path) -> RequestTable:
    """Read a requests.csv; raises `InputError` with the line number of the first bad line."""
    source = Path(path)
    try:
        with source.open(encoding="utf-8", newline="") as stream:
            lines = list(csv.reader(stream))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"request table {source} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    if not lines or tuple(lines[0]) not in (REQUEST_COLUMNS, OLD_REQUEST_COLUMNS):
        raise InputError(f"{source} line 1: expected the columns {','.join(REQUEST_COLUMNS)}")
    names = tuple(lines[0])
    table = RequestTable.empty(len(lines) - 1)
    for index, line in enumerate(lines[1:]):
        try:
            values = dict(zip(names, line, strict=True))
            for name, text in values.items():
                column = getattr(table, name)
                if isinstance(column, list):
                    column[index] = text
                elif column.dtype.kind == "f":
                    column[index] = float(text) if text else math.nan
                else:
                    column[index] = int(text)
        except ValueError as error:
            raise InputError(f"{source} line {index + 2}: {error}") from error
    if names == OLD_REQUEST_COLUMNS:
        table.queued_s[:] = table.arrival_s
    return table


def _write_steps(path: Path, steps: StepLog, rows: bool) -> None:
    header = {"format": STEPS_FORMAT, "modes": MODES, "columns": ROW_COLUMNS if rows else (), "features": FEATURES}
    with open_atomic(path, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1, mtime=0) as stream:
        stream.write((json.dumps(header) + "\n").encode())
        for first in range(0, len(steps), 512):
            stream.write("".join(_step_lines(steps, first, min(first + 512, len(steps)), rows)).encode())


def _step_lines(steps: StepLog, first: int, last: int, rows: bool) -> Iterator[str]:
    """Lines of the steps first..last-1. Column by column: a list per step, not an object per row."""
    offset = steps.rows_of(first).start
    span = slice(offset, steps.rows_of(last - 1).stop)
    columns = [(name, steps.column(name)[span].tolist()) for name in ROW_COLUMNS]
    margins = steps.margin[span]
    for step in range(first, last):
        here = steps.rows_of(step)
        line: dict[str, Any] = {
            "start_s": float(steps.start_s[step]),
            "duration_s": float(steps.duration_s[step]),
            "planned_s": float(steps.planned_s[step]),
            "features": steps.features[step].tolist(),
        }
        if not rows:
            yield json.dumps(line) + "\n"
            continue
        low, high = here.start - offset, here.stop - offset
        for name, values in columns:
            line[name] = values[low:high]
        text = json.dumps(line)
        # nine significant digits give a float32 back exactly; only drafting rows have a margin
        known = margins[low:high]
        digits = ",".join(map("%.9g".__mod__, known[~np.isnan(known)].tolist()))
        digits = digits.replace("inf", "1e999")  # a draft without a rival; JSON has no infinity but reads this as one
        has = np.flatnonzero(~np.isnan(known)).tolist()
        yield f'{text[:-1]}, "margin_row": {has}, "margin": [{digits}]}}\n'


def _read_steps(path: Path) -> StepLog:
    steps = StepLog()
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            header = json.loads(stream.readline())
            if header.get("format") != STEPS_FORMAT:
                raise InputError(f"{path} is not in the format {STEPS_FORMAT}; record the run again with this version")
            if "prefill_pairs" not in header["features"] and not header["columns"]:
                raise InputError(
                    f"{path} was written without rows by an earlier release, so the attention of its prompts is not "
                    "known; record the run again"
                )
            renumber = [header["features"].index(name) if name in header["features"] else -1 for name in FEATURES]
            for line in stream:
                _append_line(steps, json.loads(line), renumber)
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist; the run directory is not complete") from error
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} line {len(steps) + 2} is broken ({error!r}); record the run again") from error
    return steps


def _append_line(steps: StepLog, line: Mapping[str, Any], renumber: Sequence[int]) -> None:
    features = [line["features"][index] if index >= 0 else 0.0 for index in renumber]
    rows = {name: np.asarray(line.get(name, ()), dtype=np.int32) for name in ROW_COLUMNS}
    if renumber[_PREFILL_PAIRS] < 0:
        features[_PREFILL_PAIRS] = _prefill_pairs(rows)
    margin = np.full(len(rows["slot"]), np.nan, dtype=np.float32)
    margin[np.asarray(line.get("margin_row", ()), dtype=np.int64)] = line.get("margin", ())
    steps.append(line["start_s"], line["duration_s"], features, margin=margin, planned_s=line.get("planned_s"), **rows)


def _prefill_pairs(rows: Mapping[str, Any]) -> float:
    """The feature ``prefill_pairs`` of a step that was recorded before it was one, from the rows of the step."""
    prompts = rows["mode"] == PREFILL
    query = rows["query_tokens"][prompts].astype(np.int64)
    return float(np.sum(causal_pairs(query, rows["context"][prompts] + query)))


def _plain(value: Any) -> Any:
    """``value`` as JSON types: numpy scalars and arrays become numbers and lists, NaN and infinity null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
