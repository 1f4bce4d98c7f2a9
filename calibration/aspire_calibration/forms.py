"""Forms of the cost model: what seconds may depend on, and how. Calibration fits several and keeps the best.

| form | idea |
|---|---|
| paper | b0 + b1 query_tokens + b2 (sparse + full KV tokens): arXiv 2609.17943 |
| linear | every feature its own price, one straight line each |
| roofline | piecewise linear in GEMM tokens (weights, then compute) and KV tokens (latency, then bandwidth) |
| staircase | roofline with a deviation for every GEMM size: a larger one may be faster when its kernel is better |
| launches | decode steps: roofline, context length and verify width; with prompts, without a graph: host or device |
| stairs | launches with a deviation for every GEMM size of the graphs |
| kriging | a sum of prices, corrected by a Gaussian process between the measured cells |
| overlap | the larger of host work and roofline device work: steps of small models wait for the host |
| table | linear times an interpolation between measured cells |
`*-ols` are the same terms by ordinary least squares on seconds: for comparison only, never kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from aspire.errors import check_choice
from aspire.scheduler.features import Floats
from aspire_calibration.launches import GraphForm, LaunchModel, fit_launches
from aspire_calibration.overlap import fit_max, host_terms
from aspire_calibration.ramps import Ramp, RampModel, chain, design, present
from aspire_calibration.solve import nonnegative_relative, ordinary
from aspire_calibration.staircase import fit_staircase
from aspire_calibration.table import TableModel
from aspire_calibration.variables import INDEX, variable_rows

LAST_SEGMENT = 4.0  # the last segment of a curve, along which it extrapolates, spans at least this factor
LAUNCH_FORMS: dict[GraphForm, str] = {
    "launches": "roofline, context and verify width; steps with prompts and without a graph apart",
    "stairs": "launches with a deviation per GEMM size",
    "kriging": "prices corrected by a Gaussian process between cells; steps without a graph apart",
}
MIN_PER_KNOT = 3  # distinct sampled values that a segment of a curve must hold


class Fitted(Protocol):
    """A fitted form: seconds of steps, and JSON."""

    def seconds(self, features: Floats) -> Floats: ...  # [steps] from [len(FEATURES), steps]

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Form:
    """A named way to fit. ``fit(features [len(FEATURES), steps], seconds [steps], weights [steps] or None)``."""

    name: str
    title: str
    fit: Callable[[Floats, Floats, Floats | None], Fitted]
    selectable: bool = True
    monotone: bool = True  # more work never costs less, by construction
    handicap: float = 1.0  # its score is multiplied by this: what is not monotone must be clearly better


def knots(values: Floats, most: int, *, floor: float = 1.0) -> list[float]:
    """At most ``most`` inner knots, evenly spaced in the logarithm of the positive values, each segment populated."""
    distinct = np.unique(values[values >= floor])
    if len(distinct) < 2 * MIN_PER_KNOT:
        return []
    logs = np.log(distinct)
    wanted = np.exp(np.linspace(logs[0], logs[-1], most + 2)[1:-1])
    inner: list[float] = []
    for knot in wanted:
        snapped = float(distinct[np.argmin(np.abs(logs - np.log(knot)))])
        since = np.count_nonzero((distinct > (inner[-1] if inner else 0.0)) & (distinct <= snapped))
        beyond = np.count_nonzero(distinct > snapped)
        if since >= MIN_PER_KNOT and beyond >= MIN_PER_KNOT and snapped <= distinct[-1] / LAST_SEGMENT:
            inner.append(snapped)
    return inner


def paper_terms(features: Floats) -> list[Ramp]:
    return [Ramp("one"), Ramp("query_tokens"), Ramp("kv_tokens")]


def linear_terms(features: Floats) -> list[Ramp]:
    names = (
        "one",
        "rows",
        "padded_tokens",
        "draft_rows",
        "verify_rows",
        "logits_rows",
        "sparse_kv_tokens",
        "full_kv_tokens",
        "verify_extra_qkv",
        "prefill_tokens",
        "prefill_pairs",
        "select_kv_tokens",
        "select_rows",
    )
    return [Ramp(name) for name in names if name == "one" or np.any(variable_rows(features, [name]))]


def roofline_terms(features: Floats) -> list[Ramp]:
    """Curves for GEMM tokens and KV tokens, steps for kinds of rows that are there at all, lines for the rest."""
    terms = linear_terms(features)
    curves = {"padded_tokens": 10, "sparse_kv_tokens": 3, "full_kv_tokens": 4, "rows": 3, "select_kv_tokens": 2}
    out = [term for term in terms if term.variable not in curves]
    for name, most in curves.items():
        if any(term.variable == name for term in terms):
            out += chain(name, knots(features[INDEX[name]], most))
    for name in ("draft_rows", "verify_rows", "full_rows", "prefill_tokens", "select_rows"):
        values = variable_rows(features, [name])
        if np.any(values > 0) and np.any(values == 0):
            out.append(present(name))
    return out


def fit_sum(
    terms: Sequence[Ramp], features: Floats, seconds: Floats, weights: Floats | None, *, ols: bool = False
) -> RampModel:
    """One sum of ramps, slopes >= 0, relative error (``ols``: plain least squares on seconds)."""
    matrix = design(terms, features)
    slopes = ordinary(matrix, seconds) if ols else nonnegative_relative(matrix, seconds, weights=weights)
    return RampModel((tuple(terms),), (tuple(float(s) for s in slopes),))


def fit_overlap(features: Floats, seconds: Floats, weights: Floats | None) -> RampModel:
    """max(host, device), see `aspire_calibration.overlap`."""
    return fit_max(host_terms(features), roofline_terms(features), features, seconds, weights)


def _sum_form(name: str, title: str, terms: Callable[[Floats], list[Ramp]], *, ols: bool = False) -> Form:
    def fit(features: Floats, seconds: Floats, weights: Floats | None) -> Fitted:
        return fit_sum(terms(features), features, seconds, weights, ols=ols)

    return Form(name, title, fit, selectable=not ols, monotone=not ols)


def _fit_staircase(features: Floats, seconds: Floats, weights: Floats | None) -> Fitted:
    return fit_staircase(roofline_terms(features), features, seconds, weights)


def _launches_form(name: GraphForm, graph_tokens: float = np.inf) -> Form:
    def fit(features: Floats, seconds: Floats, weights: Floats | None) -> Fitted:
        return fit_launches(roofline_terms, features, seconds, weights, graph_tokens, graphs=name)

    return Form(name, LAUNCH_FORMS[name], fit, monotone=False, handicap=1.1)


def _fit_table(features: Floats, seconds: Floats, weights: Floats | None) -> Fitted:
    base = fit_sum(linear_terms(features), features, seconds, weights)
    return TableModel.around(base, features, seconds)


FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        _sum_form("paper", "three terms of the paper, relative error", paper_terms),
        _sum_form("linear", "one price per feature", linear_terms),
        _sum_form("roofline", "piecewise linear in GEMM and KV tokens", roofline_terms),
        Form("staircase", "roofline with a deviation per GEMM size", _fit_staircase, monotone=False, handicap=1.1),
        *map(_launches_form, LAUNCH_FORMS),
        Form("overlap", "max of host and roofline device work", fit_overlap),
        Form("table", "linear x interpolation between cells", _fit_table, monotone=False, handicap=1.25),
        _sum_form("paper-ols", "three terms, ordinary least squares", paper_terms, ols=True),
        _sum_form("linear-ols", "one price per feature, ordinary least squares", linear_terms, ols=True),
    )
}


def forms_named(names: Sequence[str] | None = None, graph_buckets: Sequence[int] = ()) -> list[Form]:
    """The forms of these names (default: all); raises `UsageError` for an unknown one.

    ``graph_buckets``: of the engine that was timed; larger steps ran without a graph.
    """
    largest = float(max(graph_buckets, default=np.inf))
    sized: dict[str, Form] = {name: _launches_form(name, largest) for name in LAUNCH_FORMS}
    known = {**FORMS, **sized}
    return [known[check_choice("form", name, known)] for name in (names or known)]


def fitted_from_json(data: dict[str, Any]) -> Fitted:
    """A fitted form from its JSON; raises `UsageError` for a type that is not known."""
    readers: dict[str, Callable[[dict[str, Any]], Fitted]] = {
        "ramps": RampModel.from_json,
        "table": TableModel.from_json,
        "launches": LaunchModel.from_json,
    }
    return readers[check_choice("fitted form type", str(data.get("type")), readers)](data)
