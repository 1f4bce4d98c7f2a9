"""Marks of the test modules that need a GPU: ``pytestmark = NEEDS_GPU``. Without one their tests are skipped, see
`tests.conftest`."""

from __future__ import annotations

import pytest

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.usefixtures("frozen_heap")]
