"""Matrix product of few tokens with what stands before and after it: norm, gate, residual. One launch instead of two or
three.

At 128 tokens and a hidden size of 576 a product takes little more than its launch, so what counts is the way from the
end of the launch before it to its own end. Weights do not depend on that launch: they are fetched into L2 before the
wait for it (programmatic dependent launch). The code is one short loop, because instructions that run once are fetched
once, from far away.
Bytes: weights once for every BLOCK_M tokens (from L2 after the first), activations once for every BLOCK_N outputs.
"""

from __future__ import annotations

from aspire_kernels._triton import tl, triton, wait_for_inputs


@triton.jit
def _fetch(at):
    """Ask for the cache lines at the pointers ``at`` to be brought into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["tokens"])
def product_kernel(
    x,  # [tokens, INPUTS]
    weight,  # [outputs, INPUTS]; with GATE [2 * outputs, INPUTS]: gate, then up
    bias,  # [outputs] (BIAS)
    out,  # [tokens, outputs], contiguous; with ADD the residual, read and written
    tokens,
    outputs,
    stride_x,
    eps,
    INPUTS: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # outputs of a program
    CHUNK: tl.constexpr,  # inputs of a pass of the loop
    STAGES: tl.constexpr,
    LINES: tl.constexpr,  # power of two >= cache lines of a weight row
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (outputs / BLOCK_N, tokens / BLOCK_M).

    NORM divides by the root mean square of a token after the product, not before it: a sum over the same inputs, and a
    token's squares are what the matrix unit leaves on the diagonal of ``x x^T``. So nothing stands between the loads
    and the matrix unit.
    """
    COLUMNS: tl.constexpr = 2 * BLOCK_N if GATE else BLOCK_N
    side = tl.arange(0, COLUMNS)
    column = tl.program_id(0) * BLOCK_N + side % BLOCK_N
    real_n = column < outputs
    row_of = tl.where(side < BLOCK_N, column, column + outputs)
    line = weight + tl.where(real_n, row_of, 0).to(tl.int64) * INPUTS
    if PDL:
        elements: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
        _fetch(line[:, None] + tl.minimum(tl.arange(0, LINES) * elements, INPUTS - 1)[None, :])
    wait_for_inputs(PDL)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real_m = token < tokens
    dtype: tl.constexpr = out.dtype.element_ty
    k = tl.arange(0, CHUNK)
    x_at = x + token.to(tl.int64)[:, None] * stride_x + k[None, :]
    w_at = line[:, None] + k[None, :]
    sums = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
    for k0 in tl.range(0, INPUTS, CHUNK, num_stages=STAGES):
        w = tl.load(w_at + k0, mask=real_n[:, None], other=0.0)
        tile = tl.load(x_at + k0, mask=real_m[:, None], other=0.0)
        sums = tl.dot(tile, tl.trans(w), sums, input_precision=PRECISION)
        if NORM:
            squares = tl.dot(tile, tl.trans(tile), squares, input_precision=PRECISION)
    if NORM:
        i = tl.arange(0, BLOCK_M)
        total = tl.sum(tl.where(i[:, None] == i[None, :], squares, 0.0), 1)
        sums = sums * tl.rsqrt(total / INPUTS + eps)[:, None]
    if BIAS:
        sums += tl.load(bias + column, mask=real_n, other=0.0).to(tl.float32)[None, :]
    # rounded as the separate product would round it
    value = sums.to(dtype).to(tl.float32)
    if GATE:
        pairs = tl.permute(tl.reshape(value, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1))
        gate, up = tl.split(pairs)
        value = gate / (1.0 + tl.exp(-gate)) * up
    target = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = out + token.to(tl.int64)[:, None] * outputs + target[None, :]
    stored = real_m[:, None] & (target < outputs)[None, :]
    if ADD:
        value += tl.load(at, mask=stored, other=0.0).to(tl.float32)
    tl.store(at, value.to(dtype), mask=stored)
