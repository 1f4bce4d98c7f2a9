"""Scratch of kernels: what a KV pool is sized by is what they allocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aspire_kernels import get_backend, sample
from aspire_kernels._triton import multiprocessors
from aspire_kernels.attention import paged
from aspire_kernels.attention.scratch import scratch_bytes
from aspire_kernels.attention.tuning import gpu_name
from tests.kernels.cases import DEVICES, Row, make_case
from tests.kernels.test_sample import SETTINGS, params


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 1, 32), (1, 3, 64), (1, 16, 16)])
def test_attention_stays_within_its_bound(
    kv_heads: int, group: int, head_dim: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards that grow, so that scratch is outgrown and kept."""
    monkeypatch.setattr(paged, "_workspaces", {})
    forwards = [
        [Row(1, 20)],
        [Row(1, 170, selected=4), Row(3, 90)],
        [Row(40, 100), Row(17, 133), Row(20, 20), Row(1, 77, selected=1)],
    ]
    for rows in forwards:
        case = make_case(rows, kv_heads=kv_heads, group=group, head_dim=head_dim, device=device)
        count, pages = case.batch.rows, case.batch.block_table.shape[1]
        offsets = torch.zeros((count, 2), dtype=torch.int32, device=device)
        mass = torch.empty((count, pages), device=device)
        paged.paged_attention(
            case.q, case.k_cache, case.v_cache, case.batch, scale=case.scale, page_mass=mass, mass_rows=offsets
        )
    where = torch.device(device)
    bound = scratch_bytes(
        gpu_name(where),
        multiprocessors(where),
        rows=4,
        tokens=78,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_kv=176,
        itemsize=4,
    )
    assert 0 < paged.workspace_bytes() <= bound < 8 * paged.workspace_bytes()


@pytest.mark.parametrize("device", DEVICES)
def test_sampling_allocates_what_it_says(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = torch.randn(len(SETTINGS), 1500, device=device), params(SETTINGS, device)
    allocated, empty = 0, torch.empty

    def counted(*given: Any, **named: Any) -> torch.Tensor:
        nonlocal allocated
        made = empty(*given, **named)
        allocated += made.numel() * made.element_size()
        return made

    monkeypatch.setattr(sample.torch, "empty", counted)
    get_backend("triton", device).sample(logits, rows)
    assert allocated == sample.scratch_bytes(len(SETTINGS), 1500, device)
