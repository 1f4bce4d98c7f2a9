"""Policies are data (kind + parameters) behind one interface.

Interface    `Policy`, `PolicyView`, `Feedback`, `Action`
As data      `PolicySpec` (policy.json), `POLICIES` by kind
"""

from aspire.scheduler.policies.base import Action, Feedback, Policy, PolicyView
from aspire.scheduler.policies.spec import MAX_DRAFT, POLICIES, PolicySpec

__all__ = ["MAX_DRAFT", "POLICIES", "Action", "Feedback", "Policy", "PolicySpec", "PolicyView"]
