"""The launches form: steps replayed as CUDA graphs and steps launched kernel by kernel are priced apart.

A step with prefill rows, or with more tokens than the largest graph, pays the host for every kernel: its time says
little about the GPU, and fitted together with the others it would bend their curves. Decode steps add to the roofline
what their launches are chosen by: how long contexts are (not only how many tokens they sum to: one long row is slower
than many short ones) and how wide verifying rows are (attention takes larger tiles for wide ones, for all rows).
Contexts and widths are means over the rows of a step, so a short row added to long ones may lower the price a little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import InputError, check_keys
from aspire.scheduler.features import Floats
from aspire_calibration.ramps import Ramp, RampModel, chain, design, present
from aspire_calibration.solve import nonnegative_relative
from aspire_calibration.variables import INDEX, variable_rows

WIDTH_KNOTS = (1.0, 2.0, 4.0, 8.0)  # drafted tokens a row at which the engine's bounds of verify width change
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
    terms = [*roofline, Ramp("mean_context_octaves"), *chain("mean_drafted", WIDTH_KNOTS)[:-1]]
    selecting = variable_rows(features, ["select_rows"])[0] > 0
    wide = variable_rows(features, ["mean_drafted"])[0] > 0
    if selecting.any():
        terms.append(Ramp("select_context_octaves"))
    if (selecting & ~wide).any() and (selecting & wide).any():  # else nothing tells it from the price of page mass
        terms.append(Ramp("wide_select_kv_tokens"))
    return terms


def eager_terms(features: Floats) -> list[Ramp]:
    """Few terms: the host's launches, tokens, contexts and prefill attention."""
    names = ("one", "query_tokens", "full_kv_tokens", "prefill_qkv", "select_rows")
    terms = [Ramp(name) for name in names if name == "one" or np.any(variable_rows(features, [name]))]
    verifying = variable_rows(features, ["verify_rows"])[0]
    return [*terms, present("verify_rows")] if np.any(verifying > 0) and np.any(verifying == 0) else terms


def fit_launches(
    roofline_terms: Callable[[Floats], list[Ramp]],
    features: Floats,
    seconds: Floats,
    weights: Floats | None,
    graph_tokens: float,
) -> LaunchModel:
    """Both parts, each to its own steps; with too few steps of one kind, a roofline of all steps serves for it."""
    eager = is_eager(features, graph_tokens)
    roofline = roofline_terms(features if eager.all() else features[:, ~eager])
    parts = []
    for name, mine, terms in (
        ("graph", ~eager, launch_terms(roofline, features[:, ~eager])),
        ("eager", eager, eager_terms(features[:, eager])),
    ):
        if mine.sum() < MIN_EAGER:
            mine, terms = np.ones(len(seconds), dtype=bool), roofline_terms(features)
        weight = None if weights is None else weights[mine]
        slopes = nonnegative_relative(design(terms, features[:, mine]), seconds[mine], weights=weight)
        parts.append(RampModel((tuple(terms),), (tuple(float(s) for s in slopes),), (name,)))
    return LaunchModel(parts[0], parts[1], graph_tokens)
