"""Runs that one H200 made, committed under `reports/h200/runs`: what they recorded is replayed and simulated again."""

from __future__ import annotations

from pathlib import Path

import pytest

from aspire_simulator.validation import validate_run

RUNS = Path(__file__).parents[2] / "reports" / "h200" / "runs"


@pytest.mark.parametrize("policy", ["autoregressive", "fixed", "goodput"])
def test_a_recorded_run_comes_true(policy: str) -> None:
    """Policies without prices compose every step as recorded for good; another rule of `goodput` may compose other
    steps, and its run is then that of the commit in its meta.json."""
    check = validate_run(RUNS / f"docs_32x4k_{policy}")
    assert check.composition.difference == "" or policy == "goodput"
    assert check.passed or policy == "goodput"
    errors = {item.metric: abs(item.error) for item in check.comparisons}
    assert errors["decode_only_throughput"] < 0.06
    assert max(error for metric, error in errors.items() if metric.endswith("_ms")) < 0.1
