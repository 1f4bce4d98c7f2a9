"""Chrome / Perfetto trace of a run: one track of steps, one track per slot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aspire.fileio import open_atomic
from aspire.runlog import MODES, VERIFY, StepLog


def write_trace(path: Path, steps: StepLog, request_ids: Sequence[str], max_events: int) -> None:
    """Write a trace of at most about ``max_events`` events: the first steps of the run that fit.

    A slot's consecutive steps of one kind for one request are one slice (a draft of 7 tokens, a prefill of 4 chunks).
    """
    shown = int(np.searchsorted(steps.row_end + np.arange(1, len(steps) + 1), max_events, side="right"))
    shown = max(1, shown) if len(steps) else 0
    events = [*_names(steps, shown), *_step_events(steps, shown), *_slot_events(steps, shown, request_ids)]
    note = {"steps": len(steps), "steps_shown": shown}
    with open_atomic(path) as stream:
        stream.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(note)}, "traceEvents": [\n')
        stream.write(",\n".join(json.dumps(event) for event in events))
        stream.write("\n]}\n")


def _names(steps: StepLog, shown: int) -> list[dict[str, Any]]:
    slots = np.unique(steps.column("slot")[: int(steps.row_end[shown - 1])]).tolist() if shown else []
    tracks = [(1, 0, "process_name", "engine"), (1, 0, "thread_name", "steps"), (2, 0, "process_name", "slots")]
    tracks += [(2, slot, "thread_name", f"slot {slot}") for slot in slots]
    return [
        {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}} for pid, tid, kind, name in tracks
    ]


def _step_events(steps: StepLog, shown: int) -> list[dict[str, Any]]:
    mode, tokens, committed = (steps.column(name) for name in ("mode", "query_tokens", "committed"))
    events = []
    for step in range(shown):
        rows = steps.rows_of(step)
        count = np.bincount(mode[rows], minlength=4)
        kinds = [name for name, number in zip(MODES[1:], count[1:].tolist(), strict=True) if number]
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": 0,
                "name": "+".join(kinds) or "idle",
                "ts": round(float(steps.start_s[step]) * 1e6, 3),
                "dur": round(float(steps.duration_s[step]) * 1e6, 3),
                "args": {
                    "step": step,
                    **dict(zip(MODES[1:], count[1:].tolist(), strict=True)),
                    "query_tokens": int(tokens[rows].sum()),
                    "committed": int(committed[rows].sum()),
                },
            }
        )
    return events


def _slot_events(steps: StepLog, shown: int, request_ids: Sequence[str]) -> list[dict[str, Any]]:
    if not shown:
        return []
    last = int(steps.row_end[shown - 1])
    step = steps.step_of_row()[:last]
    slot, request, mode, committed, accepted = (
        steps.column(name)[:last] for name in ("slot", "request", "mode", "committed", "accepted")
    )
    order = np.lexsort((step, slot))
    step = step[order]
    slot, request, mode, committed, accepted = (a[order] for a in (slot, request, mode, committed, accepted))
    starts = np.ones(last, dtype=bool)
    starts[1:] = (
        (slot[1:] != slot[:-1]) | (request[1:] != request[:-1]) | (mode[1:] != mode[:-1]) | (mode[1:] == VERIFY)
    )
    starts[1:] |= step[1:] != step[:-1] + 1
    first = np.flatnonzero(starts)
    final = np.append(first[1:], last) - 1
    begin_s = steps.start_s[step[first]]
    end_s = steps.start_s[step[final]] + steps.duration_s[step[final]]
    total = np.add.reduceat(committed, first) if last else committed
    events = []
    for index, (low, high) in enumerate(zip(first.tolist(), final.tolist(), strict=True)):
        number = int(request[low])
        name = request_ids[number] if 0 <= number < len(request_ids) else str(number)
        length = high - low + 1
        events.append(
            {
                "ph": "X",
                "pid": 2,
                "tid": int(slot[low]),
                "name": MODES[mode[low]] + (f" x{length}" if length > 1 else ""),
                "ts": round(float(begin_s[index]) * 1e6, 3),
                "dur": round(float(end_s[index] - begin_s[index]) * 1e6, 3),
                "args": {"request": name, "accepted": int(accepted[high]), "committed": int(total[index])},
            }
        )
    return events
