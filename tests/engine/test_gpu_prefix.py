"""On a GPU: requests that share KV pages have the outputs of a cold run, eagerly and from CUDA graphs, in fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aspire.scheduler import PolicySpec, SelectorSpec
from tests.engine.gpu import NEEDS_GPU

pytest.importorskip("torch")
pytestmark = [*NEEDS_GPU, pytest.mark.usefixtures("short_prefixes_are_waited_for")]

DEVICE = "cuda"
FAMILY, TAIL, COUNT = 100, 24, 10


def _engine(**settings: Any) -> Any:
    from aspire import EngineConfig, LLMEngine

    selector = SelectorSpec("verify", budget_ratio=0.0, min_pages=3, sinks=1, recent=1)
    config = EngineConfig(
        model="tiny-qwen3",
        load_format="dummy",
        dtype="float32",
        device=DEVICE,
        policy=PolicySpec("fixed", {"g": 4}, selector=selector),
        max_num_seqs=4,
        max_model_len=256,
        max_num_batched_tokens=64,
        **settings,
    )
    return LLMEngine(config)


def _outputs(engine: Any) -> tuple[list[list[int]], int]:
    """Output tokens by prompt, and the prompt tokens that went through the model."""
    from aspire import SamplingParams

    random = np.random.default_rng(3)
    prefix = random.integers(0, 60, FAMILY).tolist()
    engine.begin_record()
    for index in range(COUNT):
        params = SamplingParams(
            temperature=0.8 * (index % 2), seed=index, max_tokens=30, ignore_eos=True, detokenize=False
        )
        engine.add_request(str(index), prefix + random.integers(0, 60, TAIL).tolist(), params)
    found = {}
    while engine.has_unfinished_requests:
        found.update({output.request_id: output.outputs[0].token_ids for output in engine.step()})
    _, log, _ = engine.record()
    return [found[str(index)] for index in range(COUNT)], int(log.column("query_tokens")[log.column("mode") == 1].sum())


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("num_pages", [100, 27], ids=["room", "few pages"])
def test_shared_pages_change_no_output(eager: bool, ahead: bool, num_pages: int) -> None:
    expected, computed = _outputs(_engine(attention_backend="reference", enable_prefix_caching=False))
    assert computed == COUNT * (FAMILY + TAIL)
    engine = _engine(enforce_eager=eager, async_scheduling=ahead, num_pages=num_pages)
    found, computed = _outputs(engine)
    assert found == expected
    if num_pages == 100:  # with few, prefixes are taken and computed again
        assert computed == FAMILY + TAIL + (COUNT - 1) * (FAMILY % 16 + TAIL)
    pages = engine.scheduler.pages
    assert pages.num_free == pages.num_usable and not pages.owners.any()
