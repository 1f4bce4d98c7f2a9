"""Gather benches of several cells into one evidence file: every policy against autoregressive decoding.

    aspire bench ... -o runs/policies/docs-128x7k     (a folder a cell, named as the cell shall be called)
    python reports/collect_policies.py runs/policies/* -o reports/h200/policies.json

A *cell* is a workload, a batch and a temperature. The worst gain of `goodput` over autoregressive decoding over all
cells is `policy.goodput_worst_over_ar`; what the texts had in common is `lossless.bench_text_equal_share`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in (".", "kernels", "calibration", "simulator")]

from aspire.errors import InputError  # noqa: E402
from aspire.fileio import read_json, write_json_atomic  # noqa: E402
from aspire_simulator.fidelity import measured_meta, run_directories  # noqa: E402

BASELINE, OURS = "autoregressive", "goodput"
KEPT = ("label", "gain", "text_equal_share", "equal_outputs", "compared_outputs", "largest_margin", "margin_shift")
METRICS = ("acceptance_length", "mean_draft_length", "decode_only_share", "median_ttft_ms", "median_tpot_ms", "steps")


def cell(folder: Path) -> list[dict[str, Any]]:
    """Evidence of one bench: a result a policy; raises `InputError` when it lacks the baseline."""
    policies = read_json(folder / "bench.json", "bench result")["policies"]
    if not any(each["policy"]["kind"] == BASELINE for each in policies):
        raise InputError(f"{folder} has no run of {BASELINE}; gather whole benches")
    results = []
    for each in policies:
        rates = sorted(each["decode_only_throughput"])
        results.append(
            {
                "id": f"policies.{folder.name}.{each['label']}",
                "value": rates[(len(rates) - 1) // 2],
                "unit": "tok/s",
                "n": len(rates),
                "spread": [rates[0], rates[-1]],
                "detail": {
                    "cell": folder.name,
                    "policy": each["policy"],
                    **{key: each[key] for key in KEPT},
                    **{key: each["summary"][key] for key in METRICS if key in each["summary"]},
                    "synthetic_acceptance": each["synthetic_acceptance"],
                },
            }
        )
    return results


def worst(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The least gain of `goodput` over the baseline, and that of every cell; raises `InputError` without any."""
    gains = {
        f"{each['detail']['cell']} {each['detail']['label']}": each["detail"]["gain"]
        for each in results
        if each["detail"]["policy"]["kind"] == OURS
    }
    if not gains:
        raise InputError(f"no bench ran {OURS}; give it as --policy {OURS}")
    return {
        "id": "policy.goodput_worst_over_ar",
        "value": min(gains.values()),
        "unit": "x",
        "n": len(gains),
        "spread": [min(gains.values()), max(gains.values())],
        "detail": {"gains": gains},
    }


def texts(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Share of the texts of drafting policies that equal autoregressive decoding."""
    drafting = [each["detail"] for each in results if each["detail"]["policy"]["kind"] != BASELINE]
    compared = sum(each["compared_outputs"] for each in drafting)
    margins = [each["largest_margin"] for each in drafting if each["largest_margin"] is not None]
    return {
        "id": "lossless.bench_text_equal_share",
        "value": sum(each["equal_outputs"] for each in drafting) / compared if compared else None,
        "unit": "of texts",
        "n": compared,
        "spread": None,
        "detail": {"largest_margin_where_texts_part": max(margins, default=None)},
    }


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: a row a policy and cell."""
    lines = ["| cell | policy | decode tok/s | over AR | tokens a round | equal texts |", "|---|---|---|---|---|---|"]
    for each in results:
        detail = each["detail"]
        tokens = detail.get("acceptance_length")
        columns = (
            detail["cell"],
            f"`{detail['label']}`",
            f"{each['value']:,.0f}",
            f"{detail['gain']:.2f}",
            "" if tokens is None else f"{tokens:.2f}",
            f"{detail['equal_outputs']}/{detail['compared_outputs']}",
        )
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the evidence file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", type=Path, nargs="+", help="output folders of aspire bench")
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    results = [result for folder in given.benches for result in cell(folder)]
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    meta = measured_meta(run_directories(given.benches), command)
    write_json_atomic(given.out, {"meta": meta, "results": [worst(results), texts(results), *results]})
    print(table(results))
    print(f"{given.out}: {len(given.benches)} cells, {len(results)} results", file=sys.stderr)


if __name__ == "__main__":
    main()
