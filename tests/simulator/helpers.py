"""Shared by the simulator's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aspire.rundir import Run
from aspire.runlog import RequestTable, StepLog
from aspire.scheduler.features import FEATURES, StepFeatures

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def real_data(name: str) -> Path:
    """A real input file of ../shared/data; skips the test where it is absent."""
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"real data file ../shared/data/{name} is not here")
    return path


class LinearCost:
    """A small linear cost model: overhead + query tokens + KV tokens."""

    def __init__(self, base: float = 1e-3, token: float = 2e-6, kv: float = 2e-9, prefill: float = 1e-10) -> None:
        weights = dict.fromkeys(FEATURES, 0.0)
        weights |= {"padded_tokens": token, "sparse_kv_tokens": kv, "full_kv_tokens": kv, "prefill_pairs": prefill}
        self.base = base
        self.weights = np.array([weights[name] for name in FEATURES])

    def predict(self, features: StepFeatures) -> np.ndarray:
        return self.base + features.matrix() @ self.weights

    def marginal(self, base: StepFeatures, added: StepFeatures) -> np.ndarray:
        return self.predict(base + added) - self.predict(base)


def random_run(rng: np.random.Generator, steps: int = 40, slots: int = 4) -> Run:
    """A log of made-up steps: well-formed columns, no scheduler behind them."""
    log = StepLog()
    clock = 0.0
    for _ in range(steps):
        rows = np.sort(rng.choice(slots, size=rng.integers(1, slots + 1), replace=False))
        mode = rng.integers(1, 4, size=len(rows))
        drafted = rng.integers(0, 5, size=len(rows))
        verify = mode == 3
        accepted = np.where(verify, rng.integers(0, 99, size=len(rows)) % (drafted + 1), 0)
        margin = np.where(mode == 2, rng.gamma(2.0, 1.5, size=len(rows)), np.nan)
        seconds = float(rng.gamma(3.0, 1e-3))
        log.append(
            clock,
            seconds,
            rng.random(len(FEATURES)) * 1e4,
            slot=rows,
            request=rows,
            mode=mode,
            query_tokens=np.where(verify, drafted + 1, 1),
            context=rng.integers(0, 100_000, size=len(rows)),
            drafted=drafted,
            accepted=accepted,
            committed=np.where(verify, accepted + 1, 0),
            finished=0,
            margin=margin,
        )
        clock += seconds * 1.01
    table = RequestTable.empty(slots)
    table.output_tokens[:] = np.bincount(log.column("request"), weights=log.column("committed"), minlength=slots)
    table.prompt_tokens[:] = 10
    table.finish_s[:] = clock
    return Run({"policy": "made up"}, table, log, meta={"command": "test"})
