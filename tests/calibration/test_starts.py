"""What a step that starts from idle takes longer: by the rest before it and by the requests that begin in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire_calibration import Cell, CostModelFile, Sample, Samples, prefill, profile_plan, read_samples
from aspire_calibration.starts import start_latency
from tests.calibration.machine import AHEAD, HEADER, true_seconds

PROFILES = Path(__file__).resolve().parents[2] / "calibration" / "profiles"
CELLS = [cell for cell in profile_plan(AHEAD) if cell.idle]
Extra = Callable[[Cell], float]


@dataclass(frozen=True)
class Machine:
    """The made-up machine as a fitted form."""

    def seconds(self, features: np.ndarray) -> np.ndarray:
        from aspire.scheduler.features import StepFeatures

        return true_seconds(StepFeatures.from_columns(features))


def samples_of(extra: Extra, cells: list[Cell] = CELLS) -> Samples:
    found = {}
    for cell in cells:
        features = HEADER.features_of(cell)
        found[cell.key] = Sample(cell, features, (float(true_seconds(features)) + extra(cell),))
    return Samples(HEADER, found)


def fit(samples: Samples) -> tuple[list[float], list[float], float]:
    pairs, per_request_s = start_latency(samples, Machine())  # type: ignore[arg-type]
    return [rest for rest, _ in pairs], [seconds for _, seconds in pairs], per_request_s


@given(
    latency=st.lists(st.floats(0.0, 5e-3), min_size=3, max_size=3).map(sorted),
    per_request_s=st.floats(0.0, 2e-4),
)
def test_a_machine_that_is_so_is_found_to_be_so(latency: list[float], per_request_s: float) -> None:
    by_rest = dict(zip((0.003, 0.02, 0.1), latency, strict=True))
    rests, found, price = fit(samples_of(lambda cell: by_rest[cell.rest_s] + per_request_s * (cell.rows - 1)))
    assert rests == [0.003, 0.02, 0.1]
    np.testing.assert_allclose(found, latency, rtol=1e-3, atol=1e-7)
    assert price == pytest.approx(per_request_s, rel=1e-3, abs=1e-8)


@given(over=st.lists(st.floats(-5e-4, 5e-3), min_size=len(CELLS), max_size=len(CELLS)))
def test_whatever_was_measured_nothing_is_negative_and_a_longer_rest_never_costs_less(over: list[float]) -> None:
    by_key = dict(zip((cell.key for cell in CELLS), over, strict=True))
    _, found, price = fit(samples_of(lambda cell: by_key[cell.key]))
    assert found[0] >= 0 and price >= 0 and found == sorted(found)


def test_without_such_cells_there_is_nothing_to_tell() -> None:
    assert start_latency(Samples(HEADER, {}), Machine()) == ((), 0.0)  # type: ignore[arg-type]


def test_cells_that_cannot_tell_the_requests_from_the_rest_give_them_no_price() -> None:
    few = [replace(prefill(64, 64, 1), rest_s=0.003), replace(prefill(64, 64, 4), rest_s=0.1)]
    rests, found, price = fit(samples_of(lambda cell: 1e-3 if cell.rows == 1 else 2e-3, few))
    assert rests == [0.003, 0.1] and found == pytest.approx([1e-3, 2e-3], rel=1e-3) and price < 1e-7
    alike = [replace(prefill(64, 64, 1), rest_s=rest_s) for rest_s in rests]
    assert fit(samples_of(lambda cell: 1e-3, alike))[2] == 0.0


def test_one_disturbed_cell_and_long_steps_decide_little() -> None:
    extra: Extra = lambda cell: 1.5e-3 + 3e-5 * (cell.rows - 1)  # noqa: E731
    disturbed = CELLS[4].key
    _, found, price = fit(samples_of(lambda cell: 20 * extra(cell) if cell.key == disturbed else extra(cell)))
    assert found == pytest.approx([1.5e-3] * 3, rel=0.1) and price == pytest.approx(3e-5, rel=0.5)
    long = [replace(prefill(16384, 16384), rest_s=rest_s) for rest_s in (0.003, 0.02, 0.1)]
    over_s = -0.1 * float(true_seconds(HEADER.features_of(long[0])))
    assert over_s < -4e-3, "so that in absolute errors they would decide"
    _, found, price = fit(samples_of(lambda cell: over_s if cell in long else extra(cell), [*CELLS, *long]))
    assert found == pytest.approx([1.5e-3] * 3, rel=0.1) and price == pytest.approx(3e-5, rel=0.5)


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-1.7b", "qwen3-8b", "llama-3.1-8b"])
def test_measured_cells_left_out_are_foretold_better_than_by_a_median_per_rest(name: str) -> None:
    samples = read_samples(PROFILES / f"h200-{name}.samples.jsonl")
    fitted = CostModelFile.load(PROFILES / f"h200-{name}.json").fitted
    errors, medians = [], []
    for out in samples.idle:
        others = {sample.cell.key: sample for sample in samples.idle if sample is not out}
        pairs, per_request_s = start_latency(Samples(samples.header, others), fitted)
        over = {
            key: sample.median_s - float(fitted.seconds(sample.features.matrix()[:, None])[0])
            for key, sample in {**others, out.cell.key: out}.items()
        }
        same = [over[key] for key, sample in others.items() if sample.cell.rest_s == out.cell.rest_s]
        foretold = dict(pairs)[out.cell.rest_s] + per_request_s * (out.cell.rows - 1)
        errors.append(abs(foretold - over[out.cell.key]) / out.median_s)
        medians.append(abs(max(0.0, float(np.median(same))) - over[out.cell.key]) / out.median_s)
    assert len(errors) == 12 and np.mean(errors) < np.mean(medians), (np.mean(errors), np.mean(medians))
