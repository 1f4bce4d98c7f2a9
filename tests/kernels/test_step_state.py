"""Opening and closing a step on the device, against the reference; the state of other slots is left alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from aspire.scheduler import SelectorSpec  # noqa: E402
from aspire_kernels import MAX_VERIFY_QUERIES, PageBudget, SlotState, StepRows, get_backend  # noqa: E402
from aspire_kernels.backend import REFERENCE  # noqa: E402
from tests.kernels.cases import DEVICES  # noqa: E402

SLOTS, PAGES = 24, 40


def _case(seed: int, device: str) -> tuple[StepRows, SlotState, torch.Tensor, torch.Tensor]:
    """A step of prefill chunks, drafts, verifications and padding; tokens of a tiny vocabulary, so that drafts are
    often right."""
    rng = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=rng, dtype=torch.int32)

    rows, real = 20, 17  # of them: the rest is padding
    kind = draw(0, 3, rows)  # prefill, draft, verify
    live = torch.arange(rows) < real
    drafts = torch.where(kind == 2, draw(0, MAX_VERIFY_QUERIES, rows), 0)
    held = torch.where(kind == 1, draw(0, MAX_VERIFY_QUERIES - 1, rows), 0)
    q_len = torch.where(kind == 0, draw(1, 40, rows), torch.where(kind == 1, 1, drafts + 1)) * live
    finds = ((kind == 2) | ((kind == 0) & (draw(0, 2, rows) > 0))) & live
    drafting = (kind == 1) & live
    q_start = torch.cumsum(q_len, 0) - q_len
    tokens = int(q_len.sum())
    sampled = torch.where(kind == 2, q_len, (finds | drafting).int()) * live
    sample_start = torch.cumsum(sampled, 0) - sampled
    owner = torch.repeat_interleave(torch.arange(rows), q_len.long())
    source = torch.repeat_interleave(torch.arange(rows), sampled.long())
    logit_row = (q_start + q_len - sampled)[source] + torch.arange(len(source)) - sample_start[source]
    pad, base = 9, draw(100, 300, SLOTS)
    slot = torch.randperm(SLOTS, generator=rng)[:rows].int() * live
    known = torch.where(kind == 0, draw(0, 200, rows), base[slot.long()] + held)
    follow = (kind > 0) & (held == 0) & (draw(0, 2, rows) > 0)
    fields = {
        "token_ids": draw(0, 3, tokens + pad),
        "token_row": torch.cat((owner, torch.full((pad,), -1))),
        "row_slot": slot,
        "q_start": q_start * live,
        "q_len": q_len,
        "first": torch.where(follow, -1, known) * live,
        "pending_at": torch.where(kind == 0, -1, held) * live,
        "drafting": drafting,
        "drafted": drafts * live,
        "sample_start": sample_start * live,
        "finds": finds,
        "forced": torch.where(draw(0, 4, rows) > 0, -1, draw(0, 20, rows)),
        "logit_row": torch.cat((logit_row, torch.zeros(pad))),
    }
    state = SlotState.empty(SLOTS, device)
    state.base.copy_(base)
    state.pending.copy_(draw(0, 3, SLOTS * MAX_VERIFY_QUERIES).view(SLOTS, -1))
    table = draw(1, 1000, SLOTS * PAGES).view(SLOTS, PAGES).to(device)
    rows_on = StepRows(**{name: value.int().contiguous().to(device) for name, value in fields.items()})
    return rows_on, state, table, draw(0, 3, len(source) + pad).to(device)


def _copy(state: SlotState) -> SlotState:
    return SlotState(*(getattr(state, name).clone() for name in ("base", "pending", "sel_count", "tail_page")))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [False, True])
def test_step_state(seed: int, window: bool, device: str) -> None:
    rows, state, table, sampled = _case(seed, device)
    kernel, budget = get_backend("triton", device), PageBudget(0.1, 6, 1, 3)
    at, expected_at = kernel.resolve(rows, state, table), REFERENCE.resolve(rows, state, table)
    for name in vars(expected_at):
        assert torch.equal(getattr(at, name), getattr(expected_at, name)), name
    mine, expected = _copy(state), _copy(state)
    got = kernel.advance(rows, at, sampled, mine, budget, window)
    wanted = REFERENCE.advance(rows, at, sampled, expected, budget, window)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    for name in vars(expected):
        assert torch.equal(getattr(mine, name), getattr(expected, name)), name
    touched = rows.row_slot[(rows.finds > 0) | (rows.drafting > 0)].long()
    others = torch.ones(SLOTS, dtype=torch.bool, device=device)
    others[touched] = False
    assert torch.equal(mine.pending[others], state.pending[others])


@pytest.mark.parametrize("kind", ["window", "verify"])
def test_lists_have_the_size_that_the_scheduler_expects(kind: str) -> None:
    spec = SelectorSpec(kind=kind, budget_ratio=0.07, min_pages=5, sinks=2, recent=3)
    budget = PageBudget(spec.budget_ratio, spec.min_pages, spec.sinks, spec.recent)
    rows, state, table, sampled = _case(3, "cpu")
    for _ in range(40):
        at = REFERENCE.resolve(rows, state, table)
        _, length = REFERENCE.advance(rows, at, sampled, state, budget, kind == "window")
        found = rows.finds > 0
        slots = rows.row_slot[found].long()
        count, tail = spec.geometry(length[found].long().numpy())
        assert state.sel_count[slots].tolist() == count.tolist() and state.tail_page[slots].tolist() == tail.tolist()
        rows.first[found] = torch.where(rows.first[found] >= 0, (rows.first[found] + 17) % 600, -1)
