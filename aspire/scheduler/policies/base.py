"""The interface of policies: at every step, each decoding request drafts one more token, verifies, or waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from aspire.errors import UsageError, check_keys
from aspire.scheduler.features import FEATURES, CostModel, StepFeatures

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Action(IntEnum):
    """What a policy may ask of a decoding request."""

    DRAFT = 0
    VERIFY = 1
    WAIT = 2  # sit this step out (policies that keep the batch in step)


_ACTIONS = np.array([Action.VERIFY, Action.DRAFT], dtype=np.int8)


def draft_where(draft: NDArray[np.bool_]) -> NDArray[np.int8]:
    """[n] `Action`: DRAFT where ``draft``, else VERIFY."""
    return _ACTIONS.take(draft)


@dataclass(eq=False)
class PolicyView:
    """The decoding requests of this step, arrays [n], in slot order."""

    slots: Ints
    drafted: Ints  # draft tokens held
    can_draft: NDArray[np.bool_]  # a further draft is allowed (length limits, page list present)
    context_tokens: Ints  # committed KV tokens + drafts + 1: what a verification reads
    sparse_tokens: Ints  # what one more draft step reads
    full_layer_share: float  # share of layers that a draft step runs with full attention (refresh, delta)
    select_layer_share: float  # share of layers whose page mass a verification computes
    other: StepFeatures  # the rest of the batch (prefill chunks), as 0-d features
    cost_model: CostModel | None

    def draft_features(self) -> StepFeatures:
        """Features [n] of one draft row each."""
        columns = np.empty((len(FEATURES), len(self.slots)))
        self.fill_draft_features(columns)
        return StepFeatures.from_columns(columns)

    def verify_features(self) -> StepFeatures:
        """Features [n] of one verification row each."""
        columns = np.empty((len(FEATURES), len(self.slots)))
        self.fill_verify_features(columns)
        return StepFeatures.from_columns(columns)

    def fill_draft_features(self, columns: Floats, copies: int = 1) -> None:
        """`draft_features` of ``copies`` alike rows each, into ``columns`` [len(FEATURES), n]."""
        columns[:] = copies * _ONE_DRAFT
        np.multiply(self.sparse_tokens, copies * (1.0 - self.full_layer_share), out=columns[_SPARSE_KV])
        if self.full_layer_share:
            np.multiply(self.context_tokens, copies * self.full_layer_share, out=columns[_FULL_KV])
            columns[_SELECT_KV] = columns[_FULL_KV]
            columns[_SELECT_ROWS] = copies

    def fill_verify_features(self, columns: Floats, copies: int = 1) -> None:
        """`verify_features` of ``copies`` alike rows each, into ``columns`` [len(FEATURES), n]."""
        columns[:] = copies * _ONE_VERIFY
        np.multiply(self.drafted + 1, copies, out=columns[_QUERY])
        columns[_PADDED] = columns[_QUERY]
        np.multiply(self.context_tokens, copies, out=columns[_FULL_KV])
        if self.select_layer_share:
            np.multiply(self.context_tokens, copies * self.select_layer_share, out=columns[_SELECT_KV])
            columns[_SELECT_ROWS] = copies


_QUERY, _PADDED, _SPARSE_KV, _FULL_KV, _SELECT_KV, _SELECT_ROWS = map(
    FEATURES.index,
    ("query_tokens", "padded_tokens", "sparse_kv_tokens", "full_kv_tokens", "select_kv_tokens", "select_rows"),
)
_ONE_DRAFT = StepFeatures.of(rows=1.0, query_tokens=1.0, draft_rows=1.0).columns()[:, None]
_ONE_VERIFY = StepFeatures.of(rows=1.0, query_tokens=1.0, verify_rows=1.0).columns()[:, None]


@dataclass(eq=False)
class Feedback:
    """Outcome of a step, arrays [rows] over its drafting and verifying rows."""

    slots: Ints
    verified: NDArray[np.bool_]  # False: the row drafted
    drafted: Ints  # drafts held before the step
    accepted: Ints  # of a verification
    margin: Floats  # of the token drafted; NaN where verified
    features: StepFeatures  # of the whole step, 0-d
    seconds: float  # measured or simulated; NaN where unknown


class Policy(ABC):
    """A rule over struct-of-arrays state, one entry per slot. Its parameters are a frozen dataclass."""

    kind: ClassVar[str]
    needs_cost_model: ClassVar[bool] = False
    Params: ClassVar[type[Any]]

    def __init__(self, params: Any, max_slots: int, d_max: int) -> None:
        self.params = params
        self.max_slots = max_slots
        self.d_max = d_max
        self.resting = False
        """Set by `plan`: nobody drafts for now, so this step makes no page lists. A request without a list verifies."""

    @abstractmethod
    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        """`Action` of each request of the view. The scheduler turns a DRAFT that is not allowed into a VERIFY."""

    def rests(self, requests: int) -> bool:
        """Whether all of the ``requests`` that decode verify in this step too: `plan` need not be asked, nor a view be
        made for it. Asked at most once a step; a request that moves in is told by `reset`."""
        return False

    def observe(self, feedback: Feedback) -> None:  # noqa: B027  (nothing to learn is a valid choice)
        """Take note of a finished step. What the next `plan` goes by is due here, all else may be left to `learn`."""

    def learn(self) -> None:  # noqa: B027
        """Do what may be known one plan later: once the next step is launched, while the device works.

        Nobody need call it, and calling it twice is as good as once: `observe` begins with what is left of it, so that
        the order is always plan of the next step, `learn`, outcome of this one, whoever runs the steps.
        """

    def reset(self, slots: Ints) -> None:  # noqa: B027
        """Forget the requests that were in ``slots``; others move in."""

    @property
    def drafts(self) -> bool:
        """Whether the policy may ever draft; if not, no page lists are made."""
        return True


def params_from(cls: type[Any], what: str, data: Mapping[str, Any]) -> Any:
    """Build the parameter dataclass ``cls`` from JSON ``data``; unknown keys and wrong types raise `UsageError`."""
    check_keys(what, data, [field.name for field in fields(cls)])
    for field in fields(cls):
        value = data.get(field.name)
        if value is None:
            continue
        expected = str(field.type)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if ("int" in expected and not (number and float(value).is_integer())) or ("float" in expected and not number):
            raise UsageError(f"{what} parameter {field.name}={value!r} is not of type {expected}")
    return cls(**data)
