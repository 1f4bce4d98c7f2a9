"""The staircase form: one GEMM time per graph bucket, free to rise and fall, tied to its neighbours.

Libraries pick another GEMM kernel at every size, so a step of 48 tokens may take longer than one of 64. The curve over
padded tokens is linear between sampled sizes with values >= 0; pseudo-observations ask every inner value to lie on the
line between its neighbours, so that a size seen once or twice cannot follow its own noise.
"""

from __future__ import annotations

import numpy as np

from aspire.scheduler.features import Floats
from aspire_calibration.ramps import Ramp, RampModel, design
from aspire_calibration.solve import nonnegative_relative
from aspire_calibration.variables import INDEX

STIFFNESS = 0.3  # weight of a pseudo-observation against a sample
MOST_SIZES = 96


def sizes_of(padded: Floats) -> Floats:
    """Sampled sizes that become nodes of the curve: those with >= 2 samples and both ends, thinned geometrically."""
    values, counts = np.unique(padded, return_counts=True)
    keep = counts >= 2
    keep[[0, -1]] = True
    nodes = values[keep]
    # Sizes closer than 2 % (unpadded prefill chunks) are one node: nothing in a GEMM tells them apart.
    out = [float(nodes[-1])]
    for node in nodes[-2::-1]:
        if node < out[-1] / 1.02 or node == nodes[0]:
            out.append(float(node))
    step = -(-len(out) // MOST_SIZES)
    return np.array(sorted({*out[::step], out[-1]}))


def fit_staircase(other: list[Ramp], features: Floats, seconds: Floats, weights: Floats | None) -> RampModel:
    """Ramps of ``other`` variables (no constant, none of padded tokens) plus the curve over padded tokens.

    features: [len(FEATURES), steps], seconds: [steps].
    """
    padded = features[INDEX["padded_tokens"]]
    nodes = sizes_of(padded)
    curve = [Ramp("one")]
    curve += [Ramp("padded_tokens", low, high) for low, high in zip(nodes, nodes[1:], strict=False)]
    curve.append(Ramp("padded_tokens", float(nodes[-1])))
    to_slopes = values_to_slopes(nodes)
    matrix = np.hstack([design(other, features), design(curve, features) @ to_slopes])
    penalty = np.zeros((max(len(nodes) - 1, 0), matrix.shape[1]))
    for row, index in enumerate(range(1, len(nodes) - 1)):
        share = (nodes[index] - nodes[index - 1]) / (nodes[index + 1] - nodes[index - 1])
        near = seconds[np.argsort(np.abs(np.log(np.maximum(padded, 1.0) / nodes[index])))[:5]]
        at = len(other) + index
        penalty[row, at - 1 : at + 2] = np.array([share - 1.0, 1.0, -share]) * STIFFNESS / np.median(near)
    if len(nodes) > 1:  # beyond the last size: the mean slope over the sizes above half of it
        half = min(int(np.searchsorted(nodes, nodes[-1] / 2)), len(nodes) - 2)
        run = nodes[-1] - nodes[half]
        scale = run / np.median(seconds[padded >= nodes[half]])
        penalty[-1, -1] = scale
        penalty[-1, len(other) + len(nodes) - 1] -= scale / run
        penalty[-1, len(other) + half] += scale / run
    solved = nonnegative_relative(matrix, seconds, weights=weights, penalty=penalty)
    slopes = [*solved[: len(other)], *(to_slopes @ solved[len(other) :])]
    return RampModel((tuple(other) + tuple(curve),), (tuple(float(slope) for slope in slopes),))


def values_to_slopes(nodes: Floats) -> Floats:
    """Matrix that turns [value at each node, slope beyond] into the ramps of the curve.

    The ramps are [constant, slope of each segment, slope beyond].
    """
    count = len(nodes)
    out = np.zeros((count + 1, count + 1))
    out[0, 0] = 1.0
    for index, width in enumerate(np.diff(nodes)):
        out[index + 1, index : index + 2] = np.array([-1.0, 1.0]) / width
    out[count, count] = 1.0
    return out
