"""How fast is the simulator? ``python -m aspire_simulator.benchmark [--out FILE] [--trace MOONCAKE.jsonl] [--quick]``

Offline runs on one core: 128 slots, prompts of 1,024 tokens, outputs of 512, an analytic cost model. Prints steps per
second and writes an evidence file. Seconds are CPU seconds of this single-threaded process, so that a busy machine
does not distort them; wall seconds stand beside them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from aspire.evidence import write_evidence
from aspire_simulator.executor import Simulation
from aspire_simulator.scenario import Scenario

OFFLINE = Scenario(
    cost_model="analytic:h200:smollm2-135m",
    acceptance="beta:20,2",
    input_len=1024,
    output_len=512,
    max_num_seqs=128,
)
POLICIES = ("aspire", "fixed:g=5", "autoregressive")


def measure(scenario: Scenario, repeats: int = 3) -> dict[str, Any]:
    """CPU and wall seconds of the simulation (workload and cost model are loaded before), medians of ``repeats``
    runs.
    """
    cpu, wall = [], []
    for _ in range(repeats):
        simulation: Simulation = scenario.simulation()
        began = time.process_time(), time.perf_counter()
        run = simulation.run()
        cpu.append(time.process_time() - began[0])
        wall.append(time.perf_counter() - began[1])
    return {
        "cpu_s": median(cpu),
        "wall_s": median(wall),
        "spread_s": max(cpu) - min(cpu),
        "repeats": repeats,
        "steps": len(run.steps),
        "steps_per_cpu_s": len(run.steps) / median(cpu),
        "finished": run.requests.status.count("length"),
        "rejected": run.requests.status.count("rejected"),
        "simulated_s": float((run.steps.start_s + run.steps.duration_s)[-1]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one line per case."""
    parser = argparse.ArgumentParser(prog="python -m aspire_simulator.benchmark", description=__doc__)
    parser.add_argument("--out", help="evidence file to write, e.g. reports/cpu/simulator_speed.json")
    parser.add_argument("--trace", help="a Mooncake trace to run to its end")
    parser.add_argument("--quick", action="store_true", help="1,000 requests only, one repeat")
    given = parser.parse_args(arguments)
    results = []
    for count, repeats in ((1_000, 1),) if given.quick else ((1_000, 9), (10_000, 3)):
        cases = {policy: measure(OFFLINE.with_(num_prompts=count, policy=policy), repeats) for policy in POLICIES}
        for policy, case in cases.items():
            print(_line(f"{count:,} requests, {policy}", case))
        slowest = max(cases.values(), key=lambda case: float(case["cpu_s"]))
        results.append(_result(f"sim.seconds_{count // 1000}k_requests", slowest, {"policies": cases}))
    if given.trace:
        trace = Scenario(
            cost_model="analytic:h200:llama-3.1-8b",
            policy="aspire",
            acceptance="longbench-like",
            dataset_path=given.trace,
            max_num_seqs=128,
            num_pages=50_000,
        )
        case = measure(trace, 1)
        print(_line(f"trace {given.trace.rsplit('/', 1)[-1]}, aspire", case))
        results.append(_result("sim.seconds_mooncake_trace", case, {}))
    if given.out:
        print(f"wrote {write_evidence(given.out, results)}")


def _line(name: str, case: dict[str, Any]) -> str:
    return (
        f"{name}: {case['cpu_s']:.2f} s CPU ({case['wall_s']:.2f} s wall), {case['steps']:,} steps, "
        f"{case['steps_per_cpu_s']:,.0f} steps/s, {case['finished']:,} finished, {case['rejected']} rejected"
    )


def _result(name: str, case: dict[str, Any], detail: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": name,
        "value": case["cpu_s"],
        "unit": "s",
        "n": case["repeats"],
        "spread": case["spread_s"],
        "detail": {**case, **detail},
    }


if __name__ == "__main__":
    main()
