"""Kernels that overlap prefer the same division of a multiprocessor's memory."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aspire_kernels import carveout
from aspire_kernels._triton import LAUNCH, PDL, tl, triton, wait_for_inputs


@triton.jit
def _fill(out, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    tl.store(out + tl.arange(0, 32), 7.0)


class _Driver:
    def __init__(self, error: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._error = error

    def cuFuncSetAttribute(self, function: ctypes.c_void_p, attribute: int, value: int) -> int:
        self.calls.append((function.value, attribute, value))
        return self._error


def _files(folder: Path, **options: Any) -> dict[str, str]:
    """A compiled kernel as Triton's cache holds it."""
    described = folder / "some_kernel.json"
    described.write_text(json.dumps({"num_warps": 4, **options}))
    return {"some_kernel.ptx": str(folder / "some_kernel.ptx"), described.name: str(described)}


@pytest.mark.parametrize(
    ("options", "calls"),
    [({"launch_pdl": True}, [(1234, 9, 100)]), ({"launch_pdl": False}, []), ({}, [])],
    ids=["early", "plain", "untold"],
)
def test_only_kernels_that_are_placed_early(
    options: dict[str, Any], calls: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = _Driver()
    monkeypatch.setattr(carveout, "_driver", lambda: driver)
    carveout.prefer_shared_memory(None, 1234, "some_kernel", _files(tmp_path, **options), "")
    assert driver.calls == calls


def test_a_refusal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carveout, "_driver", lambda: _Driver(error=1))
    with pytest.warns(UserWarning, match="CUDA error 1: kernel some_kernel"):
        carveout.prefer_shared_memory(None, 1234, "some_kernel", _files(tmp_path, launch_pdl=True), "")


@pytest.mark.gpu
def test_kernels_are_loaded_so() -> None:
    """Asked of the driver, for a kernel as it is launched."""
    if not PDL:
        pytest.skip("no programmatic dependent launch here")
    out = torch.zeros(32, device="cuda")
    compiled: Any = _fill[(1,)](out, num_warps=1, **LAUNCH)
    value, driver = ctypes.c_int(-1), ctypes.CDLL("libcuda.so.1")
    assert driver.cuFuncGetAttribute(ctypes.byref(value), 9, ctypes.c_void_p(compiled.function)) == 0
    assert value.value == 100
    assert out.tolist() == [7.0] * 32
