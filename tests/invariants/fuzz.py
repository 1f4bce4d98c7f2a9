"""Many random scenarios, counted: ``python -m tests.invariants.fuzz --scenarios 2000 --out reports/cpu/...json``."""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from aspire.evidence import write_evidence
from aspire.scheduler import PolicySpec
from tests.invariants.lossless import Tally, check_lossless
from tests.invariants.scenarios import Dice, Scenario, Schedule, draw_scenario, draw_schedule

SHOWN_FAILURES = 5


def fuzz_scenario(number: int) -> Scenario:
    """The scenario of ``number``: anything goes."""
    return draw_scenario(Dice(number))


def plain_scenario(number: int) -> Scenario:
    """`fixed` or `aspire` at T = 0, 0.7 or 1.0 with top-k 50 and top-p 0.9: the cases of the first promise."""
    scenario, dice = draw_scenario(Dice(number)), Dice(number)
    schedule = draw_schedule(dice, 0, 2)
    kind, temperature = ("fixed", "aspire")[number % 2], (0.0, 0.7, 1.0)[number // 2 % 3]
    params = {"g": dice.integer(1, 6)} if kind == "fixed" else {"cost_ratio": dice.choice((0.05, 0.2, 0.6))}
    spec = PolicySpec(kind=kind, params=params, selector=schedule.spec.selector)
    asks = tuple(
        replace(
            ask,
            abort_step=None,
            params=replace(
                ask.params,
                temperature=temperature,
                top_k=50 if temperature else 0,
                top_p=0.9 if temperature else 1.0,
                min_p=0.0,
            ),
        )
        for ask in scenario.asks
    )
    return replace(scenario, asks=asks, schedules=(Schedule(0, spec),))


def run_many(count: int, first: int, make: Any, quiet: bool = False) -> tuple[int, Tally, list[str]]:
    """``(scenarios run, what they covered, failures)``."""
    total, failures, last = Tally(), [], time.monotonic()
    for number in range(first, first + count):
        try:
            total += check_lossless(make(number), dense=number % 4 == 0)
        except Exception as error:  # noqa: BLE001  (a crash is a failure like any other)
            failures.append(f"scenario {number}: {type(error).__name__}: {error}")
            if len(failures) <= SHOWN_FAILURES:
                print(failures[-1], file=sys.stderr)
        if not quiet and time.monotonic() - last > 20:
            last = time.monotonic()
            print(f"{number - first + 1}/{count} scenarios, {len(failures)} failures", file=sys.stderr)
    return count, total, failures


def main() -> int:
    """Run, print the count, write the evidence file if asked; exit 1 on any failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first scenario; random: -1")
    parser.add_argument("--plain", action="store_true", help="only fixed and aspire at T = 0, 0.7, 1.0")
    parser.add_argument("--out", type=Path, help="evidence file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first = random.randrange(10**9) if options.first < 0 else options.first
    start = time.monotonic()
    make = plain_scenario if options.plain else fuzz_scenario
    count, total, failures = run_many(options.scenarios, first, make)
    seconds = time.monotonic() - start
    print(f"{count} scenarios from number {first}, {len(failures)} failures, {seconds:.0f} s; {asdict(total)}")
    if options.out is not None:
        detail = {"first": first, "seconds": round(seconds, 1), **asdict(total), "failures": failures[:SHOWN_FAILURES]}
        if options.plain:
            passed = count - len(failures) if not failures else 0
            results = [
                {"id": "spine.lossless_cases", "value": passed, "unit": "cases", "n": count, "detail": detail},
                {"id": "spine.lossless_failures", "value": len(failures), "unit": "cases", "n": count},
            ]
        else:
            results = [
                {"id": "lossless.fuzz_scenarios", "value": count, "unit": "scenarios", "n": count, "detail": detail},
                {"id": "lossless.fuzz_failures", "value": len(failures), "unit": "scenarios", "n": count},
            ]
        write_evidence(options.out, results, command="python -m tests.invariants.fuzz " + " ".join(sys.argv[1:]))
        print(f"wrote {options.out}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
