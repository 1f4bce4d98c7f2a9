"""What a step costs is a function of these features; the cost model, the scheduler and the profiler share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepFeatures:
    """Features of one step or of many: float64 arrays of one common shape (scalars are 0-d).

    ``kv_tokens`` count tokens whose K and V are read in every layer; page = 16 tokens elsewhere, tokens here. All but
    the last three (`MAXIMA`) are sums over the rows of a step.
    """

    rows: Floats  # requests in the step
    query_tokens: Floats  # tokens through the GEMMs, before padding
    padded_tokens: Floats  # tokens through the GEMMs after padding to the graph bucket (= query_tokens when eager)
    draft_rows: Floats
    verify_rows: Floats  # verification and autoregressive rows
    sparse_kv_tokens: Floats  # sum over drafting rows of the tokens they read
    full_kv_tokens: Floats  # sum over verifying and prefill rows of their context
    prefill_tokens: Floats
    prefill_pairs: Floats  # sum over prefill rows of the (query, key) pairs of causal attention: `causal_pairs`
    select_kv_tokens: Floats  # context of rows whose page mass is computed in this step
    select_rows: Floats
    # largest of any row; 0 = not known, the mean of the rows stands for it
    verify_width: Floats  # query tokens of the widest verifying row
    longest_full_kv: Floats  # tokens of the longest context that a verifying or prefill row reads
    longest_sparse_kv: Floats  # most tokens that a drafting row reads

    @classmethod
    def zeros(cls, shape: tuple[int, ...] = ()) -> StepFeatures:
        """Features of ``shape`` empty steps."""
        return cls(**{name: np.zeros(shape) for name in FEATURES})

    @classmethod
    def of(cls, **values: float | NDArray[Any]) -> StepFeatures:
        """Features from the named values; what is not named is zero, ``padded_tokens`` defaults to ``query_tokens``."""
        if "padded_tokens" not in values:
            values["padded_tokens"] = values.get("query_tokens", 0.0)
        if not values.keys() <= _PLACE.keys():
            raise TypeError(f"unknown features: {sorted(values.keys() - _PLACE.keys())}")
        shapes = {value.shape for value in values.values() if isinstance(value, np.ndarray)} | {()}
        if shapes == {()}:
            return cls.from_columns(np.array([values.get(name, 0.0) for name in FEATURES], dtype=np.float64))
        columns = np.zeros((len(FEATURES), *np.broadcast_shapes(*shapes)))
        for name, value in values.items():
            columns[_PLACE[name]] = value
        return cls.from_columns(columns)

    @classmethod
    def of_step(cls, *values: float) -> StepFeatures:
        """Features (0-d) of one step from all ``values``, in the order of `FEATURES`."""
        return cls.from_columns(np.array(values, dtype=np.float64))

    def columns(self) -> Floats:
        """[len(FEATURES), ...]: the features in the order of `FEATURES`."""
        whole: Floats | None = self.__dict__.get("_columns")
        return np.stack([getattr(self, name) for name in FEATURES]) if whole is None else whole

    @classmethod
    def from_columns(cls, columns: Floats) -> StepFeatures:
        """Inverse of `columns`."""
        made = object.__new__(cls)
        made.__dict__["_columns"] = columns
        return made

    def __getattr__(self, name: str) -> Floats:
        """A feature of those made `from_columns`: a view, made when asked for, since most never are."""
        place = _PLACE.get(name)
        if place is None:
            raise AttributeError(f"step features have no '{name}'; they are {', '.join(FEATURES)}")
        view: Floats = self.__dict__["_columns"][place, ...]
        return view

    def matrix(self) -> Floats:
        """[..., len(FEATURES)]: the features of a step side by side."""
        columns = self.columns()
        return columns.T if columns.ndim <= 2 else np.moveaxis(columns, 0, -1)

    @classmethod
    def from_matrix(cls, matrix: Floats) -> StepFeatures:
        """Inverse of `matrix`."""
        return cls.from_columns(matrix.T if matrix.ndim <= 2 else np.moveaxis(matrix, -1, 0))

    def __add__(self, other: StepFeatures) -> StepFeatures:
        matrix = self.matrix() + other.matrix()
        matrix[..., MAXIMA] = np.maximum(self.matrix()[..., MAXIMA], other.matrix()[..., MAXIMA])
        return StepFeatures.from_matrix(matrix)


GRAPH_WIDTHS = (1, 3, 5, 9, 17)
"""Query tokens of the widest verifying row that graphs of decode steps are made for: the engine captures them for
these, the calibrator prices their steps apart. Graphs of steps with prompts are all made for the widest."""

FEATURES: tuple[str, ...] = tuple(field.name for field in fields(StepFeatures))
_PLACE = {name: index for index, name in enumerate(FEATURES)}
MAXIMA = slice(_PLACE["verify_width"], None)
"""Places of the features that are a maximum over rows: those of joined work are not summed."""


def causal_pairs(query_tokens: Any, context_tokens: Any) -> Any:
    """(query, key) pairs of causal attention: the last of ``query_tokens`` sees ``context_tokens``, itself included,
    each one before it one token less. Whole numbers or integer arrays."""
    return query_tokens * context_tokens - query_tokens * (query_tokens - 1) // 2


def prefill_context(rows: Floats, prefill_tokens: Floats, prefill_pairs: Floats) -> Floats:
    """KV tokens of the context of ``rows`` prefill rows, summed: exact where rows are equally long, else each weighs
    as its query tokens do; 0 without prefill rows."""
    return np.asarray(rows * prefill_pairs / np.maximum(prefill_tokens, 1.0) + 0.5 * (prefill_tokens - rows))


class CostModel(Protocol):
    """Predicts the latency of steps from their features, as they follow each other.

    A model may also have ``start_latency`` with ``start_latency_per_request_s``, ``cells_per_price``, ``fixed_prices``
    and ``what_if``, see the functions of these names.
    """

    def predict(self, features: StepFeatures) -> Floats:
        """Seconds, in the shape of the features."""
        ...

    def marginal(self, base: StepFeatures, added: StepFeatures) -> Floats:
        """Seconds that ``added`` work costs on top of the steps ``base`` (shapes broadcast)."""
        ...


def cells_per_price_of(cost_model: CostModel) -> int:
    """Measured cells that a price is compared with, each of which takes time; 0 for prices that are plain sums."""
    return int(getattr(cost_model, "cells_per_price", 0))


def fixed_prices_of(cost_model: CostModel) -> bool:
    """Whether the same step always has the same price; False for models that do not tell, as those that learn."""
    return bool(getattr(cost_model, "fixed_prices", False))


def what_if_of(cost_model: CostModel) -> Callable[[StepFeatures], Floats]:
    """`CostModel.predict` for steps that may never be, which some models price without a check of their ranges."""
    return getattr(cost_model, "what_if", cost_model.predict)


def start_latency_of(cost_model: CostModel, rest_s: Floats | float, entering: NDArray[np.int64] | int) -> Floats:
    """Seconds that a step takes longer when it starts from idle, ``rest_s`` after the step before it (infinite for the
    first), with ``entering`` requests that begin their prompts in it; shapes broadcast. 0 for a model that does not
    tell.

    Between the rests that were measured in proportion to the logarithm, beyond them as at the nearest; and in
    proportion to the requests beyond the first.
    """
    pairs = np.asarray(getattr(cost_model, "start_latency", ()), dtype=np.float64).reshape(-1, 2)
    if not len(pairs):
        return np.zeros(np.broadcast_shapes(np.shape(rest_s), np.shape(entering)))
    latency = np.interp(np.log(np.maximum(rest_s, 1e-6)), np.log(pairs[:, 0]), pairs[:, 1])
    per_request_s = float(getattr(cost_model, "start_latency_per_request_s", 0.0))
    return np.asarray(latency + per_request_s * np.maximum(np.subtract(entering, 1), 0))
