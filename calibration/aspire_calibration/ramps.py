"""The fitted shape that nearly all forms share: the largest of a few sums of ramps.

    seconds(step) = max over branches of the sum over terms of  slope * clip(variable - start, 0, stop - start)

A ramp from 0 without end is a plain linear term; a chain of ramps on one variable is a piecewise linear curve (a
monotone one when no slope is negative); a ramp from 0 to 1 on a row count says whether there are such rows at all.
With slopes >= 0 the model is monotone in every variable and extrapolates along its last slopes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aspire.errors import InputError, check_choice, check_keys
from aspire.scheduler.features import Floats
from aspire_calibration.variables import VARIABLES, VariableRows, variable_rows

LONG_CHAIN = 8  # so many ramps on one variable are evaluated as one interpolation


@dataclass(frozen=True)
class Ramp:
    """One term: a variable clipped to [start, stop], counted from start."""

    variable: str
    start: float = 0.0
    stop: float = np.inf

    @property
    def name(self) -> str:
        """E.g. ``padded_tokens[64..128]``."""
        if self.start == 0 and self.stop == np.inf:
            return self.variable
        end = "" if self.stop == np.inf else f"{self.stop:g}"
        return f"{self.variable}[{self.start:g}..{end}]"


def chain(variable: str, knots: Sequence[float]) -> list[Ramp]:
    """Ramps between the knots 0 < k1 < k2 < ... and one beyond the last."""
    edges = [0.0, *knots, np.inf]
    return [Ramp(variable, low, high) for low, high in zip(edges, edges[1:], strict=False)]


def present(variable: str) -> Ramp:
    """1 when a count is not zero."""
    return Ramp(variable, 0.0, 1.0)


def design(terms: Sequence[Ramp], features: Floats) -> Floats:
    """[steps, terms] from features [len(FEATURES), steps]."""
    values = variable_rows(features, [term.variable for term in terms])
    start = np.array([[term.start] for term in terms])
    width = np.array([[term.stop - term.start] for term in terms])
    return np.asarray(np.minimum(np.maximum(values - start, 0.0), width).T)


@dataclass(frozen=True)
class RampModel:
    """Fitted ramps: ``slopes[b][t]`` in seconds per unit of the variable of ``branches[b][t]``."""

    branches: tuple[tuple[Ramp, ...], ...]
    slopes: tuple[tuple[float, ...], ...]
    names: tuple[str, ...] = ("step",)
    _compiled: RampSums = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_compiled", RampSums(self))

    def seconds(self, features: Floats) -> Floats:
        """[steps] from features [len(FEATURES), steps]."""
        return self._compiled(self._compiled.rows(features))

    def scaled(self, factors: Sequence[Sequence[float]]) -> RampModel:
        """The same terms with every slope multiplied."""
        slopes = tuple(
            tuple(s * f for s, f in zip(row, by, strict=True)) for row, by in zip(self.slopes, factors, strict=True)
        )
        return RampModel(self.branches, slopes, self.names)

    def to_json(self) -> dict[str, Any]:
        branches = []
        for name, terms, slopes in zip(self.names, self.branches, self.slopes, strict=True):
            rows = [_term_json(term, slope) for term, slope in zip(terms, slopes, strict=True) if slope != 0.0]
            branches.append({"name": name, "terms": rows})
        return {"type": "ramps", "combine": "max", "branches": branches}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RampModel:
        """Inverse of `to_json`; raises `UsageError` for unknown keys or variables, `InputError` for bad numbers."""
        check_keys("ramp model", data, ("type", "combine", "branches"))
        check_choice("ramp model 'combine'", str(data.get("combine")), ("max",))
        if not data.get("branches"):
            raise InputError("a ramp model needs at least one branch; calibrate again")
        names, branches, slopes = [], [], []
        for branch in data["branches"]:
            check_keys("branch", branch, ("name", "terms"))
            terms, values = [], []
            for row in branch["terms"]:
                check_keys("term", row, ("variable", "from", "to", "seconds", "unit"))
                check_choice("variable", str(row.get("variable")), VARIABLES)
                stop = np.inf if row["to"] is None else float(row["to"])
                if not (np.isfinite(row["seconds"]) and 0.0 <= row["from"] < stop):
                    raise InputError(f"term {row} needs finite seconds and 0 <= from < to; calibrate again")
                terms.append(Ramp(row["variable"], float(row["from"]), stop))
                values.append(float(row["seconds"]))
            names.append(str(branch["name"]))
            branches.append(tuple(terms))
            slopes.append(tuple(values))
        return cls(tuple(branches), tuple(slopes), tuple(names))


def _term_json(term: Ramp, slope: float) -> dict[str, Any]:
    unit = VARIABLES[term.variable][0]
    stop = None if term.stop == np.inf else term.stop
    return {"variable": term.variable, "from": term.start, "to": stop, "seconds": slope, "unit": f"s/{unit}"}


class RampSums:
    """The arrays of one evaluation: few numpy calls, because the scheduler asks for prices at every step.

    ``beside``: variables that the caller needs of the same steps, so that all are made at once: the first of ``rows``.
    """

    def __init__(self, model: RampModel, beside: Sequence[str] = ()) -> None:
        count = len(model.branches)
        self.constant = np.zeros((count, 1))
        linear: dict[str, Floats] = {}
        bent: dict[Ramp, Floats] = {}
        for b, (terms, row) in enumerate(zip(model.branches, model.slopes, strict=True)):
            for term, slope in zip(terms, row, strict=True):
                if slope == 0.0:
                    continue
                if term.variable == "one":
                    self.constant[b] += slope
                elif term.start == 0 and term.stop == np.inf:
                    linear.setdefault(term.variable, np.zeros(count))[b] += slope
                else:
                    bent.setdefault(term, np.zeros(count))[b] += slope
        names = [*beside, *sorted({*linear, *(term.variable for term in bent)} - set(beside))]
        self.rows = VariableRows(names)
        position = {name: index for index, name in enumerate(names)}
        self.curves: list[_Curve] = []
        for name in names:
            chained = {term: values for term, values in bent.items() if term.variable == name}
            if len(chained) >= LONG_CHAIN:
                self.curves.append(_Curve(position[name], chained))
                bent = {term: values for term, values in bent.items() if term not in chained}
        self.linear = np.zeros((count, len(names)))
        for name, values in linear.items():
            self.linear[:, position[name]] = values
        picked = [position[term.variable] for term in bent]
        self.pick = slice(picked[0], picked[0] + 1) if len(picked) == 1 else np.array(picked, dtype=np.intp)
        self.start = np.array([[term.start] for term in bent])
        width = np.array([[term.stop - term.start] for term in bent])
        self.width = width if np.isfinite(width).any() else None  # none of the ramps ends
        self.bent = np.stack(list(bent.values()), axis=1) if bent else np.zeros((count, 0))

    def __call__(self, values: Floats) -> Floats:
        """[steps] from the ``values`` of their ``rows``."""
        out = self.linear @ values
        out += self.constant
        if len(self.start):
            ramps = values[self.pick] - self.start
            np.maximum(ramps, 0.0, out=ramps)
            if self.width is not None:
                np.minimum(ramps, self.width, out=ramps)
            out += self.bent @ ramps
        for curve in self.curves:
            curve.add_to(out, values)
        return np.asarray(out[0] if len(out) == 1 else out.max(axis=0))


class _Curve:
    """Many ramps on one variable as one interpolated curve per branch."""

    def __init__(self, position: int, chained: dict[Ramp, Floats]) -> None:
        self.position = position
        edges = sorted({0.0, *(t.start for t in chained), *(t.stop for t in chained if t.stop < np.inf)})
        self.edges = np.array(edges)
        slopes = np.stack(list(chained.values()), axis=1)  # [branches, ramps]
        start = np.array([[term.start] for term in chained])
        width = np.array([[term.stop - term.start] for term in chained])
        self.heights = slopes @ np.minimum(np.maximum(self.edges - start, 0.0), width)  # [branches, edges]
        self.beyond = slopes @ (width[:, 0] == np.inf)  # [branches]: slope after the last edge

    def add_to(self, out: Floats, values: Floats) -> None:
        at = values[self.position]
        past = np.maximum(at - self.edges[-1], 0.0)
        for row, heights, slope in zip(out, self.heights, self.beyond, strict=True):
            row += np.interp(at, self.edges, heights)
            row += slope * past
