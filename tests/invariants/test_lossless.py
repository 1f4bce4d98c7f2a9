"""fp32: under every policy, selector, batch, preemption, abort and switch the output is the autoregressive one."""

from __future__ import annotations

from hypothesis import given

from tests.invariants.lossless import check_lossless
from tests.invariants.scenarios import Scenario, scenarios


@given(scenarios())
def test_any_schedule_gives_the_autoregressive_output(scenario: Scenario) -> None:
    check_lossless(scenario, dense=True)
