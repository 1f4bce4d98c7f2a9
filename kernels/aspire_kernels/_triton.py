"""Triton, or stand-ins that let the kernel modules be imported where it is not installed (the reference needs none of
it).

On a machine without a CUDA GPU kernels can only run in Triton's interpreter, so it is switched on there (before the
kernels are defined, which is when Triton reads the switch); ``TRITON_INTERPRET=0`` keeps it off, e.g. to compile
without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aspire_kernels.carveout import prefer_shared_memory

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]

    HAS_TRITON = True
except ImportError:

    class _Absent:
        """Stands for the modules ``triton`` and ``triton.language``: decorators do nothing, anything else is absent."""

        constexpr = object

        @staticmethod
        def jit(function: Any = None, **_options: Any) -> Any:
            """Return the function unchanged; nothing can launch it."""
            return function if function is not None else lambda f: f

    triton = tl = _Absent  # type: ignore[assignment,misc]
    HAS_TRITON = False

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether kernels run in the interpreter (on CPU tensors)."""


PDL = (
    HAS_TRITON
    and not INTERPRETED
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability()[0] >= 9
    and os.environ.get("ASPIRE_PDL", "1") != "0"
)
"""Programmatic dependent launch (Hopper and later; ``ASPIRE_PDL=0`` switches it off): a kernel's programs are placed
while the kernel before it still runs, and wait there for its end. It hides the launch, about a microsecond each."""

if PDL:
    triton.knobs.runtime.kernel_load_end_hook.add(prefer_shared_memory)

LAUNCH: dict[str, Any] = {"PDL": True, "launch_pdl": True} if PDL else {"PDL": False}
"""Launch options that every kernel gets."""


@contextmanager
def plain_launches() -> Iterator[None]:
    """Launch without `PDL` inside the block, to measure what it is worth."""
    kept = dict(LAUNCH)
    LAUNCH.clear()
    LAUNCH["PDL"] = False
    try:
        yield
    finally:
        LAUNCH.clear()
        LAUNCH.update(kept)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """First line of every kernel: wait until the kernel before has ended and its writes can be seen, then let the next
    one be placed. (Not before the wait: the next kernel may read what kernels before this one wrote.)"""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin_beside(PDL: tl.constexpr):
    """First line of a kernel that reads nothing that the launch before it writes: begin while that one runs. What came
    before both has ended, because a program lets the next launch be placed only after its own wait."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def end_beside(PDL: tl.constexpr):
    """Last line of a kernel that began with `begin_beside`: end after the launch before it, so that whoever waits for
    this one waits for both."""
    if PDL:
        tl.extra.cuda.gdc_wait()


NATIVE_MATH: Any = tl.constexpr(not INTERPRETED) if HAS_TRITON else False
"""Whether `exp2` and `log2` are single instructions of the GPU (relative error about 2^-22, denormals are zero)."""


@triton.jit
def exp2(x):
    """``2^x`` of float32 values; 0 below 2^-126."""
    if NATIVE_MATH:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def log2(x):
    """``log2(x)`` of float32 values; -inf for 0 and denormals."""
    if NATIVE_MATH:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least ``n`` (1 for ``n`` <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)`` of integers."""
    return -(-a // b)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 4 elsewhere (the interpreter runs programs one by one)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "LAUNCH",
    "NATIVE_MATH",
    "begin_beside",
    "cdiv",
    "end_beside",
    "exp2",
    "log2",
    "multiprocessors",
    "next_power_of_2",
    "plain_launches",
    "tl",
    "triton",
    "wait_for_inputs",
]
