"""No full collection of the garbage collector falls into a run, and the heap is as before when it ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from aspire import LLM, AsyncLLM, SamplingParams
from aspire.heap import settled_heap
from aspire.measure import run_requests
from aspire.prompts import Prompt

SETTINGS = {"load_format": "dummy", "device": "cpu", "max_model_len": 128, "max_num_seqs": 2}
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    assert gc.get_freeze_count() == 0
    yield
    assert gc.get_freeze_count() == 0


def test_what_exists_is_left_alone_until_the_block_ends() -> None:
    with settled_heap():
        assert gc.get_freeze_count() > 10_000 and gc.isenabled()
    with pytest.raises(ValueError, match="fails"), settled_heap():
        raise ValueError("it fails")


def test_every_loop_that_generates_settles_the_heap() -> None:
    counts: list[int] = []
    llm = LLM("tiny-llama", **SETTINGS)
    llm.generate([[5, 6, 7]], PARAMS, on_step=lambda outputs: counts.append(gc.get_freeze_count()))
    prompts = [Prompt("0", token_ids=(5, 6))]
    run_requests(llm.engine, prompts, [PARAMS], on_finish=lambda output: counts.append(gc.get_freeze_count()))

    async def stream() -> None:
        async with AsyncLLM("tiny-llama", **SETTINGS) as other:
            async for _ in other.generate([5, 6, 7], PARAMS):
                counts.append(gc.get_freeze_count())

    asyncio.run(stream())
    assert len(counts) >= 6 and min(counts) > 10_000
