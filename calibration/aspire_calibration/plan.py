"""The profiling plan: which cells to time, from the limits of this machine and model, coarse first.

Every regime has a geometric grid over (rows, context, ...). Its cells are ordered by the level of refinement at which
a grid that is halved again and again would reach them, and the regimes take turns, so that every prefix of the plan
is a usable coarse plan. Points off the grid, drawn in octaves with a seed, are interleaved: one in five of each regime
is held out, the others are fitted, since a grid shows neither rows between powers of two nor rows of unlike contexts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aspire.errors import UsageError
from aspire_calibration.cells import (
    REGIMES,
    Cell,
    RowGroup,
    ar,
    draft,
    mixed,
    padded_tokens,
    prefill,
    ragged,
    verify,
)

__all__ = [
    "REGIMES",
    "Cell",
    "PlanLimits",
    "RowGroup",
    "ar",
    "draft",
    "mixed",
    "padded_tokens",
    "prefill",
    "profile_plan",
    "ragged",
    "verify",
]

OFF_GRID_EVERY = 4  # after so many grid cells come OFF_GRID cells
OFF_GRID = 5  # of so many of a regime the first is held out
IDLE_ROWS = (1, 4, 16)
IDLE_TOKENS = (64, 256, 512, 2048)  # of all prompts of a step that starts from idle
IDLE_RESTS_S = (0.003, 0.1, 0.02)  # before it, in turn
IDLE_EVERY = 10  # one cell in so many is such a step, until there are no more
# Extra turns off the grid. The last two are steps of policies that follow each request.
EXTRA_TURNS = {"ar": 1, "draft": 1, "verify": 2, "mixed": 1, "mixed-turns": 2, "mixed-rounds": 5}
FOLLOWING = ("mixed-turns", "mixed-rounds")
FULL_SHARE = 0.6  # of these hold the most rows or a part of those
FULL_PARTS = (1, 4)
NEARLY_EVEN = 1.1  # longest over shortest context of the others' rows
MAX_CELLS_PER_REGIME = 44  # coarse levels first, within a level at random (seeded)


@dataclass(frozen=True)
class PlanLimits:
    """What a step may hold on this engine. The engine fills this in from its configuration."""

    max_num_seqs: int
    max_model_len: int
    num_pages: int  # usable pages of the KV pool
    max_num_batched_tokens: int
    graph_buckets: tuple[int, ...] = ()  # padded query tokens of the CUDA graphs; empty = eager
    d_max: int = 16  # longest draft
    page_size: int = 16
    min_context: int = 128
    sparse_ratio: float = 0.07
    sparse_min_tokens: int = 512
    select_verify: bool = True  # verification computes page mass (selectors seeded at verification)
    max_sparse_tokens: int | None = None  # most KV tokens that a draft row can list and read; None = its whole context
    async_scheduling: bool = False  # steps are launched while others run: one that starts from idle costs more

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "num_pages", "max_num_batched_tokens", "page_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"profiling plan: {name} must be >= 1, got {getattr(self, name)}")
        if self.d_max < 0:
            raise UsageError(f"profiling plan: d_max must be >= 0, got {self.d_max}")
        if self.max_model_len <= self.d_max + 1:
            raise UsageError(
                f"profiling plan: max_model_len {self.max_model_len} must exceed d_max + 1 = {self.d_max + 1}"
            )

    def fits(self, cell: Cell) -> bool:
        """True when one step of this engine can hold the cell."""
        return (
            cell.rows <= self.max_num_seqs
            and cell.query_tokens <= self.max_num_batched_tokens
            and cell.pages(self.page_size) <= self.num_pages
            and all(group.context_tokens <= self.max_model_len for group in cell.groups)
            and all(group.sparse_tokens <= (self.max_sparse_tokens or group.sparse_tokens) for group in cell.groups)
        )

    def context_for(self, rows: int, context: float, query_tokens: int = 1) -> int:
        """``context`` lowered to what the pool can hold for ``rows`` rows."""
        room = self.num_pages // max(rows, 1) * self.page_size
        return max(min(int(context), self.max_model_len, room), query_tokens)

    def rows_for(self, rows: float, query_tokens: int) -> int:
        """``rows`` lowered to what one step can hold."""
        return max(1, min(int(rows), self.max_num_seqs, self.max_num_batched_tokens // query_tokens))

    def sparse_for(self, context: int, scale: float = 1.0) -> int:
        """KV tokens a draft row reads under the budget rule of the selectors, times ``scale``."""
        wanted = int(scale * max(self.sparse_min_tokens, self.sparse_ratio * context))
        return max(1, min(context, wanted, self.max_sparse_tokens or context))


def geometric(low: float, high: float, factor: float = 2.0) -> list[int]:
    """Whole numbers from ``low`` to ``high`` (both included), about a factor ``factor`` apart."""
    if high <= low:
        return [int(max(high, 1))]
    steps = max(1, round(np.log(high / low) / np.log(factor)))
    return sorted({int(round(value)) for value in low * (high / low) ** (np.arange(steps + 1) / steps)})


def refinement_level(index: int, length: int) -> int:
    """0 for the ends of an axis, 1 for its middle, 2 for the quarters, ..."""
    if index in (0, length - 1):
        return 0
    low, high, level = 0, length - 1, 1
    while True:
        middle = (low + high) // 2
        if index == middle:
            return level
        low, high = (low, middle) if index < middle else (middle, high)
        level += 1


def profile_plan(limits: PlanLimits, *, seed: int = 0, levels: int = 4, with_prefill: bool = True) -> list[Cell]:
    """Cells to time, in order; about 1,200 for a large GPU. Every cell fits `limits`; keys are unique.

    ``levels`` bounds the refinement (1 = corners and middles only). About one cell in six is held out.
    """
    generator = np.random.default_rng(seed)
    by_regime: list[list[Cell]] = []
    for name, (axes, build) in _regimes(limits, with_prefill).items():
        leveled = []
        for indices in itertools.product(*(range(len(axis)) for axis in axes)):
            level = max(refinement_level(index, len(axis)) for index, axis in zip(indices, axes, strict=True))
            if level <= levels or name == "sizes":  # a GEMM time is not to be guessed from its neighbours
                cell = build(*(axis[index] for index, axis in zip(indices, axes, strict=True)))
                leveled.append((level, generator.random(), cell))
        leveled.sort(key=lambda item: item[:2])
        cells = [cell for _, _, cell in leveled[:MAX_CELLS_PER_REGIME]]
        by_regime += [cells[::2], cells[1::2]] if name == "sizes" else [cells]  # two of them in every turn
    in_turn = [cell for turn in itertools.zip_longest(*by_regime) for cell in turn if cell is not None]
    grid = _unique(limits, in_turn)
    plan = _interleave(limits, grid, _off_grid(limits, generator, with_prefill))
    if with_prefill and limits.async_scheduling:
        for index, cell in enumerate(_from_idle(limits), start=1):
            plan.insert(index * IDLE_EVERY - 1, cell)
    return plan


def _regimes(
    limits: PlanLimits, with_prefill: bool
) -> dict[str, tuple[tuple[Sequence[float], ...], Callable[..., Cell]]]:
    rows = geometric(1, limits.max_num_seqs)
    contexts = geometric(min(limits.min_context, limits.max_model_len), limits.max_model_len)
    drafted = sorted({d for d in (1, 2, 4, 6, 8, 12, 16, limits.d_max) if d <= limits.d_max})
    fractions = (1 / 8, 1 / 2, 7 / 8)
    chunks = geometric(min(64, limits.max_num_batched_tokens), min(limits.max_num_batched_tokens, limits.max_model_len))

    def ar_cell(count: float, context: float) -> Cell:
        n = limits.rows_for(count, 1)
        return ar(n, limits.context_for(n, context))

    def draft_cell(count: float, context: float, scale: float) -> Cell:
        n = limits.rows_for(count, 1)
        length = limits.context_for(n, context)
        return draft(n, length, limits.sparse_for(length, scale))

    def verify_cell(count: float, context: float, tokens: float, select: bool = True) -> Cell:
        n = limits.rows_for(count, int(tokens) + 1)
        length = limits.context_for(n, context, int(tokens) + 1)
        return verify(n, length, int(tokens), select=select and limits.select_verify)

    def uneven_cell(count: float, context: float, tokens: float) -> Cell:
        """One row verifies drafts, the others none: the widest row decides the launch of all."""
        n = max(2, limits.rows_for(count, 1))
        length = limits.context_for(n, context, int(tokens) + 1)
        return mixed(verify(n - 1, length, 0), verify(1, length, int(tokens)))

    def mixed_cell(count: float, context: float, share: float, tokens: float, select: bool = True) -> Cell:
        n = max(2, limits.rows_for(count, int(tokens) + 1))
        drafting = min(n - 1, max(1, round(n * share)))
        length = limits.context_for(n, context, int(tokens) + 1)
        sparse = limits.sparse_for(length)
        # where somebody drafts, every row that verifies gets a page list, one without drafts too; from page mass,
        # unless the selector needs none (window) or hardly any (of one layer)
        checking = verify(n - drafting, length, int(tokens), select=select and limits.select_verify)
        return mixed(draft(drafting, length, sparse), checking)

    def mixed_uneven_cell(count: float, context: float, share: float) -> Cell:
        """As policies that follow each request run: most rows draft, the others verify rounds of different lengths."""
        n = max(4, limits.rows_for(count, limits.d_max + 1))
        drafting = min(n - 2, max(1, round(n * share)))
        length = limits.context_for(n, context, limits.d_max + 1)
        lengths = sorted({1, limits.d_max // 4, limits.d_max})[-min(3, n - drafting) :]
        each, more = divmod(n - drafting, len(lengths))
        checking = [
            verify(each + (index < more), length, tokens, select=limits.select_verify)
            for index, tokens in enumerate(lengths)
        ]
        return mixed(draft(drafting, length, limits.sparse_for(length)), *checking)

    def turns_cell(count: float, context: float, tokens: float) -> Cell:
        """As rounds of equal length that begin in turn: one row in ``tokens`` + 1 verifies."""
        return mixed_cell(count, context, tokens / (tokens + 1), tokens)

    def rounds_cell(count: float, context: float, mean: float, load: float) -> Cell:
        """As rounds that stop by chance, after ``mean`` drafts if `PlanLimits.d_max` did not end them before: lengths
        are the quantiles of that geometric distribution, and ``load`` times as many rows verify as on average."""
        n = max(4, limits.rows_for(count, limits.d_max + 1))
        length = limits.context_for(n, context, limits.d_max + 1)
        goes_on = mean / (mean + 1)
        per_round = goes_on * (1 - goes_on**limits.d_max) / (1 - goes_on)
        checking = min(n - 1, max(1, round(load * n / (per_round + 1))))
        quantiles = (np.arange(checking) + 0.5) / checking
        lengths = np.minimum(np.floor(np.log(1 - quantiles) / np.log(goes_on)), limits.d_max).astype(int)
        rounds = [
            verify(int(rows), length, int(tokens), select=limits.select_verify)
            for tokens, rows in zip(*np.unique(lengths, return_counts=True), strict=True)
        ]
        return mixed(draft(n - checking, length, limits.sparse_for(length)), *rounds)

    def prefill_cell(chunk: float, context: float, select: float) -> Cell:
        length = limits.context_for(1, max(context, chunk), int(chunk))
        return prefill(int(chunk), length, select=bool(select))

    def prompts_cell(chunk: float, count: float, select: float) -> Cell:
        """Several whole prompts in one step."""
        n = limits.rows_for(count, 1)
        each = max(1, int(chunk) // n)
        return prefill(each, each, n, select=bool(select))

    def prefill_mixed_cell(count: float, context: float, chunk: float, drafting: float, select: bool = True) -> Cell:
        """A prompt beside rows that decode: autoregressive ones, or drafts with a few verifications."""
        chunk = min(int(chunk), max(limits.max_num_batched_tokens - 2 * int(count), 1))
        n = max(1, min(limits.rows_for(count, 2), limits.max_num_seqs - 1))
        length = limits.context_for(n + 1, context, 4)
        drafts = round(0.8 * n) if drafting and limits.d_max >= 3 else 0
        select = select and limits.select_verify
        if not drafts:
            return mixed(ar(n, length), prefill(chunk, max(chunk, length)))
        beside = [draft(drafts, length, limits.sparse_for(length))]
        if n > drafts:
            beside.append(verify(n - drafts, length, 3, select=select))
        return mixed(*beside, prefill(chunk, max(chunk, length), select=select))

    def bucket_cell(tokens: float) -> Cell:
        """One step of exactly ``tokens`` query tokens: as few tokens a row as the rows allow, else a prefill chunk."""
        total = int(tokens)
        n = min(total, limits.max_num_seqs)
        if total > n * (limits.d_max + 1):
            return prefill(total, total)
        each, more = divmod(total, n)
        length = limits.context_for(n, 1024, each + 1)
        parts = [(n - more, each), (more, each + 1)]
        return Cell(tuple(RowGroup("verify", count, query, length) for count, query in parts if count))

    largest = min(limits.max_num_batched_tokens, limits.max_num_seqs * (limits.d_max + 1))
    sizes = [size for size in limits.graph_buckets if size <= limits.max_num_batched_tokens]
    table: dict[str, tuple[tuple[Sequence[float], ...], Callable[..., Cell]]] = {
        "ar": ((rows, contexts), ar_cell),
        "sizes": ((sorted(sizes) or geometric(1, largest, 1.3),), bucket_cell),
        "draft": ((rows, contexts, (0.25, 1.0, 2.0)), draft_cell),
        # most steps of a run are like these: every number of rows, lists as the selector makes them
        "draft-usual": ((rows, contexts[len(contexts) // 2 :: 2]), lambda n, context: draft_cell(n, context, 1.0)),
    }
    if limits.d_max >= 1:
        table["verify"] = ((rows, contexts, drafted), verify_cell)
        if limits.select_verify:  # page mass of rows without drafts: of one query row instead of two
            table["verify-narrow"] = (
                (rows[:: max(1, len(rows) // 3)], contexts[:: max(1, len(contexts) // 3)]),
                lambda count, context: verify_cell(count, context, 0),
            )
            uneven = (rows[2::2], contexts[1::2], drafted[1::3])
            if all(len(axis) for axis in uneven):
                table["verify-uneven"] = (uneven, uneven_cell)
        table["verify-plain"] = (
            (
                rows[:: max(1, len(rows) // 2)],
                contexts[:: max(1, len(contexts) // 2)],
                drafted[:: max(1, len(drafted) - 1)],
            ),
            lambda count, context, tokens: verify_cell(count, context, tokens, select=False),
        )
    if limits.max_num_seqs >= 2:
        some = [d for d in (0, 3, 8, 15) if d <= limits.d_max]
        table["mixed"] = ((rows[1:], contexts, fractions, some), mixed_cell)
        if limits.select_verify and limits.d_max >= 3:
            table["mixed-plain"] = (
                (rows[1::2][-3:], contexts[::2], (1 / 2, 7 / 8), some[1:3]),
                lambda count, context, share, tokens: mixed_cell(count, context, share, tokens, select=False),
            )
    if limits.max_num_seqs >= 4 and limits.d_max >= 4:
        table["mixed-uneven"] = ((rows[2:], contexts, (1 / 2, 3 / 4, 7 / 8)), mixed_uneven_cell)
        # where runs of policies that follow each request spend their time
        some_rows, some_contexts = rows[2:][::-2][::-1], contexts[::-3][::-1]
        rounds = sorted({2, min(6, limits.d_max), limits.d_max})
        table["mixed-turns"] = ((some_rows, some_contexts, rounds), turns_cell)
        table["mixed-rounds"] = ((some_rows, some_contexts, (2, 8 * limits.d_max), (1 / 2, 5 / 2)), rounds_cell)
    if with_prefill:
        with_mass = (0.0, 1.0) if limits.select_verify else (0.0,)
        table["prefill"] = ((chunks, contexts, with_mass), prefill_cell)
        if limits.max_num_seqs >= 2:
            full = chunks[::-2][::-1]  # where prompts wait, they fill the step
            table["prompts"] = ((full, rows[1::2], with_mass), prompts_cell)
            table["mixed-prefill"] = ((rows, contexts[::2], full, (0.0, 1.0)), prefill_mixed_cell)
            if limits.select_verify and limits.d_max >= 3:
                table["mixed-prefill-plain"] = (
                    (rows[1::3], contexts[::3], full),
                    lambda count, context, chunk: prefill_mixed_cell(count, context, chunk, 1.0, select=False),
                )
    return table


def _off_grid(limits: PlanLimits, generator: np.random.Generator, with_prefill: bool) -> list[Cell]:
    """Seeded points between the grid lines, regimes in turn (shuffled, so that any of them may be held out), one in
    three with ragged contexts, more of them with long contexts, where runs spend their time. Draft steps, which are
    most of a run and have one table, and steps of many axes get more turns; special cases have their grid only.

    Batches of policies that follow each request are mostly full, and contexts of their rows differ a little.
    """
    regimes = _regimes(limits, with_prefill)
    special = ("sizes", "draft-usual", "verify-plain", "verify-narrow", "mixed-plain", "mixed-prefill-plain")
    turns = [name for name in regimes if name not in special]
    turns += [name for name, extra in EXTRA_TURNS.items() if name in regimes for _ in range(extra)]
    cells = []
    for name in itertools.chain.from_iterable(generator.permutation(turns).tolist() for _ in range(80)):
        axes, build = regimes[name]
        point = []
        for place, axis in enumerate(axes):
            low, high = float(min(axis)), float(max(axis))
            if {low, high} <= {0.0, 1.0}:  # yes or no
                point.append(float(generator.choice(np.asarray(axis))))
                continue
            share = generator.uniform()
            if place == 1 and name != "prompts":  # contexts
                share **= 0.5
            value = max(low, 0.5) * (max(high, 0.5) / max(low, 0.5)) ** share
            if place == 0 and name in FOLLOWING and generator.random() < FULL_SHARE:
                value = max(high // generator.choice(FULL_PARTS), low)
            point.append(value if high < 4 and low < 1 else float(round(min(max(value, low), high))))
        cell = build(*point)
        if generator.random() < 1 / 3:
            cell = ragged(cell)
        elif name in FOLLOWING:
            cell = ragged(cell, NEARLY_EVEN)
        cells.append(cell)
    return cells


def _from_idle(limits: PlanLimits) -> list[Cell]:
    """Steps that start from idle, ordered so that the first few differ in rows and in tokens."""
    grid = list(itertools.product(IDLE_ROWS, IDLE_TOKENS))
    cells = []
    for index in range(len(grid)):
        count, total = grid[5 * index % len(grid)]
        tokens = min(total, limits.max_num_batched_tokens)
        rows = limits.rows_for(count, max(1, tokens // count))
        each = max(1, min(tokens // rows, limits.max_model_len - 2))  # such a prompt goes on to decode
        cells.append(replace(prefill(each, each, rows), rest_s=IDLE_RESTS_S[index % len(IDLE_RESTS_S)]))
    return _unique(limits, cells)


def _unique(limits: PlanLimits, cells: Sequence[Cell]) -> list[Cell]:
    first: dict[str, Cell] = {}
    for cell in cells:
        if cell.key not in first and limits.fits(cell):
            first[cell.key] = cell
    return list(first.values())


def _interleave(limits: PlanLimits, grid: list[Cell], off_grid: list[Cell]) -> list[Cell]:
    known = {cell.key for cell in grid}
    spare = iter([cell for cell in _unique(limits, off_grid) if cell.key not in known])
    plan: list[Cell] = []
    seen: Counter[str] = Counter()
    for index, cell in enumerate(grid, start=1):
        plan.append(cell)
        if index % OFF_GRID_EVERY == 0:
            for each in itertools.islice(spare, OFF_GRID):
                plan.append(replace(each, heldout=seen[each.regime] % OFF_GRID == 0))
                seen[each.regime] += 1
    return plan
