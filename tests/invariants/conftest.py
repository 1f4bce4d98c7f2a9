"""Says how many random scenarios ran (``make fuzz``), and writes the evidence file that ASPIRE_EVIDENCE names."""

from __future__ import annotations

import os
from typing import Any

_RAN, _FAILED = "lossless.fuzz_scenarios", "lossless.fuzz_failures"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Properties of reports come from all workers to the one that prints."""
    totals = {_RAN: 0, _FAILED: 0}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            if getattr(report, "when", None) == "teardown" or not hasattr(report, "user_properties"):
                continue
            for name, value in report.user_properties:
                if name in totals and report.when == "call":
                    totals[name] += value
    if not totals[_RAN]:
        return
    terminalreporter.write_line(f"{totals[_RAN]} random scenarios ran, {totals[_FAILED]} failures")
    path = os.environ.get("ASPIRE_EVIDENCE")
    if path:
        from aspire.evidence import write_evidence

        results = [
            {"id": name, "value": count, "unit": "scenarios", "n": totals[_RAN]} for name, count in totals.items()
        ]
        write_evidence(path, results)
        terminalreporter.write_line(f"wrote {path}")
