"""Policies are data (kind + parameters) behind one interface.

Interface    `Policy`, `PolicyView`, `Feedback`, `Action`
As data      `PolicySpec` (policy.json), `POLICIES` by kind
"""

from aspire.scheduler.policies.base import Action, Feedback, Policy, PolicyView
from aspire.scheduler.policies.spec import POLICIES, PolicySpec

__all__ = ["POLICIES", "Action", "Feedback", "Policy", "PolicySpec", "PolicyView"]
