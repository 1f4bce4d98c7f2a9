"""Where to measure next: beside the cells that the model fitted so far predicts worst."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from aspire_calibration.cells import Cell, RowGroup
from aspire_calibration.forms import FORMS
from aspire_calibration.plan import PlanLimits
from aspire_calibration.samples import Samples

MIN_CELLS = 20  # with fewer, residuals say nothing
WORTH_REFINING = 0.02  # relative residuals below this are noise


def refiner(
    limits: PlanLimits, *, batch: int = 12, rounds: int = 5, form: str = "overlap", seed: int = 0
) -> Callable[[Samples], list[Cell]]:
    """A ``refine`` function for `run_profile`: at most ``rounds`` batches of ``batch`` new cells.

    Fits ``form`` to all grid cells, takes the cells with the largest relative residuals and proposes two neighbours of
    each, a factor 0.7-1.4 away in rows, context and query tokens, inside the limits.
    """
    generator = np.random.default_rng(seed)
    left = rounds

    def refine(samples: Samples) -> list[Cell]:
        nonlocal left
        grid = [sample for sample in samples.measured if not sample.cell.heldout]
        if left <= 0 or len(grid) < MIN_CELLS:
            return []
        left -= 1
        features = np.stack([sample.features.matrix() for sample in grid], axis=1)
        seconds = np.array([sample.median_s for sample in grid])
        residual = np.abs(FORMS[form].fit(features, seconds, None).seconds(features) / seconds - 1.0)
        wanted: dict[str, Cell] = {}
        for index in np.argsort(-residual):
            if residual[index] < WORTH_REFINING or len(wanted) >= batch:
                break
            for _ in range(2):
                cell = neighbour(grid[index].cell, limits, generator)
                if cell is not None and cell.key not in samples.by_key:
                    wanted[cell.key] = cell
        return list(wanted.values())[:batch]

    return refine


def neighbour(cell: Cell, limits: PlanLimits, generator: np.random.Generator) -> Cell | None:
    """A cell near ``cell`` that fits the limits, or None when eight draws give none."""
    for _ in range(8):
        rows, context, tokens = np.exp(generator.uniform(np.log(0.7), np.log(1.4), 3))
        moved = Cell(tuple(_moved(group, limits, rows, context, tokens) for group in cell.groups))
        if moved.key != cell.key and limits.fits(moved):
            return moved
    return None


def _moved(group: RowGroup, limits: PlanLimits, rows: float, context: float, tokens: float) -> RowGroup:
    count = max(1, round(group.count * rows))
    query = group.query_tokens if group.query_tokens == 1 else max(2, round(group.query_tokens * tokens))
    query = min(query, limits.max_model_len)
    if group.kind == "verify":
        query = min(query, limits.d_max + 1)
    length = min(limits.max_model_len, max(query, round(group.context_tokens * context)))
    sparse = 0
    if group.kind == "draft":
        sparse = min(length, limits.max_sparse_tokens or length, max(1, round(group.sparse_tokens * context)))
    return RowGroup(group.kind, count, query, length, sparse, group.select)


def worst(samples: Samples, predicted_s: Sequence[float], most: int = 5) -> list[tuple[str, float]]:
    """(key, relative error) of the cells predicted worst, for progress lines."""
    measured = samples.measured
    errors = [p / sample.median_s - 1.0 for sample, p in zip(measured, predicted_s, strict=True)]
    order = sorted(range(len(measured)), key=lambda index: -abs(errors[index]))
    return [(measured[index].cell.key, errors[index]) for index in order[:most]]
