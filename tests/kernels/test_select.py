"""Page selection: kernel = reference; the lists obey the budget, and short contexts are covered whole."""

from __future__ import annotations

import pytest
import torch

from aspire.errors import UsageError
from aspire_kernels import PAGE_SIZE, PageBudget, get_backend
from tests.kernels.cases import DEVICES

REFERENCE = get_backend("reference")
SLOTS = 9


def select(name: str, device: str, mass: torch.Tensor, kv_len: list[int], budget: PageBudget, width: int) -> list:
    rows = len(kv_len)
    table = torch.arange(1, SLOTS * mass.shape[-1] + 1, dtype=torch.int32).view(SLOTS, -1)
    slot = torch.tensor([(2 * r + 1) % SLOTS for r in range(rows)], dtype=torch.int32)
    chosen = torch.ones(rows, dtype=torch.int32)
    chosen[-1] = 0
    shapes = ((mass.shape[0], SLOTS, width), (SLOTS,), (SLOTS,))
    out = [torch.full(shape, -1, dtype=torch.int32, device=device) for shape in shapes]
    inputs = (mass, slot, torch.tensor(kv_len, dtype=torch.int32), chosen, table)
    get_backend(name, device).select_pages(*(t.to(device) for t in inputs), *out, budget)
    return [t.cpu() for t in out] + [slot, table]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "budget",
    [PageBudget(0.3, 10, 2, 3), PageBudget(0.07, 1, 0, 1), PageBudget(0.0, 32, 4, 8), PageBudget(1.0, 1, 1, 1)],
)
@pytest.mark.parametrize("ties", [False, True])
def test_equals_reference_and_obeys_the_budget(ties: bool, budget: PageBudget, device: str) -> None:
    mass = torch.rand(2, 7, 45, generator=torch.Generator().manual_seed(4))
    if ties:
        mass = (mass * 4).floor() / 4
    kv_len = [720, 700, 333, 49, 17, 1, 500]
    got = select("triton", device, mass, kv_len, budget, budget.list_width(45))
    expected = select("reference", "cpu", mass, kv_len, budget, budget.list_width(45))
    assert torch.equal(got[1], expected[1]) and torch.equal(got[2], expected[2])
    slots, table = got[3], got[4]
    for row, tokens in enumerate(kv_len[:-1]):
        slot, pages = int(slots[row]), -(-tokens // PAGE_SIZE)
        count, tail = int(got[1][slot]), int(got[2][slot])
        assert torch.equal(got[0][:, slot, :count], expected[0][:, slot, :count])
        assert count + pages - tail == budget.pages(pages)
        assert tail <= pages - 1 and count <= tail
        for layer in range(2):
            logical = [int((table[slot] == p).nonzero()) for p in got[0][layer, slot, :count]]
            assert logical == sorted(set(logical)) and all(p < tail for p in logical)
            assert logical[: budget.sinks] == list(range(min(budget.sinks, count)))
    untouched = int(slots[-1])
    assert bool((got[0][:, untouched] == -1).all()) and int(got[1][untouched]) == -1


def test_budget_is_validated() -> None:
    with pytest.raises(UsageError, match="ratio"):
        PageBudget(ratio=1.5)
    with pytest.raises(UsageError, match="recent"):
        PageBudget(recent=0)
    assert PageBudget().pages(10) == 10 and PageBudget().pages(450) == 32 and PageBudget().pages(6250) == 438
