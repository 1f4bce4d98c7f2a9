"""Matrix products of a layer with what surrounds them, on a residual stream that may lag by one addition.

A layer hands on ``(pending, residual)``: the residual, and an output still to be added to it, or None. Large products
are a library's: they leave their output pending, and the next norm adds it (`add_rms_norm`). Products of few tokens and
narrow layers are bound by launches: there one kernel does norm and product, or norm, product and gate, or product and
addition. It needs the norm's weight folded into the product's (`norm_weight` None), and rounds where the separate
operations do, but for the normed tokens, which it need not round. Which of both runs depends on shapes alone, and a
row's result does not depend on the rows beside it as long as the fused kernel runs (tiles and order of summation are
fixed by the weight's shape).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import linear

from aspire.errors import check_keys
from aspire.fileio import read_json
from aspire_kernels import counters
from aspire_kernels._triton import INTERPRETED, LAUNCH, cdiv, next_power_of_2
from aspire_kernels.activation import silu_mul, silu_mul_reference
from aspire_kernels.attention.tuning import TABLE_FOLDER, gpu_name, table_name
from aspire_kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from aspire_kernels.product_kernel import product_kernel

MAX_TOKENS = 256
"""Most tokens of a fused product. It reads its weights once for every 64 tokens, a library reads them once."""

MAX_WEIGHTS = 1 << 22
"""Most elements of a fused product's weight; larger ones are bound by bytes, and a library's product is as good."""


def norm_reference(
    pending: Tensor | None, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(residual), residual)`` after ``residual += pending``, if there is any (in place)."""
    if pending is None:
        return rms_norm_reference(residual, weight, eps), residual
    return add_rms_norm_reference(pending, residual, weight, eps)


def norm_linear_reference(
    pending: Tensor | None,  # [tokens, inputs]
    residual: Tensor,  # [tokens, inputs]
    norm_weight: Tensor | None,  # [inputs]; None = ones
    weight: Tensor,  # [outputs, inputs]
    bias: Tensor | None,  # [outputs]
    eps: float,
) -> tuple[Tensor, Tensor]:
    """``(linear(norm(residual + pending)) [tokens, outputs], residual + pending)``; the normed tokens are rounded to
    their type."""
    x, residual = norm_reference(pending, residual, norm_weight, eps)
    return linear(x, weight, bias), residual


def norm_gated_reference(
    pending: Tensor | None, residual: Tensor, norm_weight: Tensor | None, gate_up: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``(silu(gate) * up [tokens, outputs], residual + pending)`` of ``gate_up [2 * outputs, inputs]`` (gate first);
    gate and up are rounded to their type before the product."""
    x, residual = norm_reference(pending, residual, norm_weight, eps)
    return silu_mul_reference(linear(x, gate_up)), residual


def linear_add_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
) -> tuple[Tensor | None, Tensor]:
    """``(pending, residual)`` after a product that is to be added: ``pending`` is ``linear(x)``."""
    return linear(x, weight, bias), residual


@dataclass(frozen=True)
class ProductTile:
    """Launch choices of `product_kernel`."""

    block_m: int  # tokens
    block_n: int  # outputs
    chunk: int  # inputs of a pass
    warps: int
    stages: int


NORM, GATED, ADD = "norm", "gated", "add"


@functools.cache
def product_tile(gpu: str, kind: str, inputs: int) -> ProductTile:
    """The tile of a product of ``kind`` over ``inputs`` (a multiple of 16): from the GPU's tuning table, or a plain
    one."""
    path = TABLE_FOLDER / f"{table_name(gpu)}.json"
    measured = read_json(path, "tuning table").get("products", []) if path.exists() else []
    for entry in measured:
        check_keys(f"tuning table {path.name}", entry, ["kind", "inputs", *(f.name for f in fields(ProductTile))])
        if (entry["kind"], entry["inputs"]) == (kind, inputs):
            return ProductTile(**{f.name: entry[f.name] for f in fields(ProductTile)})
    chunk = min(128 if inputs >= 1024 else 64, inputs & -inputs)
    return ProductTile(64, 32 if kind == GATED else 16, chunk, 4, 4)


def fuses(weight: Tensor) -> bool:
    """Whether products of few tokens with ``weight`` are fused with their norm, gate and addition.

    Not in float32 on a GPU: a tile would not fit.
    """
    narrow = weight.numel() <= MAX_WEIGHTS and weight.shape[1] % 16 == 0 and weight.is_contiguous()
    return narrow and (weight.dtype.itemsize == 2 or INTERPRETED)


def _launch(
    kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, eps: float | None = None
) -> None:
    """One fused product into ``out``; ``eps``: of the norm before it."""
    (tokens, inputs), outputs = x.shape, out.shape[1]
    tile = product_tile(gpu_name(x.device), kind, inputs)
    product_kernel[(cdiv(outputs, tile.block_n), cdiv(tokens, tile.block_m))](
        x,
        weight,
        x if bias is None else bias,
        out,
        tokens,
        outputs,
        x.stride(0),
        eps or 0.0,
        INPUTS=inputs,
        NORM=eps is not None,
        GATE=kind == GATED,
        ADD=kind == ADD,
        BIAS=bias is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CHUNK=tile.chunk,
        STAGES=tile.stages,
        LINES=next_power_of_2(cdiv(inputs * x.itemsize, 128)),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        **LAUNCH,
    )


def norm_linear(
    pending: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Kernel form of `norm_linear_reference`: one launch where it pays, else norm and library product."""
    if not _few(pending, residual, norm_weight, weight):
        x, residual = _norm(pending, residual, norm_weight, eps)
        return linear(x, weight, bias), residual
    out = torch.empty((residual.shape[0], weight.shape[0]), dtype=residual.dtype, device=residual.device)
    _launch(NORM, residual, weight, bias, out, eps=eps)
    counters.count("product.triton.norm")
    return out, residual


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> tuple[Tensor | None, Tensor]:
    """``(pending, residual)`` as of `linear_add_reference`; where one launch does both, the residual holds the sum (in
    place) and nothing is pending."""
    if not _few(None, x, None, weight):
        return linear(x, weight, bias), residual
    _launch(ADD, x, weight, bias, residual)
    counters.count("product.triton.add")
    return None, residual


def norm_gated(
    pending: Tensor | None, residual: Tensor, norm_weight: Tensor | None, gate_up: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Kernel form of `norm_gated_reference`: one launch where it pays, else norm, library product and gate."""
    if not _few(pending, residual, norm_weight, gate_up):
        x, residual = _norm(pending, residual, norm_weight, eps)
        return silu_mul(linear(x, gate_up)), residual
    shape = (residual.shape[0], gate_up.shape[0] // 2)
    out = torch.empty(shape, dtype=residual.dtype, device=residual.device)
    _launch(GATED, residual, gate_up, None, out, eps=eps)
    counters.count("product.triton.gated")
    return out, residual


def _few(pending: Tensor | None, x: Tensor, norm_weight: Tensor | None, weight: Tensor) -> bool:
    """Whether the fused kernel does this product."""
    return pending is None and norm_weight is None and x.shape[0] <= MAX_TOKENS and fuses(weight)


def _norm(pending: Tensor | None, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    if pending is None:
        return rms_norm(residual, weight, eps), residual
    return add_rms_norm(pending, residual, weight, eps)
