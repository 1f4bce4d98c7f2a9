"""ASPIRE's simulator: what-ifs on the engine's own scheduler. numpy and simpy, no torch; matplotlib and optuna when
used.

Describe a what-if
    Scenario                                               workload, policy, costs, acceptance and limits as plain data
    Workload, synthetic, load_trace, trace_stats           requests: drawn, or read from a trace
    parse_acceptance, fit_acceptance, LONGBENCH_LIKE        which drafts are accepted, with which margin
    parse_policy, OracleSpec                               the engine's policies, and the hindsight oracle

Run it
    simulate, Simulation                                   the scheduler on a SimPy clock -> a `Run`
    Sweep, run_sweep                                       a grid of scenarios, resumable
    find_capacity                                          highest request rate within latency limits
    tune, TuneSettings                                     search policies; policy.json with gain and interval

Is it true?
    replay, validate_run                                   a recorded engine run: same steps? same times?
    summarize, oracle_gap, parse_goodput                   metrics of simulated and measured runs alike

Show it
    write_report                                           figures and one HTML page from run directories
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aspire_simulator.acceptance import LONGBENCH_LIKE, AcceptanceModel, acceptance_from_dict, parse_acceptance
    from aspire_simulator.capacity import Capacity, find_capacity
    from aspire_simulator.executor import Simulation, simulate
    from aspire_simulator.fitting import AcceptanceFit, fit_acceptance
    from aspire_simulator.metrics import oracle_gap, parse_goodput, summarize
    from aspire_simulator.oracle import OracleSpec, parse_policy
    from aspire_simulator.replaying import ReplayReport, replay
    from aspire_simulator.report import write_report
    from aspire_simulator.scenario import Scenario
    from aspire_simulator.sweep import Sweep, run_sweep
    from aspire_simulator.traces import load_trace
    from aspire_simulator.tuning import TuneResult, TuneSettings, tune
    from aspire_simulator.validation import RunCheck, validate_run
    from aspire_simulator.workload import Workload, synthetic, trace_stats

# name -> module; imported at first use
_WHERE = {
    "Scenario": "scenario",
    **dict.fromkeys(("Workload", "synthetic", "trace_stats"), "workload"),
    "load_trace": "traces",
    **dict.fromkeys(("AcceptanceModel", "LONGBENCH_LIKE"), "acceptance"),
    **dict.fromkeys(("parse_acceptance", "acceptance_from_dict"), "acceptance"),
    **dict.fromkeys(("AcceptanceFit", "fit_acceptance"), "fitting"),
    **dict.fromkeys(("OracleSpec", "parse_policy"), "oracle"),
    **dict.fromkeys(("Simulation", "simulate"), "executor"),
    **dict.fromkeys(("Sweep", "run_sweep"), "sweep"),
    **dict.fromkeys(("Capacity", "find_capacity"), "capacity"),
    **dict.fromkeys(("TuneResult", "TuneSettings", "tune"), "tuning"),
    **dict.fromkeys(("ReplayReport", "replay"), "replaying"),
    **dict.fromkeys(("RunCheck", "validate_run"), "validation"),
    **dict.fromkeys(("oracle_gap", "parse_goodput", "summarize"), "metrics"),
    "write_report": "report",
}

__all__ = [
    "LONGBENCH_LIKE", "AcceptanceFit", "AcceptanceModel", "Capacity", "OracleSpec", "ReplayReport", "RunCheck",
    "Scenario", "Simulation", "Sweep", "TuneResult", "TuneSettings", "Workload", "acceptance_from_dict",
    "find_capacity", "fit_acceptance", "load_trace", "oracle_gap", "parse_acceptance", "parse_goodput", "parse_policy",
    "replay", "run_sweep", "simulate", "summarize", "synthetic", "trace_stats", "tune", "validate_run", "write_report",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'aspire_simulator' has no attribute '{name}'")
    module = importlib.import_module(f"aspire_simulator.{_WHERE[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value
