"""Draw what `reports/measure_acceptance.py` measured: a figure, and a page of tables.

python reports/draw_acceptance.py reports/h200/acceptance.json --figure FILE.svg --table FILE.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from aspire.fileio import write_text_atomic  # noqa: E402

matplotlib.rcParams["svg.hashsalt"] = "aspire"  # the same file from the same figures

Cell = dict[str, Any]
FORM, PARENTS = "refresh-per-layer", ("verify-per-layer", "refresh")
RESAMPLES = 2000


class Measured:
    """The cells of an evidence file: `cell` is None for one that was left out."""

    def __init__(self, path: Path) -> None:
        document = json.loads(path.read_text(encoding="utf-8"))
        self.meta = document["meta"]
        self.results = {result["id"]: result for result in document["results"]}
        cells = [each["detail"] for each in document["results"] if "label" in each.get("detail", {})]
        self._cells = {(cell["label"], cell["workload"], cell["temperature"]): cell for cell in cells}
        self.labels = list(dict.fromkeys(label for label, _, _ in self._cells))
        self.places = list(dict.fromkeys((workload, temperature) for _, workload, temperature in self._cells))

    def cell(self, label: str, place: tuple[str, float]) -> Cell | None:
        return self._cells.get((label, *place))

    def mean(self, label: str, temperature: float) -> float | None:
        """Mean of the accepted drafts over the workloads; None unless all of them were measured."""
        cells = [self.cell(label, place) for place in self.places if place[1] == temperature]
        values = [None if cell is None else cell["accepted_mean"] for cell in cells]
        return None if not values or None in values else float(np.mean(values))


def split(label: str) -> tuple[str, float]:
    """Selector (with its form) and budget."""
    selector, _, share = label.rpartition("@")
    return selector, float(share)


def table(found: Measured) -> str:
    """Accepted drafts of every selector and budget, by workload and temperature."""
    heads = [f"{workload} T {temperature:g}" for workload, temperature in found.places]
    lines = [f"| selector | budget | {' | '.join(heads)} | mean |", "|---" * (len(heads) + 3) + "|"]
    for label in sorted(found.labels, key=lambda each: (split(each)[1], found.labels.index(each))):
        selector, share = split(label)
        values = [
            None if cell is None else cell["accepted_mean"] for cell in (found.cell(label, p) for p in found.places)
        ]
        known = [value for value in values if value is not None]
        texts = ["" if value is None else f"{value:.2f}" for value in values]
        mean = f"{np.mean(known):.2f}" if len(known) == len(values) else ""
        lines.append(f"| `{selector}` | {share:.0%} | {' | '.join(texts)} | {mean} |")
    return "\n".join(lines)


def gain(found: Measured, label: str, other: str) -> tuple[float, float, float] | None:
    """Accepted drafts of ``label`` less those of ``other``, mean over cells, with a 95 % interval over requests."""
    pairs = []
    for place in found.places:
        ours, theirs = found.cell(label, place), found.cell(other, place)
        if ours is None or theirs is None:
            return None
        pairs.append(np.subtract(ours["accepted_by_request"], theirs["accepted_by_request"]))
    rng = np.random.default_rng(0)
    means = np.zeros(RESAMPLES)
    for pair in pairs:
        means += pair[rng.integers(len(pair), size=(RESAMPLES, len(pair)))].mean(axis=1) / len(pairs)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(np.mean([pair.mean() for pair in pairs])), float(low), float(high)


def against_parents(found: Measured) -> str:
    """Every form of refresh-per-layer against both kinds that it joins, at the same budget."""
    lines = [f"| form | budget | over `{PARENTS[0]}` | over `{PARENTS[1]}` |", "|---|---|---|---|"]
    for label in found.labels:
        selector, share = split(label)
        if not selector.startswith(FORM):
            continue
        texts = []
        for parent in PARENTS:
            value = gain(found, label, f"{parent}@{share:g}")
            texts.append("" if value is None else f"{value[0]:+.2f} ({value[1]:+.2f} to {value[2]:+.2f})")
        lines.append(f"| `{selector}` | {share:.0%} | {' | '.join(texts)} |")
    return "\n".join(lines)


def lossless(found: Measured) -> str:
    """What the comparison with plain decoding gave, in words."""
    share = found.results["lossless.gpu_text_equal_share"]
    gap = found.results["lossless.gpu_largest_gap"]
    shift = gap["detail"]["margin_shift"]
    text = f"{share['value']:.2%} of {share['n']} texts equal plain decoding token for token"
    if gap["n"]:
        text += (
            f"; in the {gap['n']} others the two best scores of plain decoding were at most {gap['value']:.3g} apart"
        )
    if shift["tokens"]:
        text += (
            f". Over {shift['tokens']} tokens that are equal, rounding moved the gap between the two best scores by "
            f"{shift['median']:.2g} in the median, {shift['p99']:.2g} at the 99th percentile and {shift['max']:.2g} "
            "at most"
        )
    return text + "."


def page(found: Measured, source: Path) -> str:
    """The Markdown page."""
    meta, left_out = found.meta, found.results["acceptance.cells_left_out"]["value"]
    first = next(result for result in found.results.values() if "label" in result.get("detail", {}))
    parts = [
        "# Acceptance by page selector",
        f"From `{source.name}` beside this file ({meta['hardware']}, commit {str(meta['commit'])[:7]}), "
        f"drawn by `reports/draw_acceptance.py`. Accepted {first['unit']}; the mean over all requests and rounds.",
        table(found),
        "## Refreshed lists against what they join",
        "Accepted drafts more, mean over all cells, with a 95 % interval over requests.",
        against_parents(found),
        "## Texts",
        lossless(found),
    ]
    if left_out:
        parts.append(f"{left_out} cells were left out for lack of time.")
    return "\n\n".join(parts) + "\n"


def draw(found: Measured, path: Path) -> None:
    """Accepted drafts by budget at each temperature; at the most telling budget, acceptance by draft position."""
    temperatures = sorted({temperature for _, temperature in found.places})
    plain = [label for label in found.labels if "[" not in label]
    kinds = list(dict.fromkeys(split(label)[0] for label in plain))
    figure, axes = plt.subplots(
        1, len(temperatures) + 1, figsize=(4 * len(temperatures) + 4, 3.6), layout="constrained"
    )
    for axis, temperature in zip(axes, temperatures, strict=False):
        for kind in kinds:
            points = [(split(label)[1], found.mean(label, temperature)) for label in plain if split(label)[0] == kind]
            known = sorted((share, value) for share, value in points if value is not None)
            axis.plot([100 * share for share, _ in known], [value for _, value in known], marker="o", label=kind)
        axis.set_xlabel("pages that a draft step reads, % of the context")
        axis.set_title(f"T = {temperature:g}, mean of the workloads", fontsize=9)
    axes[0].set_ylabel("accepted drafts of a round")
    axes[0].legend(fontsize=7, frameon=False)
    share = split(found.labels[0])[1]
    for kind in kinds:
        cells = [found.cell(f"{kind}@{share:g}", place) for place in found.places if place[1] == temperatures[-1]]
        curves = [cell["conditional_acceptance_by_position"] for cell in cells if cell is not None]
        if curves and len({len(curve) for curve in curves}) == 1:
            axes[-1].plot(np.arange(1, len(curves[0]) + 1), np.mean(curves, axis=0), marker="o", markersize=3)
    axes[-1].set_xlabel("draft position")
    axes[-1].set_title(f"accepted if all before were, T = {temperatures[-1]:g}, {share:.0%}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Write the figure and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evidence", type=Path)
    parser.add_argument("--figure", type=Path, required=True)
    parser.add_argument("--table", type=Path, required=True)
    given = parser.parse_args()
    found = Measured(given.evidence)
    draw(found, given.figure)
    write_text_atomic(given.table, page(found, given.evidence))
    print(f"{given.figure} and {given.table}: {len(found.labels)} settings in {len(found.places)} workloads")


if __name__ == "__main__":
    main()
