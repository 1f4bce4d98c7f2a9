"""A loaded cost model: the price of steps, and of adding work to one. Called at every scheduler step, so it is lean."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from aspire.errors import InputError
from aspire.scheduler.features import FEATURES, MAXIMA, Floats, StepFeatures
from aspire_calibration.cells import bucket_array
from aspire_calibration.model import CostModelFile
from aspire_calibration.variables import INDEX

SLACK = 1.02  # a range is left when a feature exceeds it by more than this factor


QUERY_TOKENS, PADDED_TOKENS = INDEX["query_tokens"], INDEX["padded_tokens"]


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


class LoadedCostModel:
    """Implements the `CostModel` protocol on a `CostModelFile`.

    ``strict_range``: predicting outside the fitted ranges raises `InputError`; otherwise ``warn`` hears of it once per
    feature and `extrapolated` counts every step. Only `predict` checks ranges: `marginal` and `what_if` ask what-ifs.
    """

    fixed_prices = True

    def __init__(self, file: CostModelFile, *, strict_range: bool = False, warn: Callable[[str], None] = _warn) -> None:
        self.file = file
        self.start_latency = file.start_latency
        self.start_latency_per_request_s = file.start_latency_per_request_s
        self.cells_per_price = int(getattr(file.fitted, "cells", 0))
        self.strict_range = strict_range
        self.extrapolated: Counter[str] = Counter()  # feature -> steps predicted beyond its range
        self.predicted_steps = 0
        self._warn = warn
        self._seconds = file.fitted.seconds
        self._buckets = bucket_array(file.graph_buckets)
        self._eager = not file.graph_buckets
        high = [file.ranges.get(name, (0.0, np.inf))[1] for name in FEATURES]
        self._high = np.array(high)[:, None] * SLACK
        self._bounded = bool(np.isfinite(self._high).any())

    def predict(self, features: StepFeatures) -> Floats:
        """Seconds, in the shape of the features."""
        columns = features.columns()
        matrix = columns.reshape(len(FEATURES), -1)
        self.predicted_steps += matrix.shape[1]
        if self._bounded:
            beyond = matrix > self._high
            if np.count_nonzero(beyond):  # cheaper than any()
                self._report(matrix, beyond)
        return self._seconds(matrix).reshape(columns.shape[1:])

    def what_if(self, features: StepFeatures) -> Floats:
        """`predict` of steps that may never be: outside the fitted ranges, too."""
        columns = features.columns()
        return self._seconds(columns.reshape(len(FEATURES), -1)).reshape(columns.shape[1:])

    def marginal(self, base: StepFeatures, added: StepFeatures) -> Floats:
        """Seconds that ``added`` costs on top of ``base``: predict(base + added) - predict(base), shapes broadcast.

        ``padded_tokens`` of both are derived from the graph buckets, so a stair of the staircase is paid by the work
        that climbs it; those given are ignored. Without buckets (eager) they equal the query tokens.
        """
        before, work = base.columns(), added.columns()  # [features, *shape]
        dimensions = max(before.ndim, work.ndim) - 1
        before, work = _padded_to(before, dimensions), _padded_to(work, dimensions)
        joined = before + work
        joined[MAXIMA] = np.maximum(before[MAXIMA], work[MAXIMA])
        # a base that many share is priced once
        flat = np.concatenate([joined.reshape(len(FEATURES), -1), before.reshape(len(FEATURES), -1)], axis=1)
        tokens = flat[QUERY_TOKENS]
        if self._eager:
            flat[PADDED_TOKENS] = tokens
        else:
            padded = self._buckets[self._buckets.searchsorted(tokens)]
            flat[PADDED_TOKENS] = np.where(padded == np.inf, tokens, padded)
        seconds, shape = self._seconds(flat), joined.shape[1:]
        size = math.prod(shape)
        return np.asarray(seconds[:size].reshape(shape) - seconds[size:].reshape(before.shape[1:]))

    def _report(self, matrix: Floats, beyond: Any) -> None:
        for index in np.flatnonzero(beyond.any(axis=1)):
            name = FEATURES[index]
            low, high = self.file.ranges[name]
            text = (
                f"cost model: {name} = {matrix[index].max():g} is outside the fitted range {low:g}..{high:g}; "
                "profile with larger limits for a figure one can trust"
            )
            if self.strict_range:
                raise InputError(f"{text} (--strict-range)")
            if name not in self.extrapolated:
                self._warn(text)
            self.extrapolated[name] += int(beyond[index].sum())

    def check_matches(
        self,
        hardware: Mapping[str, Any] | None = None,
        model: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        graph_buckets: tuple[int, ...] | None = None,
        num_pages: int | None = None,
        allow_mismatch: bool = False,
    ) -> list[str]:
        """See `CostModelFile.check_matches`."""
        return self.file.check_matches(
            hardware, model, settings, graph_buckets=graph_buckets, num_pages=num_pages, allow_mismatch=allow_mismatch
        )

    def summary_text(self) -> str:
        """See `CostModelFile.summary_text`, with what was extrapolated so far."""
        lines = [self.file.summary_text()]
        lines += [
            f"extrapolated: {name} in {count} of {self.predicted_steps} predicted steps"
            for name, count in self.extrapolated.items()
        ]
        return "\n".join(lines)


def _padded_to(array: Floats, dimensions: int) -> Floats:
    """[features, *shape] with 1s put before the shape, so that it broadcasts as the shape alone would."""
    return array.reshape(len(array), *(1,) * (dimensions + 1 - array.ndim), *array.shape[1:])


def load_cost_model(
    path: str | Path, *, strict_range: bool = False, warn: Callable[[str], None] = _warn
) -> LoadedCostModel:
    """Read, validate and prepare a cost_model.json."""
    return LoadedCostModel(CostModelFile.load(path), strict_range=strict_range, warn=warn)
