"""The scheduler that the engine and the simulator share: pure Python and numpy.

Requests       `Request`, `RequestState`, `FinishReason`
A step         `Scheduler.schedule` -> `StepPlan` (rows of `Mode`) -> executor -> `StepOutcome` -> `Scheduler.update`
Limits         `SchedulerConfig`
Policies       `PolicySpec` (policy.json), `Policy`, `PolicyView`, `Feedback`, `Action`
Page lists     `SelectorSpec`
Costs          `StepFeatures`, `CostModel`
"""

from aspire.scheduler.config import SchedulerConfig
from aspire.scheduler.features import FEATURES, CostModel, StepFeatures
from aspire.scheduler.plan import Mode, StepOutcome, StepPlan
from aspire.scheduler.policies import MAX_DRAFT, POLICIES, Action, Feedback, Policy, PolicySpec, PolicyView
from aspire.scheduler.request import FinishReason, Request, RequestState
from aspire.scheduler.residents import Counts
from aspire.scheduler.scheduler import Scheduler
from aspire.scheduler.selector_spec import PAGE_TOKENS, SELECTOR_KINDS, SelectorSpec

__all__ = [
    "FEATURES",
    "MAX_DRAFT",
    "PAGE_TOKENS",
    "POLICIES",
    "SELECTOR_KINDS",
    "Action",
    "CostModel",
    "Counts",
    "Feedback",
    "FinishReason",
    "Mode",
    "Policy",
    "PolicySpec",
    "PolicyView",
    "Request",
    "RequestState",
    "Scheduler",
    "SchedulerConfig",
    "SelectorSpec",
    "StepFeatures",
    "StepOutcome",
    "StepPlan",
]
