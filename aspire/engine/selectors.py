"""Page lists on the device: which attention each layer runs, where page mass is taken, when lists are written.

Every kind of `SelectorSpec` is described by three facts: the layers in which drafting rows read everything, the layers
in which a verification takes page mass, and what is done with the mass. No host synchronisation; fixed shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aspire.engine.step_input import StepInput, to_device
from aspire.scheduler import PAGE_TOKENS, SelectorSpec
from aspire_kernels import AttentionBatch, Backend, PageBudget, Resolved, SlotState

if TYPE_CHECKING:
    from aspire.engine.runner import StepBounds

SELECTORS_KEPT = 8
"""Selectors whose lists a runner keeps when policies are switched."""
_LEAST_MASS = 1.0e-3  # added where masses are divided: what is below says nothing


@dataclass
class _Forward:
    """State of one forward: the batches of its two kinds of layers and the mass taken so far."""

    inp: StepInput
    kv_len: Tensor  # [rows]
    mixed: AttentionBatch  # drafting rows read their lists
    full: AttentionBatch  # drafting rows read everything
    mass: Tensor  # [layers of mass, rows, pages]
    drafting: bool
    verify_offsets: Tensor  # [rows, 2] query offsets whose mass is taken: of verifying rows
    all_offsets: Tensor  # the same, of drafting rows too: in layers that they read in full


def list_shape(spec: SelectorSpec, num_layers: int, max_slots: int, max_model_len: int) -> tuple[int, int, int]:
    """Shape of `PageLists.lists`."""
    return num_layers if spec.per_layer else 1, max_slots, spec.max_selected(max_model_len)


def seed_shape(spec: SelectorSpec, num_layers: int, max_slots: int, max_pages: int) -> tuple[int, int, int] | None:
    """Shape of the mass that each layer's list was made from, which refresh-per-layer keeps; None for other kinds.
    One slot more for rows that make no list."""
    return (num_layers, max_slots + 1, max_pages) if spec.kind == "refresh-per-layer" else None


def list_bytes(spec: SelectorSpec, num_layers: int, max_slots: int, max_pages: int) -> int:
    """Bytes of the page lists of ``spec``, for contexts of up to ``max_pages`` pages."""
    lists = list_shape(spec, num_layers, max_slots, max_pages * PAGE_TOKENS)
    seed = seed_shape(spec, num_layers, max_slots, max_pages)
    return 4 * (math.prod(lists) + (0 if seed is None else math.prod(seed)))


class PageLists:
    """The page lists of one selector for ``max_slots`` slots.

    ``lists``: int32 [num_lists, max_slots, K] physical pages; one list, or one per layer.
    """

    def __init__(
        self,
        spec: SelectorSpec,
        backend: Backend,
        *,
        num_layers: int,
        max_slots: int,
        max_model_len: int,
        max_pages: int,
        state: SlotState,
        drafts: bool,
    ) -> None:
        self.spec = spec
        self._backend = backend
        self._state = state
        device = state.base.device
        self.full_layers = frozenset(spec.selection_layers(num_layers)) if drafts else frozenset()
        self._selection_layers = tuple(sorted(self.full_layers & {*spec.layers})) if spec.kind == "delta" else ()
        if not drafts or spec.kind == "window":
            mass_layers: tuple[int, ...] = ()
        elif spec.per_layer:
            mass_layers = tuple(range(num_layers))
        elif spec.kind == "delta":
            mass_layers = self._selection_layers
        else:
            mass_layers = (spec.layer_index(num_layers),)
        self.mass_index = {layer: index for index, layer in enumerate(mass_layers)}
        self.selects = bool(mass_layers)
        shape = list_shape(spec, num_layers, max_slots, max_model_len)
        self.lists = torch.zeros(shape, dtype=torch.int32, device=device)
        self.budget = PageBudget(spec.budget_ratio, spec.min_pages, spec.sinks, spec.recent)
        seed = seed_shape(spec, num_layers, max_slots, max_pages) if drafts else None
        self._seed = None if seed is None else torch.zeros(seed, dtype=torch.float32, device=device)
        self._device = device

    def note_pages(self, entries: NDArray[np.int64]) -> None:
        """New block-table entries [n, 3]: a window lists the first pages, which nobody chooses."""
        if self.spec.kind != "window" or not len(entries):
            return
        first = entries[entries[:, 1] < min(self.spec.sinks, self.lists.shape[2])]
        if len(first):
            slots, logical, physical = to_device(first.T, self._device)
            self.lists[0, slots, logical] = physical.int()

    def begin(self, inp: StepInput, at: Resolved, block_table: Tensor, bounds: StepBounds) -> _Forward:
        """Prepare a forward over ``inp`` at the places ``at``; ``bounds``, known to the host, choose the launches."""
        rows, pages = inp.shape.rows, -(-bounds.max_kv // PAGE_TOKENS)
        common = {
            "row_slot": inp.row_slot,
            "q_start": inp.q_start,
            "q_len": inp.q_len,
            "kv_len": at.kv_len,
            "block_table": block_table,
            "sel_pages": self.lists[0],
            "sel_count": self._state.sel_count,
            "tail_page": self._state.tail_page,
            "max_q_len": bounds.max_q,
            "max_verify_q": bounds.max_verify_q,
            "mass_at_end": bounds.any_selects and bool(self.mass_index),
        }
        mixed = AttentionBatch(
            **common, sparse=inp.sparse, max_full_kv=bounds.max_full_kv, max_sparse_kv=bounds.max_sparse_kv
        )
        full = mixed
        if self.full_layers and bounds.max_sparse_kv:
            full = AttentionBatch(
                **common, sparse=torch.zeros_like(inp.sparse), max_full_kv=bounds.max_kv, max_sparse_kv=0
            )
        drafting = bool(bounds.max_sparse_kv)
        taken = bounds.any_selects or (drafting and bool(self.full_layers))
        return _Forward(
            inp=inp,
            kv_len=at.kv_len,
            mixed=mixed,
            full=full,
            mass=torch.empty((len(self.mass_index) if taken else 0, rows, pages), device=self._device),
            drafting=drafting,
            verify_offsets=torch.stack((inp.mass_first, inp.mass_last), dim=1),
            all_offsets=torch.stack((torch.maximum(inp.mass_first, inp.mass_draft), inp.mass_last), dim=1),
        )

    def attend(
        self, forward: _Forward, layer: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float
    ) -> Tensor:
        """Attention of ``layer`` for all rows, taking the page mass that the selector wants there."""
        reads_all = layer in self.full_layers and forward.drafting
        if reads_all:
            batch, offsets = forward.full, forward.all_offsets
        else:
            batch, offsets = forward.mixed.with_selection(self._list_of(layer)), forward.verify_offsets
        index = self.mass_index.get(layer)
        if index is None or not forward.mass.shape[0]:
            return self._backend.paged_attention(q, k_cache, v_cache, batch, scale=scale)
        mass = forward.mass[index]
        out = self._backend.paged_attention(q, k_cache, v_cache, batch, scale=scale, page_mass=mass, mass_rows=offsets)
        if reads_all:  # new lists for what is drafted next
            scores = mass[None] if self._seed is None else self._refreshed(forward, self._seed, mass)
            self._choose_within(forward, scores, forward.inp.sparse)
        return out

    def finish(self, forward: _Forward, length: Tensor) -> None:
        """Write the lists of rows that verified or ended their prefill: ``length`` [rows] is their new KV length."""
        if not forward.mass.shape[0]:
            return
        chosen = (forward.inp.mass_first >= 0).int()
        mass = forward.mass if self.spec.per_layer else forward.mass[-1:]
        self._select(forward, mass, length + 1, chosen)
        if self._seed is not None:
            self._note_seed(forward, self._seed, chosen)

    def _list_of(self, layer: int) -> Tensor:
        return self.lists[layer if self.spec.per_layer else 0]

    def _choose_within(self, forward: _Forward, mass: Tensor, chosen: Tensor) -> None:
        """New lists of unchanged ``sel_count`` and ``tail_page``: the pages of most ``mass`` before the tail."""
        inp = forward.inp
        # the KV length whose newest page is the seed's: `select_pages` derives the same count and tail from it
        seeded = (self._state.tail_page[inp.row_slot.long()] + self.spec.recent) * PAGE_TOKENS
        length = torch.minimum(forward.kv_len, seeded)
        self._select(forward, mass, length, chosen)

    def _select(self, forward: _Forward, mass: Tensor, length: Tensor, chosen: Tensor) -> None:
        inp = forward.inp
        self._backend.select_pages(
            mass.contiguous(),
            inp.row_slot,
            length.int(),
            chosen,
            forward.mixed.block_table,
            self.lists,
            self._state.sel_count,
            self._state.tail_page,
            self.budget,
        )

    def _refreshed(self, forward: _Forward, seed: Tensor, now: Tensor) -> Tensor:
        """Scores [layers, rows, pages]: each layer's mass at verification, times how far the mass of the refresh layer,
        ``now`` [rows, pages], has moved since."""
        then = seed[:, forward.inp.row_slot.long(), : now.shape[1]]
        before = then[self.spec.layer_index(len(then))]
        moved = (now + _LEAST_MASS) / (before + _LEAST_MASS)
        return then * moved.pow(self.spec.refresh_power)

    def _note_seed(self, forward: _Forward, seed: Tensor, chosen: Tensor) -> None:
        """Keep the mass that the lists of the ``chosen`` rows were made from; what the others have goes to a spare."""
        slots = torch.where(chosen.bool(), forward.inp.row_slot.long(), seed.shape[1] - 1)
        seed[:, slots, : forward.mass.shape[2]] = forward.mass
