"""Sampling kernels; their reference and meaning stand in `aspire_kernels.sample`.

Two launches for any mix of rows. The first reads the logits once, in blocks: log-sum-exps, the largest logit of every
SUB tokens, and (for rows without filters, and T = 0) the two best perturbed scores. The second finishes each row. A
filtered row takes as candidates all logits not below the r-th largest SUB maximum: at least r tokens, with a top-k of r
little more, found by reading only the stretches that hold one. If the candidates provably hold all tokens that the
filters keep, the filters run on them in registers; else the row's logits are searched whole, 16 passes a filter.
Floor: ``rows * vocab`` logits read once.
"""

from __future__ import annotations

from aspire_kernels._triton import tl, triton, wait_for_inputs
from aspire_kernels.noise import gumbel_at, gumbel_block


@triton.jit
def _key(x):
    """Integers that sort like the floats ``x``."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _best_two(score, token):
    """Best score, its token (the smallest on a tie) and the second best score of vectors."""
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, token, 0x7FFFFFFF), 0)
    second = tl.max(tl.where(token == winner, float("-inf"), score), 0)
    return best, winner, second


@triton.jit
def scan_kernel(
    logits,
    stride,
    vocab,
    blocks,
    seed,
    position,
    temperature,
    top_k,
    top_p,
    min_p,
    stats,  # [rows, blocks, 6] float32: max, sum exp raw, sum exp tempered, best, second, token bits
    sub_max,  # [rows, blocks * BLOCK / SUB] float32
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (rows, blocks)."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    t = tl.load(temperature + row)
    filtered = (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0)
    subs = tl.max(tl.reshape(raw, (BLOCK // SUB, SUB)), 1)
    top = tl.max(subs, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(raw - base), 0)
    at = stats + (row * blocks + block) * 6
    tl.store(at, top)
    tl.store(at + 1, total)
    if (t > 0.0) & filtered:
        inverse = tl.div_rn(1.0, t)
        tl.store(at + 2, tl.sum(tl.exp((raw - base) * inverse), 0))
        tl.store(sub_max + (row * blocks + block) * (BLOCK // SUB) + tl.arange(0, BLOCK // SUB), subs)
    else:
        score = raw
        if t > 0.0:
            noise = gumbel_block(tl.load(seed + row), tl.load(position + row), block * (BLOCK // 4), BLOCK // 4)
            score = raw * tl.div_rn(1.0, t) + noise
        best, winner, second = _best_two(score, token)
        tl.store(at + 3, best)
        tl.store(at + 4, second)
        tl.store(at + 5, winner.to(tl.float32, bitcast=True))


@triton.jit
def _middle(low, high):
    """Half way between two integers, rounded down; their sum may not be one of 32 bits."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _kth_key(key, k, valid):
    """A limit that the k largest of the ``valid`` integers ``key`` reach, and those tied with the last of them, no
    others. At least k are valid.

    Each pass halves the stretch that the limit lies in, and waits for the whole program. Once k keys are left above it
    any limit in it will do: a dozen passes for a few hundred keys without ties, 24 or so with.
    """
    low = tl.min(tl.where(valid, key, 0x7FFFFFFF), 0)
    high = tl.max(tl.where(valid, key, -0x7FFFFFFF - 1), 0) + 1
    above = tl.sum(valid.to(tl.int32), 0)
    middle = _middle(low, high)
    while (above != k) & (middle > low):
        reach = tl.sum((valid & (key >= middle)).to(tl.int32), 0)
        above = tl.where(reach >= k, reach, above)
        low = tl.where(reach >= k, middle, low)
        high = tl.where(reach >= k, high, middle)
        middle = _middle(low, high)
    return low


