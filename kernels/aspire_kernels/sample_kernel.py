"""Sampling kernels; their reference and meaning stand in `aspire_kernels.sample`.

Two launches for any mix of rows. The first reads the logits once, in blocks: log-sum-exps, the largest logit of every
SUB tokens, and (for rows without filters, and T = 0) the two best perturbed scores. The second finishes each row. A
filtered row takes as candidates all logits not below the r-th largest SUB maximum: at least r tokens, usually a few
hundred, found by reading only the stretches that hold one. If the candidates provably hold all tokens that the filters
keep, the filters run on them in registers; else the row's logits are searched whole, 16 short passes a filter.
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
def _kth_key(key, k, STEPS: tl.constexpr):
    """The k-th largest of the integers ``key``."""
    limit = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= k, 0, -0x7FFFFFFF - 1)
    for step in range(STEPS):
        trial = limit | (1 << (30 - step))
        limit = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= k, trial, limit)
    return limit


@triton.jit
def _mass_key(key, weight, wanted):
    """The largest key such that the weights at or above it reach ``wanted``; the smallest integer if none does."""
    limit = tl.where(tl.sum(tl.where(key >= 0, weight, 0.0), 0) >= wanted, 0, -0x7FFFFFFF - 1)
    for step in range(31):
        trial = limit | (1 << (30 - step))
        limit = tl.where(tl.sum(tl.where(key >= trial, weight, 0.0), 0) >= wanted, trial, limit)
    return limit


@triton.jit
def _search_row(at, vocab, inverse, peak, floor, k, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """As `_kth_key` (COUNT) or `_mass_key` over the whole row of logits ``at``, among keys not below ``floor``.

    Two bits a pass over the row: a pass waits for its loads more than it computes.
    """
    sign = -0x7FFFFFFF - 1
    limit = 0  # of keys with the sign flipped: their bits sort like unsigned integers
    goal = k.to(tl.float32) if COUNT else wanted
    for step in range(16):
        shift = 30 - 2 * step
        low = (limit | (1 << shift)) ^ sign
        middle = (limit | (2 << shift)) ^ sign
        high = (limit | (3 << shift)) ^ sign
        total_low = 0.0
        total_middle = 0.0
        total_high = 0.0
        for v0 in range(0, vocab, BLOCK):
            token = v0 + tl.arange(0, BLOCK)
            scaled = tl.load(at + token, mask=token < vocab, other=float("-inf")).to(tl.float32) * inverse
            key = _key(scaled)
            each = tl.where(key >= floor, 1.0 if COUNT else tl.exp(scaled - peak), 0.0)
            total_low += tl.sum(tl.where(key >= low, each, 0.0), 0)
            total_middle += tl.sum(tl.where(key >= middle, each, 0.0), 0)
            total_high += tl.sum(tl.where(key >= high, each, 0.0), 0)
        digit = (
            (total_low >= goal).to(tl.int32) + (total_middle >= goal).to(tl.int32) + (total_high >= goal).to(tl.int32)
        )
        limit = limit | (digit << shift)
    return limit ^ sign


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
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
    CAP: tl.constexpr,
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
        many = tl.maximum(subs - subs // 8, 1)
        rank = tl.where((k > 0) & (k < many), k, many)
        maxima_key = tl.where(s < subs, _key(maxima), -0x7FFFFFFF - 1)
        edge = _kth_key(maxima_key, rank, 31)
        hot = maxima_key >= edge
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
        c = tl.arange(0, CAP)
        held = c < tl.minimum(found, CAP)
        scaled = tl.load(cand_value + row * CAP + c, mask=held, other=float("-inf")) * inverse
        token_c = tl.load(cand_token + row * CAP + c, mask=held, other=0x7FFFFFFE)
        key = tl.where(held, _key(scaled), -0x7FFFFFFF - 1)
        weight = tl.where(held, tl.exp(scaled - peak), 0.0)
        # 2. do the candidates hold every token that the filters keep?
        by_count = (k > 0) & (found >= tl.minimum(k, vocab))
        by_mass = (p < 1.0) & (k <= 0) & (tl.sum(weight, 0) >= p * whole)
        scaled_floor = peak + tl.log(tl.maximum(low, 1e-30))
        by_floor = (low > 0.0) & (_key(scaled_floor) >= tl.min(tl.where(held, key, 0x7FFFFFFF), 0))
        enough = (found <= CAP) & (by_count | by_mass | by_floor)
        limit = -0x7FFFFFFF - 1
        if enough:
            if (k > 0) & by_count:
                limit = _kth_key(key, tl.minimum(k, vocab), 31)
            if p < 1.0:
                # with top-k the softmax is over what it kept
                kept_mass = tl.where(k > 0, tl.sum(tl.where(key >= limit, weight, 0.0), 0), whole)
                if by_count | by_mass:
                    limit = tl.maximum(limit, _mass_key(key, tl.where(key >= limit, weight, 0.0), p * kept_mass))
        # a floor inside the candidates settles top-k and top-p alone too, but top-p needs the mass that top-k keeps
        needs_row = (enough == 0) | ((k > 0) & (by_count == 0) & (p < 1.0))
        if needs_row:
            if k > 0:
                limit = _search_row(line, vocab, inverse, peak, limit, tl.minimum(k, vocab), 0.0, True, SEARCH)
            if p < 1.0:
                kept = 0.0
                for v0 in range(0, vocab, SEARCH):
                    token_v = v0 + tl.arange(0, SEARCH)
                    value_v = (
                        tl.load(line + token_v, mask=token_v < vocab, other=float("-inf")).to(tl.float32) * inverse
                    )
                    kept += tl.sum(tl.where(_key(value_v) >= limit, tl.exp(value_v - peak), 0.0), 0)
                nucleus = _search_row(line, vocab, inverse, peak, limit, 0, p * kept, False, SEARCH)
                limit = tl.maximum(limit, nucleus)
        if low > 0.0:
            limit = tl.maximum(limit, _key(scaled_floor))
        limit = tl.minimum(limit, _key(peak))
        # 3. perturb what is kept, keep the two best
        sd = tl.load(seed + row)
        pos = tl.load(position + row)
        if needs_row == 0:
            score = tl.where(key >= limit, scaled + gumbel_at(sd, pos, token_c), float("-inf"))
            best, winner, second = _best_two(score, token_c)
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
