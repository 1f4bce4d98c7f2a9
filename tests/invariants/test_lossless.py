"""fp32: under every policy, selector, batch, preemption, abort and switch the output is the autoregressive one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from tests.invariants.fuzz import plain_scenario
from tests.invariants.lossless import Tally, check_lossless
from tests.invariants.scenarios import Scenario, scenarios


def test_any_schedule_gives_the_autoregressive_output(request: pytest.FixtureRequest) -> None:
    counts = {"lossless.fuzz_scenarios": 0, "lossless.fuzz_failures": 0}

    @given(scenarios())
    def check(scenario: Scenario) -> None:
        counts["lossless.fuzz_scenarios"] += 1
        check_lossless(scenario, dense=True)

    _count_failure(check, counts, request.node)


def _count_failure(check: Any, counts: dict[str, int], node: Any) -> None:
    """Run ``check`` and note how many scenarios ran, also where one failed."""
    try:
        check()
    except BaseException:
        counts["lossless.fuzz_failures"] += 1
        raise
    finally:
        node.user_properties.extend(counts.items())


def test_fixed_and_aspire_at_the_usual_temperatures_and_filters() -> None:
    total = Tally()
    for number in range(12):
        total += check_lossless(plain_scenario(number), dense=True)
    assert 0 < total.accepted < total.drafted and total.preemptions > 0, total
