"""The launches form: decode steps, steps with prompts, and steps too large for a CUDA graph are priced apart.

Steps with prompts run other kernels, sized for the longest rows the engine allows, and steps with more tokens than the
largest graph pay the host for every kernel: both take the larger of the host's launches and the device's work, and
fitted together with the others they would bend their curves. Decode steps add to the roofline what their launches are
chosen by: how long contexts are (not only how many tokens they sum to: one long row is slower than many short ones) and
how wide the widest verifying row is (attention takes larger tiles for wide ones, for all rows). Contexts are means over
the rows of a step, so a short row added to long ones may lower the price a little. With ``stairs`` every GEMM size of a
decode step may deviate (`aspire_calibration.staircase`); with ``kriging`` one `aspire_calibration.kriging` model prices
all steps of graphs, with prompts and without, instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aspire.errors import InputError, check_keys
from aspire.scheduler.features import GRAPH_WIDTHS, Floats
from aspire_calibration.kriging import KrigedModel, fit_kriged
from aspire_calibration.overlap import fit_max
from aspire_calibration.ramps import Ramp, RampModel, chain, design, present
from aspire_calibration.solve import nonnegative_relative
from aspire_calibration.staircase import fit_staircase
from aspire_calibration.variables import INDEX, variable_rows

TOKEN_KNOTS = (512.0, 2048.0)  # of chunks: GEMMs of few tokens use a GPU badly
MIN_CELLS = 8  # steps; with fewer a part of their own is not worth having
QUERY, PREFILL = INDEX["query_tokens"], INDEX["prefill_tokens"]
AS_GRAPH = "as graph"  # in JSON: steps with prompts are priced by the part of decode steps

Mask = NDArray[np.bool_]
Part = RampModel | KrigedModel
GraphForm = Literal["launches", "stairs", "kriging"]


@dataclass(frozen=True)
class LaunchModel:
    """``graph`` prices decode steps of at most ``graph_tokens`` query tokens, ``prompts`` (it may be the same object)
    steps of at most so many with prefill rows, ``eager`` larger ones."""

    graph: Part
    prompts: Part
    eager: Part
    graph_tokens: float

    @property
    def prices(self) -> tuple[RampModel, RampModel, RampModel]:
        """The ramps of graph, prompts and eager: what is corrected, where a part is kriged."""
        graph, prompts, eager = (
            part.base if isinstance(part, KrigedModel) else part for part in (self.graph, self.prompts, self.eager)
        )
        return graph, prompts, eager

    @property
    def cells(self) -> int:
        """Most cells that a price is compared with; 0 where no part is kriged."""
        return max(
            part.cells if isinstance(part, KrigedModel) else 0 for part in (self.graph, self.prompts, self.eager)
        )

    def seconds(self, features: Floats) -> Floats:
        """[steps] from [len(FEATURES), steps]."""
        kinds = [(features[QUERY] > self.graph_tokens, self.eager)]
        if self.prompts is not self.graph:
            kinds.append((kinds_of(features, self.graph_tokens)[0], self.prompts))
        out: Floats | None = None
        for mine, part in kinds:
            count = np.count_nonzero(mine)
            if count == len(mine):
                return part.seconds(features)
            if count:
                out = self.graph.seconds(features) if out is None else out
                out[mine] = part.seconds(features[:, mine])
        return self.graph.seconds(features) if out is None else out

    def to_json(self) -> dict[str, Any]:
        limit = None if self.graph_tokens == np.inf else self.graph_tokens
        parts = {name: getattr(self, name).to_json() for name in ("graph", "prompts", "eager")}
        if self.prompts is self.graph:
            parts["prompts"] = AS_GRAPH
        return {"type": "launches", "graph_tokens": limit, **parts}

    def changed(self, change: Callable[[Part], Part]) -> LaunchModel:
        """The same with every part changed."""
        graph = change(self.graph)
        prompts = graph if self.prompts is self.graph else change(self.prompts)
        return replace(self, graph=graph, prompts=prompts, eager=change(self.eager))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LaunchModel:
        """Inverse of `to_json`; raises `InputError` or `UsageError` for what is not such a model.

        One without ``prompts`` priced them as eager steps.
        """
        check_keys("launches model", data, ("type", "graph_tokens", "graph", "prompts", "eager"))
        limit = np.inf if data["graph_tokens"] is None else float(data["graph_tokens"])
        if not limit > 0:
            raise InputError(f"a launches model needs graph_tokens > 0, got {limit}; calibrate again")
        graph, eager = _part_from_json(data["graph"]), _part_from_json(data["eager"])
        prompts = data.get("prompts")
        if prompts == AS_GRAPH:
            return cls(graph, graph, eager, limit)
        return cls(graph, eager if prompts is None else _part_from_json(prompts), eager, limit)


def _part_from_json(data: dict[str, Any]) -> Part:
    return KrigedModel.from_json(data) if data.get("type") == "kriged" else RampModel.from_json(data)


def kinds_of(features: Floats, graph_tokens: float) -> tuple[Mask, Mask]:
    """([steps], [steps]): which steps have prompts and fit a graph, and which are too large for one."""
    eager = features[QUERY] > graph_tokens
    return np.asarray((features[PREFILL] > 0) & ~eager), np.asarray(eager)


def launch_terms(roofline: list[Ramp], features: Floats) -> list[Ramp]:
    """Terms of decode steps: the roofline and what chooses the launches."""
    terms = [*roofline, Ramp("mean_context_octaves")]
    width = variable_rows(features, ["widest_verify"])[0]
    edges = [low for low in map(float, GRAPH_WIDTHS) if (width <= low).any() and (width > low).any()]
    terms += [Ramp("widest_verify", low, low + 1.0) for low in edges]
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
    """(host, device): few terms, because such cells are few. Launches by kind of row; tokens, contexts, attention."""

    def some(names: tuple[str, ...]) -> list[str]:
        return [name for name in names if np.any(variable_rows(features, [name]))]

    kinds = [name for name in some(("draft_rows", "verify_rows", "select_rows")) if np.any(features[INDEX[name]] == 0)]
    device = [Ramp(name) for name in some(("full_kv_tokens", "sparse_kv_tokens", "prefill_pairs", "select_kv_tokens"))]
    host = [Ramp("one"), Ramp("rows"), *map(present, kinds)]
    return host, [Ramp("one"), *chain("padded_tokens", TOKEN_KNOTS), *map(present, kinds), *device]


def fit_launches(
    roofline_terms: Callable[[Floats], list[Ramp]],
    features: Floats,
    seconds: Floats,
    weights: Floats | None,
    graph_tokens: float,
    *,
    graphs: GraphForm = "launches",
) -> LaunchModel:
    """Every part to its own steps, ``kriging`` one to all steps of graphs. Where steps with prompts or without a graph
    are too few, both are one part; where even these are, or decode steps, a roofline of all steps serves."""
    prompts, eager = kinds_of(features, graph_tokens)
    decode = ~prompts & ~eager
    together = graphs == "kriging" and prompts.sum() >= MIN_CELLS
    if together:
        decode = ~eager
    if min(prompts.sum(), eager.sum()) < MIN_CELLS:
        prompts = eager = prompts | eager

    def fit(mine: Mask, fit_part: Callable[[Floats, Floats, Floats | None], Part], name: str) -> Part:
        if mine.sum() < MIN_CELLS:
            part: Part = _fit_sum(roofline_terms(features), features, seconds, weights)
        else:
            part = fit_part(features[:, mine], seconds[mine], None if weights is None else weights[mine])
        if isinstance(part, KrigedModel):
            return replace(part, base=replace(part.base, names=(name,)))
        names = (name,) if len(part.names) == 1 else tuple(f"{name} {branch}" for branch in part.names)
        return replace(part, names=names)

    def fit_graph(features: Floats, seconds: Floats, weights: Floats | None) -> Part:
        terms = roofline_terms(features)
        if graphs == "kriging":
            return fit_kriged(terms, features, seconds, weights, padded=graph_tokens < np.inf)
        terms = launch_terms(terms, features)
        return (fit_staircase if graphs == "stairs" else _fit_sum)(terms, features, seconds, weights)

    def fit_eager(features: Floats, seconds: Floats, weights: Floats | None) -> RampModel:
        return fit_max(*eager_terms(features), features, seconds, weights)

    graph = fit(decode, fit_graph, "graph")
    return LaunchModel(
        graph,
        graph if together else fit(prompts, fit_eager, "prompts"),
        fit(eager, fit_eager, "eager"),
        graph_tokens,
    )


def _fit_sum(terms: list[Ramp], features: Floats, seconds: Floats, weights: Floats | None) -> RampModel:
    slopes = nonnegative_relative(design(terms, features), seconds, weights=weights)
    return RampModel((tuple(terms),), (tuple(float(s) for s in slopes),))
