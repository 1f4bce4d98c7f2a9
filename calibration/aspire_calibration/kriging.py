"""Prices times a Gaussian process: what a sum of prices leaves over is interpolated between the measured cells.

    seconds(x) = base(x) exp(sum over cells c of pull_c k(x, c)),    k(x, c) = 1 / (1 + |x - c|^1.5)

Launches are chosen by rows, contexts and widths (tiles, splits, padding), so step times have many small shapes that no
short list of terms holds, but cells near each other share them. The ``base`` is a monotone sum of prices that
extrapolates; the mean of a Gaussian process over its log residuals (C. E. Rasmussen, C. K. I. Williams, Gaussian
Processes for Machine Learning, 2006: equation 2.25) corrects it near the cells and fades away from them, and is never
larger than the largest residual of a cell. The kernel is of the Cauchy class (T. Gneiting, M. Schlather, Stochastic
models that separate fractal dimension and the Hurst effect, SIAM Review 46, 2004: equation 3.1 with alpha = beta =
1.5): a smoother one averages over neighbours that another launch serves. Reach and noise are chosen by leave-one-out
error (Rasmussen and Williams, equation 5.12). Not monotone: where a larger step was measured to be faster, it is priced
so.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import InputError, check_choice, check_keys
from aspire.scheduler.features import Floats
from aspire_calibration.ramps import Ramp, RampModel, RampSums, design
from aspire_calibration.solve import nonnegative_relative
from aspire_calibration.variables import NOT_PLAIN, VARIABLES, is_plain, variable_rows

MOST_CELLS = 1024  # that a prediction compares with: its time grows with them
TUNED_ON = 400  # of them choose reach and noise
REACHES = (1.4, 2.0, 2.8, 4.0)  # times the octaves of the axes
NOISES = (0.003, 0.01, 0.03, 0.1)  # variance of a cell's own noise over that of the process
NEARLY = 1.03  # times the smallest leave-one-out error
# Multiplications of a product of matrices above which OpenBLAS wakes other threads, which takes longer than the
# products here. Of a matrix and a vector it does so from 9,000 on, so that none of those is asked for.
MATRIX_WORK = 250_000
STEPS_AT_ONCE = 64  # of which the distances to all cells stay in a processor's second cache
PADDING = {"padded_rows", "idle_rows", "padded_width"}  # only CUDA graphs of decode steps are made for rounded sizes


@dataclass(frozen=True)
class Axis:
    """One direction in which steps differ: a sum of log2(1 + variable / unit), measured in ``octaves``."""

    octaves: float  # difference at which two steps are about one reach apart
    of: dict[str, float]  # variable -> factor: -1 beside +1 makes it a ratio


# What the launches of a step are chosen by, and how far its prices reach. Errors hardly depend on the octaves (see
# reports/notes/calibration.md); tokens and rows that choose a launch reach less far than those that only sum up.
AXES = (
    Axis(2.0, {"padded_tokens": 1.0}),
    Axis(1.5, {"padded_rows": 1.0}),
    Axis(2.0, {"idle_rows": 1.0}),
    Axis(2.0, {"verify_rows": 1.0}),
    Axis(5.0, {"sparse_kv_tokens": 1.0}),
    Axis(2.5, {"sparse_kv_tokens": 1.0, "draft_rows": -1.0}),
    Axis(3.5, {"full_kv_tokens": 1.0}),
    Axis(2.0, {"longest_context": 1.0}),
    Axis(1.0, {"widest_verify": 1.0}),
    Axis(1.5, {"padded_width": 1.0}),
    Axis(1.0, {"full_spread": 1.0}),
    Axis(1.0, {"sparse_spread": 1.0}),
    Axis(10.0, {"select_kv_tokens": 1.0}),
    Axis(5.0, {"select_rows": 1.0}),
    Axis(4.0, {"prefill_tokens": 1.0}),
    Axis(3.0, {"prefill_pairs": 1.0}),
)
# Amounts below which steps are all alike; 1 for what is not named.
UNITS = {
    "idle_rows": 4.0,
    "sparse_kv_tokens": 64.0,
    "full_kv_tokens": 128.0,
    "select_kv_tokens": 128.0,
    "prefill_tokens": 32.0,
    "prefill_pairs": 4096.0,
}


@dataclass(frozen=True)
class KrigedModel:
    """``base`` times the exponential of pulls of cells at ``places`` [axes, cells], in reaches."""

    base: RampModel
    variables: tuple[str, ...]
    units: Floats  # [variables]
    mix: Floats  # [axes, variables]: places of log2(1 + variable / unit)
    places: Floats
    pulls: Floats  # [cells]
    largest: float  # correction, as a logarithm
    _compiled: _Compiled = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_compiled", _Compiled(self))

    @property
    def cells(self) -> int:
        """Cells that each price is compared with."""
        return len(self.pulls)

    def seconds(self, features: Floats) -> Floats:
        """[steps] from features [len(FEATURES), steps]."""
        return self._compiled(features)

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "kriged",
            "base": self.base.to_json(),
            "variables": [
                {"variable": name, "unit": float(unit), "places_per_octave": [float(x) for x in column]}
                for name, unit, column in zip(self.variables, self.units, self.mix.T, strict=True)
            ],
            "largest": self.largest,
            "cells": [
                {"place": [float(x) for x in place], "pull": float(pull)}
                for place, pull in zip(self.places.T, self.pulls, strict=True)
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KrigedModel:
        """Inverse of `to_json`; raises `UsageError` for unknown keys or variables, `InputError` for bad numbers."""
        check_keys("kriged model", data, ("type", "base", "variables", "largest", "cells"))
        for row in data["variables"]:
            check_keys("kriged variable", row, ("variable", "unit", "places_per_octave"))
            check_choice("variable", str(row["variable"]), VARIABLES)
        units = np.array([row["unit"] for row in data["variables"]], dtype=np.float64)
        mix = _table([row["places_per_octave"] for row in data["variables"]])
        places = _table([cell["place"] for cell in data["cells"]])
        pulls = np.array([cell["pull"] for cell in data["cells"]], dtype=np.float64)
        if len(places) != len(mix) or not (
            np.isfinite(places).all() and np.isfinite(pulls).all() and (units > 0).all()
        ):
            raise InputError(
                f"a kriged model needs units > 0 and finite places on {len(mix)} axes for every cell; calibrate again"
            )
        names = tuple(str(row["variable"]) for row in data["variables"])
        return cls(RampModel.from_json(data["base"]), names, units, mix, places, pulls, float(data["largest"]))


def _table(rows: list[list[float]]) -> Floats:
    """[columns, rows]; raises `InputError` where rows are not equally long."""
    if not rows or len({len(row) for row in rows}) != 1:
        raise InputError("a kriged model needs cells with equally many places each; calibrate again")
    return np.array(rows, dtype=np.float64).T


class _Compiled:
    """The arrays of an evaluation of any steps, and smaller ones for the what-ifs that are most of what is asked."""

    def __init__(self, model: KrigedModel) -> None:
        plain = [name not in NOT_PLAIN for name in model.variables]
        self.any_steps = _Evaluation(model, np.ones_like(plain))
        self.plain_steps = self.any_steps if all(plain) else _Evaluation(model, np.array(plain))

    def __call__(self, features: Floats) -> Floats:
        return self.plain_steps(features) if is_plain(features) else self.any_steps(features)


class _Evaluation:
    """Prices of steps in which no variables are other than 0 but those ``kept`` [variables]. Few numpy calls, because
    the scheduler asks for prices at every step."""

    def __init__(self, model: KrigedModel, kept: NDArray[np.bool_]) -> None:
        names = [name for name, keep in zip(model.variables, kept, strict=True) if keep]
        axes = (model.mix[:, kept] != 0.0).any(axis=1)
        self.base = RampSums(model.base, beside=names)
        self.largest = model.largest
        self.per_unit = 1.0 / model.units[kept, None]
        self.mix = model.mix[np.ix_(axes, kept)] / np.log(2.0)
        square = (model.places**2).sum(axis=0)[None]
        # |x - c|^2 = |c|^2 - 2 c.x + |x|^2 as one product, of [x, 1, |x|^2] and [-2 c, |c|^2, 1]
        self.cells = np.concatenate([-2.0 * model.places[axes], square, np.ones_like(square)])
        self.block = max(2, MATRIX_WORK // self.cells.size // 4 * 4)  # fours fill a processor's registers
        self.pulls = np.stack([model.pulls, np.zeros_like(model.pulls)], axis=1)  # two columns: see MATRIX_WORK

    def __call__(self, features: Floats) -> Floats:
        """[steps] from features [len(FEATURES), steps]."""
        values = self.base.rows(features)
        seconds = self.base(values)
        count = len(seconds)
        units = values[: len(self.per_unit)]
        units *= self.per_unit
        steps = np.ones((len(self.cells), max(count, 2)))  # two columns at least: see MATRIX_WORK
        at = np.matmul(self.mix, np.log1p(units, out=units), out=steps[:-2, :count])
        np.einsum("as,as->s", at, at, out=steps[-1, :count])
        pull = np.empty(steps.shape[1])
        for some in _parts(len(pull), STEPS_AT_ONCE):
            pull[some] = self._pull(steps[:, some])
        seconds *= np.exp(np.minimum(np.maximum(pull[:count], -self.largest), self.largest))
        return seconds

    def _pull(self, steps: Floats) -> Floats:
        """[steps]: weighted sums of the cells near the ``steps`` [axes + 2, steps]."""
        apart = np.empty((steps.shape[1], self.cells.shape[1]), dtype=np.float32)
        for some in _parts(len(apart), self.block):
            apart[some] = steps[:, some].T @ self.cells
        return np.asarray((_near(apart).astype(np.float64) @ self.pulls)[:, 0])


def _parts(count: int, most: int) -> list[slice]:
    """All of ``count`` >= 2 by at most ``most`` >= 2, never one alone: the last part may begin in the one before it."""
    starts = (min(first, count - 2) for first in range(0, count, most))
    return [slice(first, first + most) for first in starts]


def fit_kriged(
    terms: Sequence[Ramp], features: Floats, seconds: Floats, weights: Floats | None, *, padded: bool = True
) -> KrigedModel:
    """Base of ``terms``, reach, noise and pulls. features: [len(FEATURES), steps], seconds: [steps]; ``padded``: the
    steps ran as CUDA graphs, which are made for rounded sizes."""
    slopes = nonnegative_relative(design(terms, features), seconds, weights=weights)
    base = RampModel((tuple(terms),), (tuple(float(s) for s in slopes),))
    some = np.random.default_rng(0).permutation(len(seconds))[:MOST_CELLS]
    noise = np.ones(len(some)) if weights is None else 1.0 / weights[some]
    features, seconds = features[:, some], seconds[some]
    rest = np.log(seconds / base.seconds(features))
    axes = [
        axis
        for axis in AXES
        if (padded or not PADDING & axis.of.keys()) and np.ptp(variable_rows(features, tuple(axis.of)), axis=1).any()
    ]
    names = tuple(dict.fromkeys(name for axis in axes for name in axis.of))
    units = np.array([UNITS.get(name, 1.0) for name in names])
    mix = np.array([[axis.of.get(name, 0.0) / axis.octaves for name in names] for axis in axes])
    at = mix @ np.log2(1.0 + variable_rows(features, names) / units[:, None])
    reach, share = _reach_and_noise(at[:, :TUNED_ON], rest[:TUNED_ON], noise[:TUNED_ON])
    pulls = np.asarray(np.linalg.solve(_kernel(at / reach) + share * np.diag(noise), rest), dtype=np.float64)
    return KrigedModel(base, names, units, mix / reach, at / reach, pulls, float(np.abs(rest).max()))


def _near(apart: NDArray[Any]) -> NDArray[Any]:
    """1 / (1 + d^1.5) of squared distances d^2, which are overwritten."""
    root = np.sqrt(np.abs(apart, out=apart), out=apart)  # what is rounded to below 0 is as near as what is above
    root *= np.sqrt(root)
    root += 1.0
    return np.asarray(np.divide(1.0, root, out=root))


def _kernel(at: Floats) -> Floats:
    """[cells, cells] of places [axes, cells]."""
    square = (at**2).sum(axis=0)
    apart = square[:, None] + square - 2.0 * at.T @ at
    np.fill_diagonal(apart, 0.0)
    return _near(apart)


def _reach_and_noise(at: Floats, rest: Floats, noise: Floats) -> tuple[float, float]:
    """Those of the smallest leave-one-out error, or of less noise where that is nearly as small: steps of runs often
    lie on the grid, closer to a cell than that cell to its neighbours. at: [axes, cells]; rest: [cells], logarithms;
    noise: [cells], relative variances."""

    def error(reach: float, share: float) -> float:
        inverse = np.linalg.inv(_kernel(at / reach) + share * np.diag(noise))
        return float(np.average(np.abs(inverse @ rest / np.diag(inverse)), weights=1.0 / noise))

    errors = {pair: error(*pair) for pair in itertools.product(REACHES, NOISES)}
    most = NEARLY * min(errors.values())
    share, _, reach = min((share, found, reach) for (reach, share), found in errors.items() if found <= most)
    return reach, share
