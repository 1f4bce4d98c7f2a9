"""Kernels that overlap divide a multiprocessor's memory alike.

A multiprocessor divides its memory into shared memory and L1 cache as the kernel that runs on it prefers, and changes
the division only while nothing runs there. So two kernels that prefer different divisions never share one, and the
programs that programmatic dependent launch would place beside those of the kernel before wait for an empty one. Triton
asks for as much shared memory as there is where a kernel needs more than 48 KiB, and else leaves the choice to the
driver. Here every kernel that may be placed early asks for it: none reads anything twice through L1.
"""

from __future__ import annotations

import ctypes
import functools
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PREFERRED_CARVEOUT = 9
"""``CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`` of the driver's `cuFuncSetAttribute`: per cent of the most."""


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def launches_early(files: Mapping[str, str]) -> bool:
    """Whether the compiled kernel with the ``files`` (name to path) may be placed while the one before it runs."""
    described = next((path for name, path in files.items() if name.endswith(".json")), None)
    return described is not None and bool(json.loads(Path(described).read_text()).get("launch_pdl", False))


def prefer_shared_memory(module: Any, function: int, name: str, metadata_group: Mapping[str, str], hash: str) -> None:
    """Called by Triton after it has loaded a kernel (`triton.knobs.runtime.kernel_load_end_hook`)."""
    if launches_early(metadata_group):
        error = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_CARVEOUT, 100)
        if error:
            warnings.warn(f"CUDA error {error}: kernel {name} keeps the driver's division of L1 cache", stacklevel=2)
