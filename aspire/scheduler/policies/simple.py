"""Baselines whose draft length does not depend on what was accepted: autoregressive, fixed in step, staggered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aspire.errors import UsageError
from aspire.scheduler.policies.base import Action, Ints, Policy, PolicyView, draft_where

_DRAFT, _VERIFY, _WAIT = np.int8(Action.DRAFT), np.int8(Action.VERIFY), np.int8(Action.WAIT)


@dataclass(frozen=True)
class AutoregressiveParams:
    """No parameters."""


class Autoregressive(Policy):
    """Every request verifies a draft of length 0 at every step: plain decoding."""

    kind = "autoregressive"
    Params = AutoregressiveParams

    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        return np.full(len(view.slots), _VERIFY)

    @property
    def drafts(self) -> bool:
        return False


@dataclass(frozen=True)
class FixedParams:
    """``g``: draft tokens per round."""

    g: int = 5

    def __post_init__(self) -> None:
        if self.g < 1:
            raise UsageError(
                f"policy parameter g={self.g} is too small; a draft has at least 1 token (or use autoregressive)"
            )


class Fixed(Policy):
    """The whole batch drafts ``g`` tokens in step, then the whole batch verifies (MagicDec, Vegas; by selector)."""

    kind = "fixed"
    Params = FixedParams

    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        if not len(view.slots):
            return np.empty(0, dtype=np.int8)
        g = min(self.params.g, self.d_max)
        if view.drafted.max() >= g or not view.can_draft.any():
            return np.full(len(view.slots), _VERIFY)
        # rows at their length limit wait for the others, so that the batch stays in step
        if np.count_nonzero(view.can_draft) == len(view.slots):
            return np.full(len(view.slots), _DRAFT)
        return np.where(~view.can_draft & (view.drafted > 0), _WAIT, _DRAFT)


class Staggered(Policy):
    """Every request drafts ``g`` tokens, then verifies; first rounds are cut so that phases spread evenly.

    SparseSpec (arXiv 2512.01278): a constant share of the batch verifies at every step.
    """

    kind = "staggered"
    Params = FixedParams

    def __init__(self, params: FixedParams, max_slots: int, d_max: int) -> None:
        super().__init__(params, max_slots, d_max)
        self._stride = min(params.g, d_max)
        self._target = np.full(max_slots, self._stride, dtype=np.int64)
        self._admitted = 0

    def reset(self, slots: Ints) -> None:
        phases = self._admitted + np.arange(len(slots))
        self._admitted += len(slots)
        self._target[slots] = phases % (self._stride + 1)

    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        verify = view.drafted >= self._target[view.slots]
        self._target[view.slots[verify]] = self._stride
        return draft_where(~verify)
