"""How much load does a setup carry? The highest request rate at which enough requests meet their limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aspire.errors import UsageError
from aspire_simulator.scenario import Scenario


@dataclass(frozen=True)
class Probe:
    """One simulated rate."""

    request_rate: float
    goodput_share: float
    met: bool
    summary: dict[str, Any]


@dataclass(frozen=True)
class Capacity:
    """``request_rate``: highest rate that met the target; ``bound``: lowest rate that did not (inf if none was
    found).
    """

    request_rate: float
    bound: float
    attainment: float
    probes: tuple[Probe, ...]
    note: str

    def to_dict(self) -> dict[str, Any]:
        """JSON object."""
        return {
            "request_rate": self.request_rate,
            "bound": self.bound if math.isfinite(self.bound) else None,
            "attainment": self.attainment,
            "note": self.note,
            "probes": [
                {"request_rate": p.request_rate, "goodput_share": p.goodput_share, "met": p.met} for p in self.probes
            ],
        }


def find_capacity(
    scenario: Scenario,
    *,
    attainment: float = 0.95,
    start_rate: float = 1.0,
    tolerance: float = 0.05,
    max_probes: int = 20,
    progress: Callable[[Probe], None] | None = None,
) -> Capacity:
    """Double (or halve) the rate until the answer is bracketed, then bisect in the logarithm of the rate.

    A rate is met when at least ``attainment`` of the requests keep the limits of ``scenario.goodput``. Stops when the
    bracket is narrower than ``tolerance`` (relative), after ``max_probes`` simulations, or when a rate is so high that
    it is the same as all requests at once. Arrivals of all rates are the same draws, scaled: the answer does not
    jitter. A rate that lasts less than a few times the end-to-end latency measures a burst, so give enough prompts.
    """
    if not scenario.goodput:
        raise UsageError("capacity needs limits: give --goodput, e.g. 'ttft:2000 tpot:50'")
    if scenario.dataset_path is not None:
        raise UsageError(
            "capacity varies the request rate, which a trace fixes; give --input-len and --output-len instead"
        )
    if not 0.0 < attainment <= 1.0:
        raise UsageError(f"attainment {attainment} is not in 0..1; give a share such as 0.95")
    if not (start_rate > 0 and math.isfinite(start_rate) and tolerance > 0 and max_probes > 1):
        raise UsageError("capacity needs a positive start rate and tolerance, and at least 2 probes")
    probes: list[Probe] = []

    def met(rate: float) -> bool:
        summary = scenario.with_(request_rate=rate).run().summary
        share = float(summary["goodput_share"])
        probes.append(Probe(rate, share, share >= attainment, summary))
        if progress is not None:
            progress(probes[-1])
        return probes[-1].met

    low, high = 0.0, math.inf
    rate = start_rate
    note = ""
    while len(probes) < max_probes and (low == 0.0 or math.isinf(high)):
        if met(rate):
            low = rate
            if rate * float(probes[-1].summary["duration"]) > 50 * scenario.num_prompts:
                note = "all requests at once still meet the limits: the rate is not what bounds this setup"
                break
            rate *= 2
        else:
            high = rate
            if rate * float(probes[-1].summary.get("mean_e2el_ms", math.inf)) / 1e3 < 0.02:
                note = "even requests that run alone miss the limits: no rate is low enough"
                break
            rate /= 2
    while low > 0 and math.isfinite(high) and high / low > 1 + tolerance and len(probes) < max_probes:
        rate = math.sqrt(low * high)
        if met(rate):
            low = rate
        else:
            high = rate
    if not note and len(probes) >= max_probes and (low == 0.0 or high / low > 1 + tolerance):
        note = f"stopped after {max_probes} simulations before the bracket was narrow enough"
    return Capacity(low, high, attainment, tuple(probes), note)
