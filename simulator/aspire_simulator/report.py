"""One self-contained HTML page from run directories: verdict, table, figures, what was run and how."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from aspire.fileio import write_text_atomic
from aspire.rundir import Run
from aspire_simulator import figures
from aspire_simulator.comparison import COLUMNS, RunRow, compare, load_runs, pays

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}.verdict{font-size:1.1em;border-left:4px solid
#d9822b;padding-left:.8em} table{border-collapse:collapse;font-size:13px}th,td{padding:.3em .6em;border-bottom:1px
#solid #ddd;text-align:right}
th:nth-child(-n+3),td:nth-child(-n+3){text-align:left}tr.efficient td{font-weight:600}.wide{overflow-x:auto}
svg{max-width:100%;height:auto}pre{background:#f6f6f6;padding:.8em;overflow-x:auto;font-size:12px}.note{color:#666;font-size:13px}
"""
LIMITS = (
    "Decode-only throughput counts the steps in which no row prefills: tokens committed over the time of these steps.",
    "Simulated times carry the error of the cost model; see its held-out error in the provenance.",
    "Simulated acceptance is drawn from a model or a recording, not found by running one.",
    "The oracle knows which drafts will be accepted, not the best interleaving of rows: it bounds what that is worth.",
)


def write_report(paths: Sequence[str | Path], out: str | Path, *, title: str = "ASPIRE run report") -> Path:
    """Write the report of the run directories ``paths`` (or folders of them) to the HTML file ``out``."""
    runs = load_runs(paths)
    return write_text_atomic(out, render(runs, title))


def save_figures(paths: Sequence[str | Path], folder: str | Path, suffix: str = ".png") -> list[Path]:
    """Write the figures of a report as files into ``folder``."""
    runs = load_runs(paths)
    return [figures.save(figure, Path(folder) / f"{name}{suffix}") for name, _, figure in _drawn(runs, compare(runs))]


def render(runs: Sequence[tuple[str, Run]], title: str) -> str:
    """The page as text: no script, no link to anything outside."""
    rows = compare(runs)
    parts = [
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>",
        "<meta name=viewport content='width=device-width,initial-scale=1'>",
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f"<p class=verdict>{escape(pays(rows))}</p>",
        *(f"<p class=verdict>{escape(sentence)}</p>" for sentence in _tuned_sentences(runs)),
        "<h2>Runs</h2>",
        _table(rows),
        "<p class=note>Bold: no other run of the same requests has both more throughput and a lower TPOT.</p>",
    ]
    for _, caption, figure in _drawn(runs, rows):
        parts.append(f"<h2>{escape(caption)}</h2>{figures.svg(figure)}")
    parts += ["<h2>Known limits</h2><ul>", *(f"<li>{escape(limit)}</li>" for limit in LIMITS), "</ul>"]
    parts += ["<h2>What was run</h2>", *(_details(name, run) for name, run in runs), "</body></html>\n"]
    return "".join(parts)


def _drawn(runs: Sequence[tuple[str, Run]], rows: Sequence[RunRow]) -> list[tuple[str, str, Any]]:
    """(file name, caption, figure); only figures that have something to show."""
    drawn = [("throughput", "Decode-only throughput", figures.throughput_bars(rows))]
    if len(rows) > 1 and any(row.summary.get("mean_tpot_ms") for row in rows):
        drawn.append(("pareto", "Throughput against latency", figures.pareto(rows)))
    if any(row.summary.get("acceptance_by_position") for row in rows):
        drawn.append(("acceptance", "Acceptance by draft position", figures.acceptance_curves(rows)))
    drawn.append(("phases", "Where the time goes", figures.phase_bars(runs, rows)))
    for _, cells in _tuned_cells(runs):
        drawn.append(
            ("break_even", "Gain over autoregressive decoding by batch and context", figures.break_even_map(cells))
        )
    best = max(range(len(rows)), key=lambda index: float(rows[index].summary.get("decode_only_throughput") or 0.0))
    if len(runs[best][1].steps):
        caption = f"Over time: {rows[best].policy} ({rows[best].name})"
        drawn.append(("timeline", caption, figures.timeline(runs[best][1])))
    return drawn


def _tuned_cells(runs: Sequence[tuple[str, Run]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """(sentence, cells) of the break-even maps that tuned policies carry, each once."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _, run in runs:
        policy = run.config.get("policy")
        carried = policy.get("provenance", {}).get("speculation_pays") if isinstance(policy, dict) else None
        if carried and carried.get("cells"):
            found[str(carried.get("sentence", ""))] = carried["cells"]
    return list(found.items())


def _tuned_sentences(runs: Sequence[tuple[str, Run]]) -> list[str]:
    return [f"Tuned: {sentence}" for sentence, _ in _tuned_cells(runs)]


def _table(rows: Sequence[RunRow]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    body = "".join(
        f"<tr{' class=efficient' if row.efficient else ''}>"
        + "".join(f"<td>{escape(text)}</td>" for text in row.cells())
        + "</tr>"
        for row in rows
    )
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _details(name: str, run: Run) -> str:
    config = dict(run.config)
    if isinstance(config.get("cost_model"), dict):  # long; its head says which one it was
        model = config["cost_model"]
        config["cost_model"] = {key: model.get(key) for key in ("kind", "form", "hardware", "model", "accuracy")}
    shown = {"config": config, "meta": run.meta, "summary": run.summary}
    text = json.dumps(shown, indent=1, default=str)
    return f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"
