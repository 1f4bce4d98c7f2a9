"""A what-if as data: workload, policy, costs, acceptance and limits. The command line, sweeps, capacity and tuning
share it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from aspire.errors import UsageError, check_keys
from aspire.rundir import Run
from aspire.scheduler import SchedulerConfig
from aspire_simulator.acceptance import AcceptanceModel, acceptance_from_dict, parse_acceptance
from aspire_simulator.executor import Progress, Simulation
from aspire_simulator.metrics import parse_goodput, summarize
from aspire_simulator.oracle import AnyPolicy, OracleSpec, parse_policy
from aspire_simulator.traces import load_trace
from aspire_simulator.workload import Workload, synthetic

if TYPE_CHECKING:
    from aspire_calibration import LoadedCostModel


@dataclass(frozen=True)
class Scenario:
    """Everything a simulation needs, in plain JSON values named like the command-line options.

    ``cost_model``: a cost_model.json, or ``analytic:HARDWARE:MODEL`` for public figures. ``policy``: see
    `parse_policy`, or the object of a policy.json. ``acceptance``: see `parse_acceptance`, or its object; or an object
    of these by selector kind (optionally ``kind@budget_ratio``), with ``*`` for the others. ``selector``,
    ``budget_ratio`` and
    ``num_speculative_tokens`` override the policy's own. Limits that are None follow from the cost model and workload,
    and so does ``async_scheduling``: steps are planned ahead if they were when the cost model was measured.
    ``enable_prefix_caching``: equal beginnings of prompts, where a trace tells of them, are computed once.
    """

    cost_model: str
    policy: str | Mapping[str, Any] = "autoregressive"
    acceptance: str | Mapping[str, Any] = "iid:0.9"
    dataset_path: str | None = None  # a trace or run directory; None: synthetic
    num_prompts: int = 256
    input_len: str | int = 4096
    output_len: str | int = 256
    request_rate: float = math.inf
    burstiness: float = 1.0
    time_scale: float = 1.0
    length_scale: float = 1.0
    limit: int | None = None
    selector: str | None = None
    budget_ratio: float | None = None
    num_speculative_tokens: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    num_pages: int | None = None
    max_concurrency: int | None = None
    async_scheduling: bool | None = None
    enable_prefix_caching: bool = True
    goodput: str = ""
    seed: int = 0
    noise: float = 0.0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scenario:
        """From a JSON object; unknown keys raise `UsageError`. Rates may be the string ``inf``."""
        check_keys("scenario", data, [field.name for field in fields(cls)])
        values = dict(data)
        if "request_rate" in values:
            values["request_rate"] = float(values["request_rate"])
        try:
            return cls(**values)
        except TypeError as error:
            raise UsageError(f"scenario: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `from_dict`."""
        values = asdict(self)
        values["request_rate"] = self.request_rate if math.isfinite(self.request_rate) else "inf"
        return values

    def with_(self, **changes: Any) -> Scenario:
        """A copy with some values changed; unknown names raise `UsageError`."""
        return Scenario.from_dict({**self.to_dict(), **changes})

    # --- its parts ------------------------------------------------------------------------------------------------

    def load_workload(self) -> Workload:
        """The requests. Those longer than the model allows are kept: the scheduler rejects them."""
        if self.dataset_path is not None:
            return load_trace(
                self.dataset_path, time_scale=self.time_scale, length_scale=self.length_scale, limit=self.limit
            )
        made = synthetic(
            self.num_prompts,
            self.input_len,
            self.output_len,
            request_rate=self.request_rate,
            burstiness=self.burstiness,
            seed=self.seed,
        )
        return made.scaled(time_scale=self.time_scale, length_scale=self.length_scale, limit=self.limit)

    def load_policy(self) -> AnyPolicy:
        """The policy with the overrides applied."""
        from aspire.scheduler import PolicySpec

        spec: AnyPolicy
        if isinstance(self.policy, str):
            spec = parse_policy(self.policy)
        elif self.policy.get("kind") == "oracle":
            spec = parse_policy("oracle")
        else:
            spec = PolicySpec.from_dict(dict(self.policy), "policy")
        selector = spec.selector
        if self.selector is not None:
            selector = replace(selector, kind=self.selector)
        if self.budget_ratio is not None:
            selector = replace(selector, budget_ratio=self.budget_ratio)
        deepest = spec.num_speculative_tokens if self.num_speculative_tokens is None else self.num_speculative_tokens
        return replace(spec, selector=selector, num_speculative_tokens=deepest)

    def load_acceptance(self, policy: AnyPolicy) -> AcceptanceModel:
        """The acceptance model that holds for the policy's selector."""
        return acceptance_for(self.acceptance, policy)

    def load_cost_model(self) -> LoadedCostModel:
        """The cost model (cached by name)."""
        return _cost_model(self.cost_model)

    def limits(self, workload: Workload) -> SchedulerConfig:
        """Scheduler limits; those not given: the longest request, the calibrated pool, or a page pool that holds all
        slots.
        """
        file = self.load_cost_model().file
        longest = int((workload.prompt_tokens + workload.output_tokens).max())
        max_model_len = self.max_model_len or longest
        ahead = file.settings.get("async_scheduling", False) if self.async_scheduling is None else self.async_scheduling
        num_pages = self.num_pages or file.num_pages
        if num_pages is None:
            num_pages = self.max_num_seqs * -(-max_model_len // 16) + 1
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max(self.max_num_batched_tokens, self.max_num_seqs),
            max_model_len=max_model_len,
            num_pages=num_pages,
            num_layers=int(file.model.get("layers", 1)),
            graph_buckets=tuple(file.graph_buckets),
            async_scheduling=bool(ahead),
            enable_prefix_caching=self.enable_prefix_caching,
        )

    def simulation(self, progress: Progress | None = None) -> Simulation:
        """Ready to run."""
        workload, policy = self.load_workload(), self.load_policy()
        return Simulation(
            workload,
            policy,
            self.load_cost_model(),
            self.load_acceptance(policy),
            self.limits(workload),
            seed=self.seed,
            noise=self.noise,
            max_concurrency=self.max_concurrency,
            progress=progress,
        )

    def run(self, progress: Progress | None = None) -> Run:
        """Simulate; the run carries its summary."""
        limits = parse_goodput(self.goodput) if self.goodput else None
        run = self.simulation(progress).run()
        run.config["scenario"] = self.to_dict()
        run.config["kv_bytes_per_token"] = _kv_bytes(self.load_cost_model().file.model)
        run.summary = summarize(run, goodput=limits)
        return run


