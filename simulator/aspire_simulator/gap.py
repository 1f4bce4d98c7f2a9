"""How much of hindsight's throughput does each policy leave behind?

``python -m aspire_simulator.gap --rounds ROUNDS.npz --cost-model cost_model.json [--out FILE]`` runs every policy and
the oracle on recorded rounds with their margins, over cells of batch and recorded workload, and writes an evidence
file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aspire.errors import UsageError
from aspire.evidence import write_evidence
from aspire.scheduler import POLICIES
from aspire_simulator.metrics import oracle_gap
from aspire_simulator.parallel import workers
from aspire_simulator.scenario import Scenario

# recorded workloads at T = 0.7 and the context they were recorded at
WORKLOADS: dict[str, int] = {"gsm4k_0.7": 4000, "doc4k_0.7": 4200, "doc7k_0.7": 7100}
BATCHES: tuple[int, ...] = (32, 128, 256)
COMPARED: tuple[str, ...] = ("goodput", "aspire", "fsm", "fixed", "staggered", "autoregressive")
OUTPUT_TOKENS = 256


def oracle_gaps(
    rounds: str,
    cost_model: str,
    *,
    policies: Sequence[str] = (),
    batches: Sequence[int] = BATCHES,
    workloads: dict[str, int] | None = None,
    selector: str = "verify-per-layer",
    seed: int = 0,
    ahead: bool = False,
    num_workers: int = 1,
    progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Cells ``{batch, context, workload, oracle_tok_s, tok_s: {policy}, gap: {policy}}``.

    A full batch of equal prompts, all prefilled in one step, outputs of 256 tokens; throughput of the steps with a
    full batch.
    ``selector`` prices the drafts as those that were recorded (per-layer lists). ``ahead``: steps are planned before
    the outcome of the one before is known; the oracle always knows it.
    """
    policies = policies or [kind for kind in COMPARED if kind in POLICIES]
    if unknown := [kind for kind in policies if kind not in POLICIES]:
        raise UsageError(f"policies {unknown} are not known; allowed: {', '.join(POLICIES)}")
    jobs = []
    for workload, context in (workloads or WORKLOADS).items():
        for batch in batches:
            cell = Scenario(
                cost_model=cost_model,
                acceptance=f"recorded:{rounds}:{workload}",
                num_prompts=batch,
                input_len=context,
                output_len=OUTPUT_TOKENS,
                selector=selector,
                max_num_seqs=batch,
                max_num_batched_tokens=batch * (context + 1),
                num_pages=batch * (-(-(context + OUTPUT_TOKENS) // 16) + 2) + 1,
                seed=seed,
                async_scheduling=ahead,
            )
            for policy in ("oracle", *policies):
                jobs.append(((workload, batch, policy), (cell.with_(policy=policy).to_dict(),)))
    rates: dict[tuple[str, int, str], float] = {}
    pool = workers(num_workers)
    try:
        for key, rate in pool.run(jobs, full_batch_rate):
            rates[key] = rate
            if progress is not None:
                progress(f"{key[0]} batch {key[1]} {key[2]}: {rate:,.0f} tok/s")
    finally:
        pool.close()
    cells = []
    for workload, context in (workloads or WORKLOADS).items():
        for batch in batches:
            oracle = rates[workload, batch, "oracle"]
            found = {policy: rates[workload, batch, policy] for policy in policies}
            gaps = {policy: oracle_gap(rate, oracle) for policy, rate in found.items()}
            cells.append(
                {
                    "workload": workload,
                    "batch": batch,
                    "context": context,
                    "oracle_tok_s": oracle,
                    "tok_s": found,
                    "gap": gaps,
                }
            )
    return cells


def full_batch_rate(scenario: dict[str, Any]) -> float:
    """Tokens a second of the steps with a full batch."""
    summary = Scenario.from_dict(scenario).run().summary
    return float(summary.get("full_batch_throughput") or summary["decode_only_throughput"])


def mean_gaps(cells: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean gap over the cells, by policy."""
    return {policy: float(np.mean([cell["gap"][policy] for cell in cells])) for policy in cells[0]["gap"]}


def results_of(cells: Sequence[dict[str, Any]], cost_model: str, suffix: str = "") -> list[dict[str, Any]]:
    """Evidence entries ``sim.oracle_gap<suffix>.<policy>`` and the ratio of the two rules' gaps; printed as well."""
    means = mean_gaps(cells)
    for policy, gap in sorted(means.items(), key=lambda item: item[1]):
        print(f"{policy:15s} mean gap {gap:6.1%} over {len(cells)} cells{suffix.replace('_', ' ')}")
    results: list[dict[str, Any]] = [
        {"id": f"sim.oracle_gap{suffix}.{policy}", "value": gap, "unit": "", "n": len(cells), "detail": {}}
        for policy, gap in means.items()
    ]
    if means.get("aspire", 0.0) > 0 and "goodput" in means:
        ratio = means["goodput"] / means["aspire"]
        print(f"goodput leaves {ratio:.3f} of aspire's gap{suffix.replace('_', ' ')}")
        detail = {"cells": list(cells), "mean_gap": means, "cost_model": cost_model}
        name = f"sim.goodput_gap_over_aspire_gap{suffix}"
        results.append({"id": name, "value": ratio, "unit": "x", "n": len(cells), "detail": detail})
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the gaps and write the evidence file."""
    parser = argparse.ArgumentParser(prog="python -m aspire_simulator.gap", description=__doc__)
    parser.add_argument("--rounds", required=True, help="recorded rounds (.npz)")
    parser.add_argument("--cost-model", required=True, help="cost_model.json or analytic:HARDWARE:MODEL")
    parser.add_argument("--out", help="evidence file to write, e.g. reports/cpu/oracle_gap.json")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args(arguments)
    results = []
    for suffix, ahead, policies in (("", False, ()), ("_planned_ahead", True, ("goodput", "aspire"))):
        cells = oracle_gaps(
            given.rounds,
            given.cost_model,
            policies=policies,
            ahead=ahead,
            num_workers=given.workers,
            progress=print,
        )
        results += results_of(cells, given.cost_model, suffix)
    if given.out:
        print(f"wrote {write_evidence(given.out, results)}")


if __name__ == "__main__":
    main()
