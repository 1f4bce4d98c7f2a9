"""Fixtures of the engine tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """Capturing a CUDA graph collects garbage first; what tests import need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
