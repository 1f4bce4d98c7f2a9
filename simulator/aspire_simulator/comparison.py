"""Set runs side by side: gain over autoregressive decoding, oracle gap, Pareto front, and where speculation pays."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from aspire.errors import InputError
from aspire.rundir import Run, read_run
from aspire.runlog import DRAFT
from aspire_simulator.breakeven import verdict
from aspire_simulator.metrics import oracle_gap, summarize

COLUMNS: tuple[str, ...] = (
    "run", "policy", "source", "batch", "context", "decode tok/s", "over AR", "oracle gap",
    "TTFT ms", "TPOT ms", "P99 TPOT", "tokens/round", "preempted",
)  # fmt: skip


@dataclass(frozen=True)
class RunRow:
    """One run in a comparison. Ratios are None where the group has no such baseline."""

    name: str
    policy: str
    kind: str  # of the policy
    source: str  # engine or simulator
    synthetic: bool  # acceptance drawn from a model, not found by a real one
    group: str  # runs of one group had the same requests and slots
    batch: int  # largest number of rows of a step
    context: int  # mean context of decoding rows, tokens
    summary: dict[str, Any]
    gain: float | None = None
    gap: float | None = None
    efficient: bool = False  # no other run of the group has both more throughput and a lower TPOT

    def cells(self) -> list[str]:
        """Text of `COLUMNS`."""
        summary = self.summary
        return [
            self.name,
            self.policy,
            self.source + (" (synthetic acceptance)" if self.synthetic else ""),
            str(self.batch),
            f"{self.context:,}",
            _number(summary.get("decode_only_throughput")),
            "" if self.gain is None else f"{self.gain:.2f}x",
            "" if self.gap is None else f"{self.gap:.1%}",
            _number(summary.get("mean_ttft_ms")),
            _number(summary.get("mean_tpot_ms")),
            _number(summary.get("p99_tpot_ms")),
            _number(summary.get("acceptance_length")),
            str(summary.get("preemptions", 0)),
        ]


def load_runs(paths: Sequence[str | Path]) -> list[tuple[str, Run]]:
    """Runs by folder name; a folder that holds run directories stands for all of them. Raises `InputError` for none."""
    found: list[tuple[str, Run]] = []
    for path in map(Path, paths):
        if (path / "config.json").is_file():
            inside = [path]
        else:
            inside = sorted(child for child in path.glob("*") if (child / "config.json").is_file())
        if not inside:
            raise InputError(f"{path} is no run directory and holds none; make one: aspire simulate, generate or bench")
        found += [(folder.name, read_run(folder)) for folder in inside]
    return found


def compare(runs: Sequence[tuple[str, Run]]) -> list[RunRow]:
    """A row per run, in order, with gains and oracle gaps within each group."""
    rows = [_row(name, run) for name, run in runs]
    return [_with_ratios(row, [other for other in rows if other.group == row.group]) for row in rows]


def pays(rows: Sequence[RunRow]) -> str:
    """One sentence: where the best speculation of each group pays and where it stops."""
    best: dict[str, RunRow] = {}
    for row in rows:
        if row.gain is None or row.kind in ("autoregressive", "oracle", "lossy"):
            continue
        if row.group not in best or row.gain > (best[row.group].gain or 0.0):
            best[row.group] = row
    if not best:
        return "No policy was run beside autoregressive decoding on the same requests, so no gain can be stated."
    if len(best) == 1:
        row = next(iter(best.values()))
        place = f"at batch {row.batch} and a mean context of {row.context:,} tokens ({row.source})"
        if (row.gain or 0.0) > 1.02:
            return f"Speculation pays {place}: {row.policy} reaches {row.gain:.2f}x autoregressive decoding."
        return f"Speculation does not pay {place}: the best, {row.policy}, reaches {row.gain:.2f}x plain decoding."
    cells = [{"batch": row.batch, "context": _round_context(row.context), "gain": row.gain} for row in best.values()]
    return verdict("The best speculation of each workload", cells)


def text_table(rows: Sequence[RunRow]) -> str:
    """Plain-text table for a terminal."""
    lines = [list(COLUMNS), *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    # names to the left, numbers to the right
    return "\n".join(
        "  ".join(
            text.ljust(width) if column < 3 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _row(name: str, run: Run) -> RunRow:
    policy = run.config.get("policy")
    kind = policy.get("kind", "?") if isinstance(policy, dict) else str(policy)
    if run.config.get("lossy"):
        kind = "lossy"  # neither a baseline nor speculation
    log, table = run.steps, run.requests
    rows = np.diff(log.row_end, prepend=0)
    decoding = log.column("mode") >= DRAFT
    context = log.column("context")[decoding]
    same = [table.prompt_tokens.tobytes(), table.max_tokens.tobytes(), str(run.config.get("source")).encode()]
    same.append(str(run.config.get("scheduler", {}).get("max_num_seqs")).encode())
    return RunRow(
        name=name,
        policy=str(run.config.get("policy_label", kind)),
        kind=kind,
        source=str(run.config.get("source", "engine")),
        synthetic=bool(run.config.get("synthetic_acceptance", run.config.get("source") == "simulator")),
        group=hashlib.sha256(b"|".join(same)).hexdigest()[:12],
        batch=int(rows.max()) if len(rows) else 0,
        context=int(context.mean()) if len(context) else 0,
        summary=run.summary or summarize(run),
    )


def _with_ratios(row: RunRow, group: Sequence[RunRow]) -> RunRow:
    mine = float(row.summary.get("decode_only_throughput") or 0.0)
    plain = [float(o.summary.get("decode_only_throughput") or 0.0) for o in group if o.kind == "autoregressive"]
    known = [float(o.summary.get("decode_only_throughput") or 0.0) for o in group if o.kind == "oracle"]
    tpot = float(row.summary.get("mean_tpot_ms") or 0.0)
    beaten = any(
        float(o.summary.get("decode_only_throughput") or 0.0) > mine
        and float(o.summary.get("mean_tpot_ms") or 0.0) < tpot
        for o in group
    )
    return replace(
        row,
        gain=mine / plain[0] if plain and plain[0] > 0 else None,
        gap=oracle_gap(mine, known[0]) if known and known[0] > 0 and row.kind != "oracle" else None,
        efficient=not beaten and mine > 0,
    )


def _round_context(context: int) -> int:
    """To two significant digits: runs of one nominal context fall together."""
    if context < 10:
        return context
    scale = 10 ** (len(str(context)) - 2)
    return int(round(context / scale) * scale)


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
