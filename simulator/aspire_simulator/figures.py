"""Figures of runs as SVG text or files. matplotlib is imported when the first one is drawn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aspire.fileio import open_atomic
from aspire.rundir import Run
from aspire_simulator.comparison import RunRow
from aspire_simulator.metrics import phase_mix

PHASES = ("prefill", "draft", "verify", "autoregressive", "mixed")
PHASE_COLOURS = ("#8c8c8c", "#5b9bd5", "#d9822b", "#444444", "#7a5195")
MOST_BARS = 24


def _new(width: float = 7.0, height: float = 3.6) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    # a Figure of its own needs no pyplot: nothing global, nothing to close
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _short(name: str, longest: int = 42) -> str:
    return name if len(name) <= longest else name[: longest - 3] + "..."


def svg(figure: Any) -> str:
    """The figure as an ``<svg>`` element, to be put into HTML."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "aspire"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def save(figure: Any, path: str | Path) -> Path:
    """Write the figure; the suffix of ``path`` chooses png, svg or pdf."""
    with open_atomic(path, "wb") as stream:
        figure.savefig(stream, format=Path(path).suffix.lstrip(".") or "png", dpi=150)
    return Path(path)


def throughput_bars(rows: Sequence[RunRow]) -> Any:
    """Decode-only throughput by run, gain over autoregressive decoding written beside."""
    shown = rows[:MOST_BARS]
    figure, axes = _new(height=1.0 + 0.32 * len(shown))
    rates = [float(row.summary.get("decode_only_throughput") or 0.0) for row in shown]
    place = np.arange(len(shown))[::-1]
    colours = ["#444444" if row.kind == "autoregressive" else "#d9822b" for row in shown]
    axes.barh(place, rates, color=colours, height=0.7)
    for y, rate, row in zip(place, rates, shown, strict=True):
        if row.gain is not None and row.kind != "autoregressive":
            axes.text(rate, y, f" {row.gain:.2f}x", va="center", fontsize=8)
    axes.set_yticks(place, [f"{_short(row.policy)}  b{row.batch} {row.context:,}" for row in shown], fontsize=8)
    axes.set_xlabel("decode-only tokens / s")
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    return figure


def pareto(rows: Sequence[RunRow]) -> Any:
    """Throughput against mean time per output token; the runs nobody beats in both are filled and joined."""
    figure, axes = _new()
    for number, group in enumerate(dict.fromkeys(row.group for row in rows)):
        points = [row for row in rows if row.group == group and row.summary.get("mean_tpot_ms")]
        if not points:
            continue
        colour = f"C{number % 10}"
        x = [float(row.summary["mean_tpot_ms"]) for row in points]
        y = [float(row.summary.get("decode_only_throughput") or 0.0) for row in points]
        fills = [colour if row.efficient else "white" for row in points]
        axes.scatter(x, y, c=fills, edgecolors=colour, s=36, zorder=3)
        front = sorted((a, b) for a, b, row in zip(x, y, points, strict=True) if row.efficient)
        axes.plot([a for a, _ in front], [b for _, b in front], color=colour, linewidth=1)
        for a, b, row in zip(x, y, points, strict=True):
            axes.annotate(_short(row.policy, 24), (a, b), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set_xlabel("mean time per output token, ms")
    axes.set_ylabel("decode-only tokens / s")
    return figure


def acceptance_curves(rows: Sequence[RunRow]) -> Any:
    """Share of rounds that accepted at least j drafts, of those that drafted that far."""
    figure, axes = _new()
    for row in rows[:10]:
        rates = row.summary.get("acceptance_by_position") or []
        if rates:
            axes.plot(np.arange(1, len(rates) + 1), rates, marker="o", markersize=3, label=_short(row.policy))
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted up to there")
    axes.set_ylim(0, 1.02)
    if axes.lines:
        axes.legend(fontsize=7, frameon=False)
    return figure


def phase_bars(runs: Sequence[tuple[str, Run]], rows: Sequence[RunRow]) -> Any:
    """Share of time by kind of step."""
    shown = list(zip(runs, rows, strict=True))[:MOST_BARS]
    figure, axes = _new(height=1.2 + 0.32 * len(shown))
    place = np.arange(len(shown))[::-1]
    left = np.zeros(len(shown))
    mixes = [row.summary.get("phase_mix") or phase_mix(run.steps) for (_, run), row in shown]
    for phase, colour in zip(PHASES, PHASE_COLOURS, strict=True):
        width = np.array([float(mix.get(phase, 0.0)) for mix in mixes])
        axes.barh(place, width, left=left, color=colour, label=phase, height=0.7)
        left += width
    axes.set_yticks(place, [_short(row.policy) for _, row in shown], fontsize=8)
    axes.set_xlabel("share of step time")
    axes.set_xlim(0, 1)
    figure.legend(fontsize=7, frameon=False, ncols=len(PHASES), loc="outside upper right")
    return figure


def timeline(run: Run, buckets: int = 120) -> Any:
    """Rows in the step and committed tokens per second over the run."""
    figure, axes = _new()
    log = run.steps
    if len(log):
        end_s = log.start_s + log.duration_s
        edges = np.linspace(float(log.start_s[0]), float(end_s.max()), buckets + 1)
        running = np.concatenate([[0], np.cumsum(log.column("committed"), dtype=np.int64)])
        per_step = np.diff(running[log.row_end], prepend=0)
        tokens, _ = np.histogram(end_s, bins=edges, weights=per_step)
        axes.plot(edges[1:], tokens / np.diff(edges), color="#d9822b", linewidth=0.8)
        other = axes.twinx()
        other.plot(log.start_s, np.diff(log.row_end, prepend=0), color="#444444", linewidth=0.6, alpha=0.7)
        other.set_ylabel("rows in the step")
        other.set_ylim(bottom=0)
    axes.set_xlabel("time, s")
    axes.set_ylabel("committed tokens / s", color="#d9822b")
    axes.set_ylim(bottom=0)
    return figure


def break_even_map(cells: Sequence[dict[str, Any]]) -> Any:
    """Gain over autoregressive decoding by batch and context."""
    figure, axes = _new(height=3.2)
    batches = sorted({cell["batch"] for cell in cells})
    contexts = sorted({cell["context"] for cell in cells})
    gain = np.full((len(batches), len(contexts)), np.nan)
    for cell in cells:
        gain[batches.index(cell["batch"]), contexts.index(cell["context"])] = cell["gain"]
    axes.grid(visible=False)
    # logarithmic and centred: no gain is white, twice as fast as blue as half as fast is red
    reach = max(0.2, float(np.nanmax(np.abs(np.log2(gain)))))
    axes.imshow(np.log2(gain), cmap="RdBu", vmin=-reach, vmax=reach, aspect="auto", origin="lower")
    for (row, column), value in np.ndenumerate(gain):
        if np.isfinite(value):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.set_yticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("batch")
    return figure