def acceptance_for(given: str | Mapping[str, Any], policy: AnyPolicy) -> AcceptanceModel:
    """Resolve ``given`` (see `Scenario`) for the selector of ``policy``."""
    if isinstance(given, str):
        return parse_acceptance(given)
    if "kind" in given:
        return acceptance_from_dict(dict(given))
    selector = policy.selector
    for key in (f"{selector.kind}@{selector.budget_ratio:g}", selector.kind, "*"):
        if key in given:
            return acceptance_for(given[key], policy)
    if not isinstance(policy, OracleSpec) and policy.kind == "autoregressive" and given:
        return acceptance_for(next(iter(given.values())), policy)
    raise UsageError(
        f"no acceptance is known for selector '{selector.kind}' with budget_ratio {selector.budget_ratio:g}; "
        f"known: {', '.join(given)}; measure it (aspire fit-acceptance) or add '*'"
    )


@lru_cache(maxsize=8)
def _cost_model(name: str) -> LoadedCostModel:
    from aspire_calibration import LoadedCostModel, analytic_model, load_cost_model

    if name.startswith("analytic:"):
        hardware, _, shape = name[len("analytic:") :].partition(":")
        return LoadedCostModel(analytic_model(hardware, shape), warn=lambda message: None)
    return load_cost_model(name, warn=lambda message: None)


def _kv_bytes(model: Mapping[str, Any]) -> float | None:
    """Bytes of K and V of one token in all layers, where the model's shape says."""
    if not {"layers", "kv_heads", "head_dim"} <= model.keys():
        return None
    width = {"float32": 4, "fp32": 4}.get(str(model.get("dtype")), model.get("dtype_bytes", 2))
    return float(2 * np.prod([model["layers"], model["kv_heads"], model["head_dim"]]) * width)
