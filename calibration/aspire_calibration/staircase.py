"""The staircase form: a monotone roofline plus a small deviation of its own for every GEMM size.

Libraries pick another GEMM kernel at every size, so a step of 48 tokens may take longer than one of 64. On top of the
roofline's curve over padded tokens every sampled size gets a deviation, up or down, that fades linearly to the next
size and beyond the largest one to nothing: there the roofline extrapolates. Each deviation is held to zero by a
pseudo-observation, so that a size seen once or twice cannot follow its own noise.
"""

from __future__ import annotations

import numpy as np

from aspire.scheduler.features import Floats
from aspire_calibration.ramps import Ramp, RampModel, design
from aspire_calibration.solve import nonnegative_relative
from aspire_calibration.variables import INDEX

STIFFNESS = 0.3  # weight of a pseudo-observation against a sample
MOST_SIZES = 96
FADE = 1.25  # beyond the largest size the deviation is gone after this factor


def sizes_of(padded: Floats) -> Floats:
    """Sampled sizes that get a deviation, at most `MOST_SIZES`."""
    nodes = np.unique(padded[padded > 0])
    # Sizes closer than 2 % (unpadded prefill chunks) are one node: nothing in a GEMM tells them apart.
    out = [float(nodes[-1])]
    for node in nodes[-2::-1]:
        if node < out[-1] / 1.02 or node == nodes[0]:
            out.append(float(node))
    step = -(-len(out) // MOST_SIZES)
    return np.array(sorted({*out[::step], out[-1]}))


def fit_staircase(roofline: list[Ramp], features: Floats, seconds: Floats, weights: Floats | None) -> RampModel:
    """``roofline`` terms, slopes >= 0, plus deviations per size. features: [len(FEATURES), steps], seconds: [steps]."""
    padded = features[INDEX["padded_tokens"]]
    nodes = sizes_of(padded)
    edges = np.array([0.0, *nodes, FADE * nodes[-1]])
    base = design(roofline, features)
    hats = np.stack([np.interp(padded, edges, one) for one in np.eye(len(edges))[1:-1]], axis=1)
    nearest = np.argsort(np.abs(np.log(np.maximum(padded, 1.0)[:, None] / nodes)), axis=0)[:5]
    penalty = np.zeros((len(nodes), base.shape[1] + 2 * len(nodes)))
    weight = STIFFNESS / np.median(seconds[nearest], axis=0)
    penalty[:, base.shape[1] :] = np.hstack([np.diag(weight), -np.diag(weight)])
    solved = nonnegative_relative(np.hstack([base, hats, -hats]), seconds, weights=weights, penalty=penalty)
    up, down = solved[base.shape[1] :].reshape(2, -1)
    return _with_deviations(roofline, solved[: len(roofline)], edges, np.array([0.0, *(up - down), 0.0]))


def _with_deviations(roofline: list[Ramp], slopes: Floats, edges: Floats, values: Floats) -> RampModel:
    """One chain of ramps over padded tokens: the roofline's slope plus that of the deviations, edge to edge."""
    terms, out = [], []
    cuts = {float(edge) for edge in edges}
    for term, slope in zip(roofline, slopes, strict=True):
        if term.variable == "padded_tokens":
            cuts |= {term.start, term.stop}
        else:
            terms.append(term)
            out.append(float(slope))
    ordered = sorted({*cuts, np.inf})
    for low, high in zip(ordered, ordered[1:], strict=False):
        own = sum(
            float(slope)
            for term, slope in zip(roofline, slopes, strict=True)
            if term.variable == "padded_tokens" and term.start <= low < term.stop
        )
        if high <= edges[-1]:
            own += float(np.subtract(*np.interp([high, low], edges, values))) / (high - low)
        terms.append(Ramp("padded_tokens", low, high))
        out.append(own)
    return RampModel((tuple(terms),), (tuple(out),))
