"""Write the table of README.md from the evidence files under reports/.

    python reports/make_readme_table.py            rewrite the table
    python reports/make_readme_table.py --check    exit 1 if a row of README.md is not what the evidence says

Only figures that an evidence file holds appear; the file of each is linked.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- table: reports/make_readme_table.py -->", "<!-- end of table -->"

# id -> what a reader should see; the order of the rows
ROWS = {
    "evidence.real_256x7k_tuned_over_ar": "SmolLM2-135M, real text, batch 256, 7k context, T 0.7: tuned over AR",
    "evidence.tuned_over_best_in_step_mean": "tuned policy over the best in-step baseline, mean of real-model cells",
    "evidence.qwen3_1.7b_mean": "Qwen3-1.7B shape, synthetic acceptance, mean over five contexts: over autoregressive",
    "evidence.qwen3_8b_mean": "Qwen3-8B shape, synthetic acceptance: over autoregressive",
    "evidence.llama31_8b_mean": "Llama-3.1-8B shape, synthetic acceptance: over autoregressive",
    "tune.observed_gain_over_ar": "tuned policy over autoregressive, SmolLM2-135M, real text, 128 x 7k, T 0.7",
    "tune.observed_gain_over_aspire_default": "the same over the untuned aspire policy",
    "policy.goodput_over_paper_offline": "goodput policy over the paper's rule, recorded rounds",
    "policy.goodput_worst_over_ar": "goodput policy, worst cell (4 x 512), over autoregressive",
    "step.ar_smol_256x7.9k_ms": "autoregressive step, SmolLM2-135M, 256 x 7.9k, end to end",
    "step.ar_smol_128x7.9k_ms": "autoregressive step, SmolLM2-135M, 128 x 7.9k",
    "step.ar_llama8b_32x16k_ms": "autoregressive step, Llama-3.1-8B shape, 32 x 16k",
    "step.draft_smol_128_ms": "draft step, SmolLM2-135M, 128 rows",
    "step.host_bubble_smol_128": "time the GPU waits for the host, 128 rows",
    "kernel.attn_full_llama8b_32x16k": "decode attention, 32 x 16k, 32/8 heads",
    "kernel.attn_sparse_smol_256x32p": "draft attention, 256 rows of 32 pages, 9/3 heads",
    "calib.mape_mixed": "cost model, held-out mean error of mixed steps",
    "sim.throughput_error_mean": "simulator, decode throughput against measured, mean error",
    "sim.composition_equal": "recorded GPU steps that the replay composes identically, at the commit of the recording",
    "prefix.prefill_share_saved": "prefill saved where 64 requests share a 4k prefix",
    "soak.lost_or_changed": "requests lost or changed in random traffic on the GPU, float32 and bfloat16, of {n:,}",
    "sim.seconds_1k_requests": "simulating 1,000 requests on one core",
    "lossless.fuzz_scenarios": "random scenarios checked against autoregressive output, none differing",
    "spine.demo_minutes": "make demo from nothing, 2 cores",
}


def evidence() -> dict[str, tuple[dict[str, Any], Path]]:
    """id -> (result, file) of all evidence files; a later file name wins."""
    found: dict[str, tuple[dict[str, Any], Path]] = {}
    for path in sorted((ROOT / "reports").glob("*/*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        for result in document.get("results", ()) if isinstance(document, dict) else ():
            found[result["id"]] = (result, path)
    return found


def table() -> str:
    """The Markdown table of the rows that have evidence."""
    found = evidence()
    lines = ["| what | value | measured on | evidence |", "|---|---|---|---|"]
    for name, text in ROWS.items():
        if name in found:
            result, path = found[name]
            link = path.relative_to(ROOT).as_posix()
            what = text.format(n=result.get("n"))
            lines.append(f"| {what} | {_value(result)} | {path.parent.name} | [{path.name}]({link}) |")
    return "\n".join(lines) if len(lines) > 2 else "No measurement has been committed yet."


def _value(result: dict[str, Any]) -> str:
    value, unit = result["value"], result.get("unit") or ""
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"**{number}{unit}**" if unit == "x" else f"**{number}** {unit}".strip()


def main() -> int:
    """Rewrite or check README.md; returns the exit code."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        stale = [row for row in rest.partition(END)[0].splitlines() if row.startswith("|") and row not in wanted]
        if stale:
            print(f"not what the evidence says: {stale[0]}\nrun: python reports/make_readme_table.py", file=sys.stderr)
        return int(bool(stale))
    readme.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
