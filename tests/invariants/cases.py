"""Shared pieces of the invariant tests: selectors small and large, prompts, the KV comparison."""

from __future__ import annotations

import random
from typing import Any

import torch

from aspire.engine.llm_engine import LLMEngine
from aspire.models import DenseAttend
from aspire.scheduler import PAGE_TOKENS, SELECTOR_KINDS, PolicySpec, SelectorSpec
from tests.invariants.models import CONFIGS, tiny_model

KINDS = SELECTOR_KINDS


def small(kind: str) -> SelectorSpec:
    """A selector that reads two or three pages: drafts of longer contexts go wrong."""
    return SelectorSpec(kind=kind, budget_ratio=0.0, min_pages=3, sinks=1, recent=1, layer=-2, layers=(1, 2))


def ample(kind: str) -> SelectorSpec:
    """A selector whose budget covers every context."""
    return SelectorSpec(kind=kind, budget_ratio=1.0, min_pages=64, sinks=1, recent=2, layers=(1, 2))


def fixed(g: int, selector: SelectorSpec, **settings: Any) -> PolicySpec:
    """`fixed` with g drafts."""
    return PolicySpec(kind="fixed", params={"g": g}, selector=selector, **settings)


def prompt_of(length: int, seed: int = 0, model: str = "llama") -> list[int]:
    """A random prompt."""
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(CONFIGS[model].vocab_size) for _ in range(length)]


def assert_kv_is_fresh(engine: LLMEngine, slot: int, model: str, tokens: list[int], tolerance: float = 2e-5) -> None:
    """KV of the committed positions of ``slot`` equals that of a dense forward over ``tokens``, all layers."""
    computed = int(engine.scheduler.slots.computed[slot])
    attend = DenseAttend(CONFIGS[model], computed)
    decoder = tiny_model(model).model
    decoder.forward(torch.tensor(tokens[:computed]), torch.arange(computed), attend)
    positions = torch.arange(computed)
    pages = engine.runner.block_table[slot].cpu().long()[positions // PAGE_TOKENS]
    for layer in range(CONFIGS[model].num_layers):
        for cache, want in ((engine.pool.keys, attend._keys), (engine.pool.values, attend._values)):
            got = cache[layer].cpu()[pages, :, positions % PAGE_TOKENS]
            assert torch.allclose(got, want[layer], atol=tolerance), f"layer {layer}"
