"""How many KV pages fit: what steps need is counted by part, and told when there is no room."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
import torch

from aspire.engine.config import EngineConfig
from aspire.engine.kv_pool import fit_pages, page_bytes, step_bytes
from aspire.engine.selectors import PageLists, list_bytes
from aspire.errors import CapacityError
from aspire.models.presets import PRESETS
from aspire.scheduler import SELECTOR_KINDS, PolicySpec, SelectorSpec
from aspire_kernels import SlotState, get_backend

SHAPE = PRESETS["llama-3.1-8b"]
GPU = torch.device("cuda")
PARTS = {"activations": 3_000_000_000, "logits": 1_000_000_000}


def _memory(monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, total))


def _fit(parts: dict[str, int], wanted_pages: int = 10**9) -> int:
    return fit_pages(SHAPE, torch.bfloat16, GPU, utilization=0.9, reserved_bytes=parts, wanted_pages=wanted_pages)


def test_pages_take_what_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    _memory(monkeypatch, free=100_000_000_000, total=140_000_000_000)
    one = 2 * 32 * 8 * 128 * 2 * 16  # K and V, layers, KV heads, head_dim, bytes, tokens
    assert page_bytes(SHAPE, torch.bfloat16) == one
    assert _fit(PARTS) == (100 - 14 - 4) * 10**9 // one
    assert _fit({**PARTS, "tables": 10 * one}) == _fit(PARTS) - 10
    assert _fit(PARTS, wanted_pages=77) == 77


def test_no_room_is_told_by_part_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _memory(monkeypatch, free=18_000_000_000, total=140_000_000_000)
    with pytest.raises(CapacityError) as error:
        _fit(dict(reversed(PARTS.items())))
    for said in (
        "no room for KV pages of 2.10 MB",
        "18.00 GB free after the weights",
        "14.00 GB left alone at gpu_memory_utilization 0.9",
        "steps need 4.00 GB (activations 3.00, logits 1.00)",
        "lower max_num_batched_tokens or max_num_seqs",
    ):
        assert said in str(error.value)


@pytest.mark.parametrize("kind", SELECTOR_KINDS)
def test_page_lists_have_the_bytes_that_are_counted(kind: str) -> None:
    spec = SelectorSpec(kind, layers=(1, 3) if kind == "delta" else ())
    layers, slots, pages = 4, 3, 40
    lists = PageLists(
        spec,
        get_backend("reference", "cpu"),
        num_layers=layers,
        max_slots=slots,
        max_model_len=pages * 16,
        max_pages=pages,
        state=SlotState.empty(slots, torch.device("cpu")),
        drafts=True,
    )
    held = [each for each in vars(lists).values() if isinstance(each, torch.Tensor)]
    assert sum(each.numel() * each.element_size() for each in held) == list_bytes(spec, layers, slots, pages)


def test_parts_are_those_of_the_largest_step() -> None:
    config = EngineConfig(max_num_seqs=16, max_num_batched_tokens=2048)
    parts = step_bytes(SHAPE, torch.bfloat16, config, pages_per_slot=512)
    assert parts["logits"] == 3 * 16 * 17 * 128256 * 4
    assert parts["page mass"] == 2 * 3 * 32 * 16 * 512 * 4
    assert parts["tables"] == 4 * (17 * 512 + 2 * (512 * 16 + 17) * 64)
    # the residual and gate and up at once are less, everything of a layer at once is more
    least = 2048 * (SHAPE.hidden_size + 2 * SHAPE.intermediate_size) * 2
    assert 2 * least < parts["activations"] < 8 * least


@pytest.mark.parametrize(
    ("change", "grown", "same"),
    [
        ({"max_num_seqs": 64}, {"logits", "sampling", "page mass", "page lists", "tables"}, {"activations"}),
        ({"max_num_batched_tokens": 8192}, {"activations", "attention scratch"}, {"logits", "page lists", "page mass"}),
        ({"policy": PolicySpec(selector=SelectorSpec("refresh-per-layer"))}, {"page lists"}, {"logits", "activations"}),
    ],
)
def test_each_limit_is_counted_where_it_tells(change: dict[str, object], grown: set[str], same: set[str]) -> None:
    config = EngineConfig(max_num_seqs=16, max_num_batched_tokens=2048)
    before = step_bytes(SHAPE, torch.bfloat16, config, pages_per_slot=512)
    after = step_bytes(SHAPE, torch.bfloat16, replace(config, **change), pages_per_slot=512)
    assert {name for name in before if after[name] > before[name]} >= grown
    assert all(after[name] == before[name] for name in same)


def test_steps_without_graphs_keep_one_set_of_buffers() -> None:
    config = EngineConfig(max_num_seqs=16)
    both = step_bytes(SHAPE, torch.bfloat16, config, 512)
    eager = step_bytes(SHAPE, torch.bfloat16, replace(config, enforce_eager=True), 512)
    assert eager["activations"] * 2 == both["activations"] and eager["page lists"] == both["page lists"]
