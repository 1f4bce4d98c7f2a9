"""Controllers: they settle on a steady load, follow a change, and are not locked in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aspire.rundir import Run
from aspire.runlog import VERIFY
from aspire.scheduler import POLICIES, SchedulerConfig
from aspire_simulator.acceptance import AcceptanceModel, Iid, RandomAcceptance
from aspire_simulator.executor import simulate
from aspire_simulator.metrics import summarize
from aspire_simulator.oracle import parse_policy
from aspire_simulator.workload import synthetic
from tests.simulator.helpers import LinearCost

OUTPUT = 600
ADAPTIVE = [kind for kind in ("fsm", "aspire", "goodput") if kind in POLICIES]
# `aspire` learns only from drafts: once it drafts nothing it never learns that drafting would pay again
RECOVER = [kind for kind in ("fsm", "goodput") if kind in POLICIES]


@dataclass(frozen=True)
class Turning(RandomAcceptance):
    """Acceptance ``before`` up to the middle of the output, ``after`` from there on."""

    kind = "turning"
    before: float = 0.1
    after: float = 0.97

    def _difficulty(self, rng: np.random.Generator, length: int) -> NDArray[np.float64]:
        return rng.random(length) - np.where(np.arange(length) < OUTPUT // 2, self.before, self.after)

    def log_likelihood(self, train: Any, test: Any) -> Any:
        raise NotImplementedError


def run(policy: str, acceptance: AcceptanceModel, kv: float = 1e-7) -> Run:
    limits = SchedulerConfig(8, 64_000, 8192, 8 * 513, 4)
    work = synthetic(8, 6000, OUTPUT)
    return simulate(work, parse_policy(policy), LinearCost(base=2e-4, token=1e-5, kv=kv), acceptance, limits)


def drafts(found: Run, first: int, last: int) -> NDArray[np.int32]:
    """Draft lengths of the rounds that began between two output positions."""
    log = found.steps
    place = log.column("context") - 6000
    rounds = (log.column("mode") == VERIFY) & (place >= first) & (place < last)
    return log.column("drafted")[rounds]


@pytest.mark.parametrize("policy", RECOVER)
def test_never_locked_out_of_longer_drafts(policy: str) -> None:
    found = run(policy, Turning())
    assert drafts(found, 100, 280).mean() < 2.5
    assert drafts(found, 450, 590).mean() > 4


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_follows_acceptance_down(policy: str) -> None:
    found = run(policy, Turning(0.97, 0.1))
    assert drafts(found, 100, 280).mean() > 4
    assert drafts(found, 450, 590).mean() < 2.5


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_settles_on_a_steady_load(policy: str) -> None:
    """In the second half of a steady run draft lengths have neither drift nor wild swings."""
    found = run(policy, Iid(0.9))
    early, late = drafts(found, 200, 400), drafts(found, 400, 590)
    assert abs(early.mean() - late.mean()) < 1.5
    assert late.std() < 4.5


@pytest.mark.parametrize("policy", ["goodput"])
def test_speculation_never_loses_by_more_than_noise(policy: str) -> None:
    if policy not in POLICIES:
        pytest.skip("the goodput policy is not here yet")
    for acceptance in (Iid(0.05), Iid(0.5), Iid(0.95)):
        for kv in (1e-10, 1e-8, 1e-7):
            ours = summarize(run(policy, acceptance, kv))["decode_only_throughput"]
            plain = summarize(run("autoregressive", acceptance, kv))["decode_only_throughput"]
            assert ours > 0.97 * plain, (acceptance, kv)
