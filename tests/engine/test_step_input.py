"""The input of a step: a buffer that is filled again and again holds what a fresh one would."""

from __future__ import annotations

import numpy as np
import pytest

from aspire.engine.step_input import ROW_FIELDS, Shape, StepInput
from aspire.sampling_params import SamplingParams
from tests.invariants.cases import fixed, prompt_of, small
from tests.invariants.harness import Limits, make_engine

SPARE_SLOT = 4
SHAPE = Shape(tokens=96, rows=8, samples=96, pages=64)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_buffer_used_again_holds_what_a_fresh_one_would(async_scheduling: bool) -> None:
    engine = make_engine("llama", fixed(3, small("verify")), Limits(max_num_seqs=4, async_scheduling=async_scheduling))
    again = StepInput(SHAPE, np.full(SHAPE.size, 99, dtype=np.int32))
    launch, seen = engine.runner.launch, set()

    def compare(plan, forced=None):  # type: ignore[no-untyped-def]
        fresh = StepInput(SHAPE, np.full(SHAPE.size, 99, dtype=np.int32))
        for inp in (again, fresh):
            inp.token_ids[:] = 0  # only tokens of prompts are written
            inp.fill(plan, engine.sequences, plan.selects, forced, SPARE_SLOT)
        np.testing.assert_array_equal(again.buffer, fresh.buffer)
        rows = plan.num_rows
        assert not fresh.q_len[rows:].any() and (fresh.token_row[plan.num_query_tokens :] == -1).all()
        assert (fresh.page_slot[len(plan.new_pages) :] == SPARE_SLOT).all()
        for name in ROW_FIELDS:
            padding = -1 if name.startswith("mass") else 0
            assert (getattr(fresh, name)[rows:] == padding).all(), name
        seen.add((plan.num_drafts > 0, plan.num_prefills > 0, plan.single))
        return launch(plan, forced)

    engine.runner.launch = compare  # type: ignore[method-assign]
    for index, (length, tokens) in enumerate([(20, 30), (50, 9), (5, 17), (33, 4), (70, 12)]):
        engine.add_request(str(index), prompt_of(length), SamplingParams(max_tokens=tokens, ignore_eos=True))
    while engine.has_unfinished_requests:
        engine.step()
    assert {drafting for drafting, _, _ in seen} == {single for _, _, single in seen} == {True, False}
