"""The launches form: steps replayed as CUDA graphs and steps launched kernel by kernel are priced apart.

A step with prefill rows, or with more tokens than the largest graph, pays the host for every kernel: it takes the
larger of the host's launches and the device's work, and fitted together with the others it would bend their curves.
Decode steps add to the roofline what their launches are chosen by: how long contexts are (not only how many tokens they
sum to: one long row is slower than many short ones) and how wide the widest verifying row is (attention takes larger
tiles for wide ones, for all rows). Contexts are means over the rows of a step, so a short row added to long ones may
lower the price a little. With ``stairs`` every GEMM size of a graph may deviate (`aspire_calibration.staircase`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import InputError, check_keys
from aspire.scheduler.features import Floats
from aspire_calibration.overlap import fit_max
from aspire_calibration.ramps import Ramp, RampModel, chain, design, present
from aspire_calibration.solve import nonnegative_relative
from aspire_calibration.staircase import fit_staircase
from aspire_calibration.variables import INDEX, variable_rows

WIDTHS = (1.0, 3.0, 5.0, 9.0)  # query tokens of the widest row beyond which the engine takes wider launches
TOKEN_KNOTS = (512.0, 2048.0)  # of chunks: GEMMs of few tokens use a GPU badly
MIN_EAGER = 8  # steps; with fewer a form of their own is not worth having
QUERY, PREFILL = INDEX["query_tokens"], INDEX["prefill_tokens"]


@dataclass(frozen=True)
class LaunchModel:
    """``graph`` prices steps of at most ``graph_tokens`` query tokens without prefill rows, ``eager`` all others."""

    graph: RampModel
    eager: RampModel
    graph_tokens: float

    def seconds(self, features: Floats) -> Floats:
        """[steps] from [len(FEATURES), steps]."""
        eager = is_eager(features, self.graph_tokens)
        if not eager.any():
            return self.graph.seconds(features)
        if eager.all():
            return self.eager.seconds(features)
        return np.where(eager, self.eager.seconds(features), self.graph.seconds(features))

    def to_json(self) -> dict[str, Any]:
        limit = None if self.graph_tokens == np.inf else self.graph_tokens
        return {
            "type": "launches",
            "graph_tokens": limit,
            "graph": self.graph.to_json(),
            "eager": self.eager.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LaunchModel:
        """Inverse of `to_json`; raises `InputError` or `UsageError` for what is not such a model."""
        check_keys("launches model", data, ("type", "graph_tokens", "graph", "eager"))
        limit = np.inf if data["graph_tokens"] is None else float(data["graph_tokens"])
        if not limit > 0:
            raise InputError(f"a launches model needs graph_tokens > 0, got {limit}; calibrate again")
        return cls(RampModel.from_json(data["graph"]), RampModel.from_json(data["eager"]), limit)


def is_eager(features: Floats, graph_tokens: float) -> NDArray[np.bool_]:
    """[steps]: which steps no graph can run."""
    return np.asarray((features[PREFILL] > 0) | (features[QUERY] > graph_tokens))


def launch_terms(roofline: list[Ramp], features: Floats) -> list[Ramp]:
    """Terms of decode steps: the roofline and what chooses the launches."""
    terms = [*roofline, Ramp("mean_context_octaves")]
    width = variable_rows(features, ["widest_verify"])[0]
    terms += [Ramp("widest_verify", low, low + 1.0) for low in WIDTHS if (width <= low).any() and (width > low).any()]
    for name, low in (("wide_kv_tokens", 1.0), ("widest_kv_tokens", 9.0)):
        if ((width > 0) & (width <= low)).any() and (width > low).any():
            terms.append(Ramp(name))
    selecting, wide = variable_rows(features, ["select_rows"])[0] > 0, width > 1
    if selecting.any():
        terms.append(Ramp("select_context_octaves"))
    if (selecting & ~wide).any() and (selecting & wide).any():  # else nothing tells it from the price of page mass
        terms.append(Ramp("wide_select_kv_tokens"))
    return terms


def eager_terms(features: Floats) -> tuple[list[Ramp], list[Ramp]]:
    """(host, device): few terms, because few cells are eager. Launches by kind of row; tokens, contexts, attention."""

    def some(names: tuple[str, ...]) -> list[str]:
        return [name for name in names if np.any(variable_rows(features, [name]))]

    kinds = [name for name in some(("draft_rows", "verify_rows", "select_rows")) if np.any(features[INDEX[name]] == 0)]
    device = [Ramp(name) for name in some(("full_kv_tokens", "sparse_kv_tokens", "prefill_pairs", "select_kv_tokens"))]
    host = [Ramp("one"), Ramp("rows"), *map(present, kinds)]
    return host, [Ramp("one"), *chain("query_tokens", TOKEN_KNOTS), *device]


def fit_launches(
    roofline_terms: Callable[[Floats], list[Ramp]],
    features: Floats,
    seconds: Floats,
    weights: Floats | None,
    graph_tokens: float,
    *,
    stairs: bool = False,
) -> LaunchModel:
    """Both parts, each to its own steps; with too few steps of one kind, a roofline of all steps serves for it."""
    eager = is_eager(features, graph_tokens)

    def fit(mine: NDArray[np.bool_], fit_part: Callable[[Floats, Floats, Floats | None], RampModel]) -> RampModel:
        if mine.sum() < MIN_EAGER:
            return _fit_sum(roofline_terms(features), features, seconds, weights)
        return fit_part(features[:, mine], seconds[mine], None if weights is None else weights[mine])

    def fit_graph(features: Floats, seconds: Floats, weights: Floats | None) -> RampModel:
        terms = launch_terms(roofline_terms(features), features)
        return (fit_staircase if stairs else _fit_sum)(terms, features, seconds, weights)

    def fit_eager(features: Floats, seconds: Floats, weights: Floats | None) -> RampModel:
        return fit_max(*eager_terms(features), features, seconds, weights)

    graph, without = fit(~eager, fit_graph), fit(eager, fit_eager)
    names = tuple(f"eager {name}" for name in without.names)
    return LaunchModel(replace(graph, names=("graph",)), replace(without, names=names), graph_tokens)


def _fit_sum(terms: list[Ramp], features: Floats, seconds: Floats, weights: Floats | None) -> RampModel:
    slopes = nonnegative_relative(design(terms, features), seconds, weights=weights)
    return RampModel((tuple(terms),), (tuple(float(s) for s in slopes),))
