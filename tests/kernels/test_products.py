"""Products fused with norm, gate and residual: kernel = reference, no output unwritten, rows by themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

from aspire_kernels import counters, get_backend
from aspire_kernels.products import ADD, GATED, MAX_TOKENS, NORM, product_tile
from tests.kernels.cases import DEVICES, relative_error

REFERENCE = get_backend("reference")
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
SHAPES = [(576, 960), (1536, 576), (128, 40), (96, 100), (1024, 64)]


def types(device: str) -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16] if device == "cuda" else [torch.float32, torch.float16]


def random(*size: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(size, device=device) * scale).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 21])
def test_products_equal_reference(tokens: int, inputs: int, outputs: int, device: str) -> None:
    kernel = get_backend("triton", device)
    for dtype in types(device):
        wide = random(tokens, inputs + 8, dtype=dtype, device=device)
        x = wide[:, :inputs]
        weight = random(outputs, inputs, dtype=dtype, device=device, scale=inputs**-0.5)
        bias = random(outputs, dtype=dtype, device=device)
        counters.reset()
        out, same = kernel.norm_linear(None, x, None, weight, bias, 1e-5)
        expected, _ = REFERENCE.norm_linear(None, x, None, weight, bias, 1e-5)
        assert same is x
        assert relative_error(out, expected) < BOUND[dtype]
        sums = random(tokens, outputs, dtype=dtype, device=device)
        pending, before = REFERENCE.linear_add(x, weight, bias, sums.clone())
        assert pending is not None
        nothing, after = kernel.linear_add(x, weight, bias, sums)
        assert nothing is None and after is sums
        assert relative_error(after, before + pending) < BOUND[dtype]
        assert counters.snapshot() == {"product.triton.add": 1, "product.triton.norm": 1}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 1536), (96, 40), (128, 32)])
@pytest.mark.parametrize("tokens", [1, 70])
def test_gated_product_equals_reference(tokens: int, inputs: int, outputs: int, device: str) -> None:
    kernel = get_backend("triton", device)
    for dtype in types(device):
        x = random(tokens, inputs, dtype=dtype, device=device)
        weight = random(2 * outputs, inputs, dtype=dtype, device=device, scale=inputs**-0.5)
        counters.reset()
        out, _ = kernel.norm_gated(None, x, None, weight, 1e-5)
        assert counters.snapshot() == {"product.triton.gated": 1}
        assert relative_error(out, REFERENCE.norm_gated(None, x, None, weight, 1e-5)[0]) < 2 * BOUND[dtype]


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_the_rows_beside_it(device: str) -> None:
    """Bit for bit: alone, in another place, among up to `MAX_TOKENS` rows."""
    kernel = get_backend("triton", device)
    inputs, outputs, rows = 576, 96, MAX_TOKENS if device == "cuda" else 40
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    x = random(rows, inputs, dtype=dtype, device=device)
    weight, base = (random(n, inputs, dtype=dtype, device=device, scale=0.05) for n in (outputs, rows))
    base = base[:, :outputs].contiguous()
    plain = kernel.norm_linear(None, x, None, weight, None, 1e-5)[0]
    gated = kernel.norm_gated(None, x, None, weight, 1e-5)[0]
    added = kernel.linear_add(x, weight, None, base.clone())[1]
    for row in (0, 17, rows - 1):
        one = x[row : row + 1]
        assert torch.equal(kernel.norm_linear(None, one, None, weight, None, 1e-5)[0][0], plain[row])
        assert torch.equal(kernel.norm_gated(None, one, None, weight, 1e-5)[0][0], gated[row])
        assert torch.equal(kernel.linear_add(one, weight, None, base[row : row + 1].clone())[1][0], added[row])


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_left_to_the_library(device: str) -> None:
    """Many tokens, inputs that are no multiple of 16, a norm that is not folded, a pending addition: other launches."""
    kernel = get_backend("triton", device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    for tokens, inputs in ((MAX_TOKENS + 1, 64), (3, 40)):
        x, norm = random(tokens, inputs, dtype=dtype, device=device), random(inputs, dtype=dtype, device=device)
        weight = random(48, inputs, dtype=dtype, device=device, scale=0.1)
        counters.reset()
        for pending, of_norm in ((None, None), (None, norm), (x.flip(0), None)):
            mine, theirs = x.clone(), x.clone()
            out, mine = kernel.norm_linear(pending, mine, of_norm, weight, None, 1e-5)
            expected, theirs = REFERENCE.norm_linear(pending, theirs, of_norm, weight, None, 1e-5)
            assert torch.equal(mine, theirs)
            assert relative_error(out, expected) < BOUND[dtype]
        pending, _ = kernel.linear_add(x, weight, None, x)
        assert (
            pending is not None and relative_error(pending, REFERENCE.linear_add(x, weight, None, x)[0]) < BOUND[dtype]
        )
        assert not [path for path in counters.snapshot() if path in ("product.triton.norm", "product.triton.add")]
    x, norm = random(3, 64, dtype=dtype, device=device), random(64, dtype=dtype, device=device)
    gate_up = random(96, 64, dtype=dtype, device=device, scale=0.1)
    out, mine = kernel.norm_gated(x.flip(0), x.clone(), norm, gate_up, 1e-5)
    expected, theirs = REFERENCE.norm_gated(x.flip(0), x.clone(), norm, gate_up, 1e-5)
    assert torch.equal(mine, theirs) and relative_error(out, expected) < BOUND[dtype]


@pytest.mark.parametrize("kind", [NORM, GATED, ADD])
def test_tiles_cover_their_inputs(kind: str) -> None:
    for gpu, inputs in itertools.product(("NVIDIA H200", "unknown"), (16, 64, 96, 576, 896, 1536, 4096)):
        tile = product_tile(gpu, kind, inputs)
        assert inputs % tile.chunk == 0 and tile.chunk % 16 == 0