@triton.jit
def _mass_key(key, weight, wanted, valid):
    """A limit that the largest of the ``valid`` integers ``key`` reach, as few as have together the ``wanted`` weight,
    and those tied with the last of them; all if none has. It is found as in `_kth_key`, once one key is left."""
    low = tl.min(tl.where(valid, key, 0x7FFFFFFF), 0)
    high = tl.max(tl.where(valid, key, -0x7FFFFFFF - 1), 0) + 1
    left = tl.sum(valid.to(tl.int32), 0)
    middle = _middle(low, high)
    while (left > 1) & (middle > low):
        upper = valid & (key >= middle)
        reached = tl.sum(tl.where(upper, weight, 0.0), 0) >= wanted
        between = tl.sum((upper & (key < high)).to(tl.int32), 0)
        left = tl.where(reached, between, left - between)
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
        middle = _middle(low, high)
    return low


@triton.jit
def _search_row(at, vocab, inverse, peak, floor, k, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """As `_kth_key` (COUNT) or `_mass_key` over the whole row of logits ``at``, among keys not below ``floor``.

    Two bits a pass over the row: a pass waits for its loads more than it computes, and for each sum.
    """
    sign = -0x7FFFFFFF - 1
    limit = 0  # of keys with the sign flipped: their bits sort like unsigned integers
    goal = k.to(tl.float32) if COUNT else wanted
    for step in range(16):
        shift = 30 - 2 * step
        low = (limit | (1 << shift)) ^ sign
        middle = (limit | (2 << shift)) ^ sign
        high = (limit | (3 << shift)) ^ sign
        in_low = tl.zeros((BLOCK,), dtype=tl.float32)
        in_middle = tl.zeros((BLOCK,), dtype=tl.float32)
        in_high = tl.zeros((BLOCK,), dtype=tl.float32)
        for v0 in range(0, vocab, BLOCK):
            token = v0 + tl.arange(0, BLOCK)
            scaled = tl.load(at + token, mask=token < vocab, other=float("-inf")).to(tl.float32) * inverse
            key = _key(scaled)
            each = tl.where(key >= floor, 1.0 if COUNT else tl.exp(scaled - peak), 0.0)
            in_low += tl.where(key >= low, each, 0.0)
            in_middle += tl.where(key >= middle, each, 0.0)
            in_high += tl.where(key >= high, each, 0.0)
        digit = (tl.sum(in_low, 0) >= goal).to(tl.int32)
        digit += (tl.sum(in_middle, 0) >= goal).to(tl.int32)
        digit += (tl.sum(in_high, 0) >= goal).to(tl.int32)
        limit = limit | (digit << shift)
    return limit ^ sign


@triton.jit
def _candidates(values, found, inverse, SIZE: tl.constexpr):
    """The first SIZE of ``found`` candidates: which places hold one, and their logits over the temperature."""
    held = tl.arange(0, SIZE) < found
    return held, tl.load(values + tl.arange(0, SIZE), mask=held, other=float("-inf")) * inverse


@triton.jit
def _limit_among(values, found, inverse, peak, whole, k, p, low, floor, vocab, SIZE: tl.constexpr):
    """Limit of top-k and top-p among ``found`` candidates ``values``, and whether the whole row must be searched for
    it: there are more than SIZE, or they do not hold every token that the filters keep."""
    held, scaled = _candidates(values, found, inverse, SIZE)
    key = _key(scaled)
    weight = tl.where(held, tl.exp(scaled - peak), 0.0)
    by_count = (k > 0) & (found >= tl.minimum(k, vocab))
    by_mass = (p < 1.0) & (k <= 0) & (tl.sum(weight, 0) >= p * whole)
    by_floor = (low > 0.0) & (_key(floor) >= tl.min(tl.where(held, key, 0x7FFFFFFF), 0))
    enough = (found <= SIZE) & (by_count | by_mass | by_floor)
    limit = -0x7FFFFFFF - 1
    if enough:
        if (k > 0) & by_count:
            limit = _kth_key(key, tl.minimum(k, vocab), held)
        if p < 1.0:
            # with top-k the softmax is over what it kept
            kept = held & (key >= limit)
            kept_mass = tl.where(k > 0, tl.sum(tl.where(kept, weight, 0.0), 0), whole)
            if by_count | by_mass:
                limit = tl.maximum(limit, _mass_key(key, weight, p * kept_mass, kept))
    # a floor inside the candidates settles top-k and top-p alone too, but top-p needs the mass that top-k keeps
    return limit, (enough == 0) | ((k > 0) & (by_count == 0) & (p < 1.0))


@triton.jit
def _best_among(values, tokens, found, inverse, limit, seed, position, SIZE: tl.constexpr):
    """`_best_two` of the ``found`` candidates not below ``limit``, perturbed."""
    held, scaled = _candidates(values, found, inverse, SIZE)
    token = tl.load(tokens + tl.arange(0, SIZE), mask=held, other=0x7FFFFFFE)
    kept = held & (_key(scaled) >= limit)
    return _best_two(tl.where(kept, scaled + gumbel_at(seed, position, token), float("-inf")), token)


@triton.jit
def finish_kernel(
    logits,
    stride,
    vocab,
    blocks,
    seed,
    position,
    temperature,
    top_k,
    top_p,
    min_p,
    stats,
    sub_max,
    hot_subs,  # [rows, subs] int32 scratch
    cand_value,  # [rows, CAP] float32 scratch
    cand_token,  # [rows, CAP] int32 scratch
    token_out,
    margin_out,
    logprob_out,
    subs,
    most,  # stretches that give the candidates where top-k asks for no fewer
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
    CAP: tl.constexpr,
    FEW: tl.constexpr,  # candidates that are worth a shorter way
    BLOCKS: tl.constexpr,  # power of two >= blocks
    SUBS: tl.constexpr,  # power of two >= subs
    HOT: tl.constexpr,  # stretches read at once
    SEARCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (rows,)."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    low = tl.load(min_p + row)
    filtered = (k > 0) | (p < 1.0) | (low > 0.0)
    b = tl.arange(0, BLOCKS)
    at = stats + (row * blocks + b) * 6
    tops = tl.load(at, mask=b < blocks, other=float("-inf"))
    peak_raw = tl.max(tops, 0)
    share = tl.exp(tops - peak_raw)
    log_total = peak_raw + tl.log(tl.sum(share * tl.load(at + 1, mask=b < blocks, other=0.0), 0))
    if (t > 0.0) & filtered:
        inverse = tl.div_rn(1.0, t)
        peak = peak_raw * inverse
        # sum of exp(scaled - peak) over the whole row
        whole = tl.sum(tl.exp((tops - peak_raw) * inverse) * tl.load(at + 2, mask=b < blocks, other=0.0), 0)
        # 1. candidates: everything not below the rank-th largest SUB maximum
        s = tl.arange(0, SUBS)
        maxima = tl.load(sub_max + row * subs + s, mask=s < subs, other=float("-inf"))
        rank = tl.where((k > 0) & (k < most), k, most)
        maxima_key = _key(maxima)
        edge = _kth_key(maxima_key, rank, s < subs)
        hot = (s < subs) & (maxima_key >= edge)
        place = tl.cumsum(hot.to(tl.int32), 0) - 1
        tl.store(hot_subs + row * subs + place, s, mask=hot)
        hot_count = tl.sum(hot.to(tl.int32), 0)
        tl.debug_barrier()
        found = 0
        for h0 in range(0, hot_count, HOT):
            h = h0 + tl.arange(0, HOT)
            stretch = tl.load(hot_subs + row * subs + h, mask=h < hot_count, other=0)
            token2 = stretch[:, None] * SUB + tl.arange(0, SUB)[None, :]
            real2 = (h < hot_count)[:, None] & (token2 < vocab)
            value2 = tl.load(line + token2, mask=real2, other=float("-inf")).to(tl.float32)
            value = tl.reshape(value2, (HOT * SUB,))
            token = tl.reshape(token2, (HOT * SUB,))
            taken = tl.reshape(real2, (HOT * SUB,)) & (_key(value) >= edge)
            where = found + tl.cumsum(taken.to(tl.int32), 0) - 1
            fits = taken & (where < CAP)
            tl.store(cand_value + row * CAP + where, value, mask=fits)
            tl.store(cand_token + row * CAP + where, token, mask=fits)
            found += tl.sum(taken.to(tl.int32), 0)
        tl.debug_barrier()
        values = cand_value + row * CAP
        floor = peak + tl.log(tl.maximum(low, 1e-30))
        # 2. the limits, from the candidates if these hold every token that the filters keep
        if found <= FEW:
            limit, needs_row = _limit_among(values, found, inverse, peak, whole, k, p, low, floor, vocab, FEW)
        else:
            limit, needs_row = _limit_among(values, found, inverse, peak, whole, k, p, low, floor, vocab, CAP)
        if needs_row:
            if k > 0:
                limit = _search_row(line, vocab, inverse, peak, limit, tl.minimum(k, vocab), 0.0, True, SEARCH // 2)
            if p < 1.0:
                kept = 0.0
                for v0 in range(0, vocab, SEARCH):
                    token_v = v0 + tl.arange(0, SEARCH)
                    value_v = (
                        tl.load(line + token_v, mask=token_v < vocab, other=float("-inf")).to(tl.float32) * inverse
                    )
                    kept += tl.sum(tl.where(_key(value_v) >= limit, tl.exp(value_v - peak), 0.0), 0)
                nucleus = _search_row(line, vocab, inverse, peak, limit, 0, p * kept, False, SEARCH // 2)
                limit = tl.maximum(limit, nucleus)
        if low > 0.0:
            limit = tl.maximum(limit, _key(floor))
        limit = tl.minimum(limit, _key(peak))
        # 3. perturb what is kept, keep the two best
        sd = tl.load(seed + row)
        pos = tl.load(position + row)
        if needs_row == 0:
            names = cand_token + row * CAP
            if found <= FEW:
                best, winner, second = _best_among(values, names, found, inverse, limit, sd, pos, FEW)
            else:
                best, winner, second = _best_among(values, names, found, inverse, limit, sd, pos, CAP)
        else:
            best = float("-inf")
            second = float("-inf")
            winner = 0x7FFFFFFF
            for v0 in range(0, vocab, SEARCH):
                token_w = v0 + tl.arange(0, SEARCH)
                value_w = tl.load(line + token_w, mask=token_w < vocab, other=float("-inf")).to(tl.float32) * inverse
                noise = gumbel_block(sd, pos, v0 // 4, SEARCH // 4)
                score_w = tl.where((_key(value_w) >= limit) & (token_w < vocab), value_w + noise, float("-inf"))
                one, token_1, two = _best_two(score_w, token_w)
                second = tl.maximum(tl.minimum(best, one), tl.maximum(second, two))
                winner = tl.where(one > best, token_1, winner)
                best = tl.maximum(best, one)
    else:
        bests = tl.load(at + 3, mask=b < blocks, other=float("-inf"))
        seconds = tl.load(at + 4, mask=b < blocks, other=float("-inf"))
        tokens = tl.load(at + 5, mask=b < blocks, other=0.0).to(tl.int32, bitcast=True)
        tokens = tl.where(b < blocks, tokens, 0x7FFFFFFF)
        best = tl.max(bests, 0)
        winner = tl.min(tl.where(bests == best, tokens, 0x7FFFFFFF), 0)
        others = tl.max(tl.where(tokens == winner, float("-inf"), bests), 0)
        own_second = tl.max(tl.where(tokens == winner, seconds, float("-inf")), 0)
        second = tl.maximum(others, own_second)
    winner = tl.minimum(winner, vocab - 1)
    tl.store(token_out + row, winner)
    tl.store(margin_out + row, best - second)
    tl.store(logprob_out + row, tl.load(line + winner).to(tl.float32) - log_total)
