"""Draw docs/figure.svg of the README from the evidence files under reports/: ``python reports/make_figure.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
matplotlib.rcParams["svg.hashsalt"] = "aspire"  # the same file from the same figures

KERNELS = {
    "kernel.attn_full_llama8b_8x100k": "decode 8 x 100k\n32/8 heads, 128",
    "kernel.attn_full_llama8b_32x16k": "decode 32 x 16k\n32/8 heads, 128",
    "kernel.attn_full_smol_128x7k": "decode 128 x 7k\n9/3 heads, 64",
    "kernel.attn_sparse_smol_256x32p": "draft 256 x 32 pages\n9/3 heads, 64",
}
CELL = "policies.docs_128x7k."
RULES = {"fixed": "best fixed", "paper": "the paper's rule", "goodput": "goodput (ours)", "hindsight": "hindsight"}


def results(path: str) -> dict[str, dict[str, Any]]:
    """The results of an evidence file by id."""
    return {row["id"]: row for row in json.loads((ROOT / path).read_text(encoding="utf-8"))["results"]}


def main() -> None:
    """Three panels: policies in the engine, draft-length rules on recorded rounds, kernels over copy bandwidth."""
    figure, (first, left, right) = plt.subplots(1, 3, figsize=(15, 3.6), width_ratios=[2, 3, 2], layout="constrained")
    measured = results("reports/h200/policies.json")
    rates = {name.removeprefix(CELL): row["value"] / 1e3 for name, row in measured.items() if name.startswith(CELL)}
    names = sorted(rates, key=lambda name: rates[name])
    first.barh([name.replace("+verify-per-layer", "") for name in names], [rates[name] for name in names])
    first.bar_label(first.containers[0], [f"{rates[name] / rates['autoregressive']:.2f}x" for name in names], padding=3)
    first.set_xlim(0, 1.2 * max(rates.values()))
    first.set_xlabel("thousand tokens per second, decoding")
    first.set_title("Policies on one NVIDIA H200, 128 x 7k\nSmolLM2-135M, real text, T 0.7", fontsize=10)
    cells = results("reports/cpu/policy_offline.json")["policy.goodput_over_paper_offline"]["detail"]["cells"]
    cells = [cell for cell in cells if cell["temperature"] == 0.7 and cell["c"] == 0.15]
    for index, (rule, label) in enumerate(RULES.items()):
        places = [place + 0.2 * (index - 1.5) for place in range(len(cells))]
        left.bar(places, [cell[rule]["rate"] for cell in cells], 0.19, label=label)
    left.set_xticks(range(len(cells)), [cell["workload"] for cell in cells])
    left.set_ylabel("tokens per verification time")
    left.set_title("Draft-length rules on recorded rounds\nSmolLM2-135M, T 0.7, draft cost 0.15", fontsize=10)
    left.legend(fontsize=8, ncols=2, loc="lower right")
    kernels = results("reports/h200/kernels.json")
    values = [kernels[name]["value"] for name in KERNELS]
    right.barh(list(KERNELS.values()), values, color="tab:green")
    right.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    right.bar_label(right.containers[0], [f"{value:.2f}" for value in values], padding=3, fontsize=8)
    right.set_xlim(0, 1.25)
    right.tick_params(axis="y", labelsize=8)
    right.set_title("Attention kernels on one NVIDIA H200\nbytes that must move, over copy bandwidth", fontsize=10)
    figure.savefig(ROOT / "docs" / "figure.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
