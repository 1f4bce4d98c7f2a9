"""On a GPU: every selector and policy gives the text of autoregressive decoding, eagerly and from CUDA graphs.

Float32, so that equality is exact: the oracle is the torch reference back end without graphs. An engine runs all
policies one after the other, so that its graphs are captured once; requests at T = 0 and sampled ones share batches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from aspire.scheduler import SELECTOR_KINDS, PolicySpec, SelectorSpec
from aspire.scheduler.policies.spec import POLICIES as KINDS_OF_POLICY
from tests.engine.gpu import NEEDS_GPU

pytest.importorskip("torch")
pytestmark = NEEDS_GPU

DEVICE = "cuda"
POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {"g": 4},
    "staggered": {"g": 3},
    "fsm": {},
    "aspire": {"cost_ratio": 0.2},
    "goodput": {"cost_ratio": 0.2},
}
# short, long, across pages; long ones alone where graphs are captured: one bucket of lengths
LENGTHS = {"any": (1, 5, 40, 100, 150, 200), "long": (130, 150, 159, 160, 161, 200)}


@cache
def _model(name: str, backend: str) -> Any:
    from aspire.models import load_model
    from aspire_kernels import get_backend

    return load_model(name, "float32", DEVICE, "dummy", ops=get_backend(backend, DEVICE))


def _engine(model: str, backend: str, policy: PolicySpec, **settings: Any) -> Any:
    from aspire import EngineConfig, LLMEngine

    config = EngineConfig(
        model=model,
        load_format="dummy",
        dtype="float32",
        device=DEVICE,
        policy=policy,
        max_num_seqs=4,
        max_model_len=256,
        max_num_batched_tokens=64,
        attention_backend=backend,
        **{"num_pages": 60, "async_scheduling": False, **settings},
    )
    return LLMEngine(config, model=_model(model, backend))


def _generate(engine: Any, lengths: str, **params: Any) -> tuple[dict[str, list[int]], float]:
    """Tokens of each request, and the share of drafts that were accepted."""
    from aspire import SamplingParams

    random = np.random.default_rng(0)
    engine.begin_record()
    for index, length in enumerate(LENGTHS[lengths]):
        sampling = {"temperature": 0.8, "top_k": 20, "top_p": 0.9} if index % 2 else {"temperature": 0.0}
        each = SamplingParams(**{**sampling, "max_tokens": 40, "ignore_eos": True, "seed": index, **params})
        engine.add_request(str(index), random.integers(0, 60, length).tolist(), each)
    found = {}
    while engine.has_unfinished_requests:
        found.update({output.request_id: output.outputs[0].token_ids for output in engine.step()})
    assert engine.scheduler.pages.num_free == engine.scheduler.pages.num_usable
    verify = engine.log.column("mode") == 3
    drafted, accepted = engine.log.column("drafted")[verify], engine.log.column("accepted")[verify]
    return found, float(accepted.sum() / max(1, drafted.sum()))


@cache
def _oracle(model: str, lengths: str) -> dict[str, list[int]]:
    return _generate(_engine(model, "reference", PolicySpec(), enforce_eager=True, num_pages=80), lengths)[0]


def _small(kind: str) -> SelectorSpec:
    return SelectorSpec(kind=kind, min_pages=4, recent=2, budget_ratio=0.1, layers=(1,))


MODES = {
    "eager": ("tiny-llama", "any", {"enforce_eager": True}),
    "graphs": ("tiny-qwen3", "long", {}),
    "graphs-async": ("tiny-qwen3", "long", {"async_scheduling": True}),
}


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *(("eager", kind) for kind in SELECTOR_KINDS),
        *(("graphs", kind) for kind in ("window", "refresh-per-layer")),
        *(("graphs-async", kind) for kind in SELECTOR_KINDS),
    ],
)
def test_text_is_that_of_autoregressive_decoding(mode: str, kind: str) -> None:
    model, lengths, settings = MODES[mode]
    engine = _engine(model, "triton", PolicySpec(selector=_small(kind)), **settings)
    assert {*POLICIES, "autoregressive"} == {*KINDS_OF_POLICY}
    for policy, params in POLICIES.items():
        engine.set_policy(PolicySpec(kind=policy, params=params, selector=_small(kind)))
        found, accepted = _generate(engine, lengths)
        assert found == _oracle(model, lengths), policy
        assert accepted > 0.0, policy
        # both layers of the small model are read in full by delta: nothing can be rejected there
        assert accepted < 1.0 or (mode, kind) == ("eager", "delta"), policy


@pytest.mark.parametrize("mode", MODES)
def test_autoregressive_text_is_that_of_the_reference(mode: str) -> None:
    model, lengths, settings = MODES[mode]
    assert _generate(_engine(model, "triton", PolicySpec(), **settings), lengths)[0] == _oracle(model, lengths)


def test_budget_that_covers_the_context_accepts_everything() -> None:
    engine = _engine("tiny-qwen3", "triton", PolicySpec(), num_pages=80, async_scheduling=True, enforce_eager=True)
    for kind in SELECTOR_KINDS:
        selector = SelectorSpec(kind=kind, min_pages=64, layers=(1,))
        engine.set_policy(PolicySpec(kind="fixed", params={"g": 4}, selector=selector))
        found, accepted = _generate(engine, "long")
        assert found == _oracle("tiny-qwen3", "long") and accepted == 1.0, kind


def test_graphs_are_captured_once_for_a_selector() -> None:
    engine = _engine("tiny-qwen3", "triton", PolicySpec(), async_scheduling=True)
    captured_s = []
    for kind in ("window", "verify", "window"):
        engine.set_policy(PolicySpec(kind="fixed", params={"g": 3}, selector=_small(kind)))
        before = engine.runner.capture_s
        assert _generate(engine, "long")[0] == _oracle("tiny-qwen3", "long")
        captured_s.append(engine.runner.capture_s - before)
    # a draft that rounding decides may bring a step of another size
    assert captured_s[2] < 0.2 * captured_s[0], "graphs of a selector that was in use before are captured again"


@pytest.mark.parametrize("pages", [64, 4])
def test_lossy_decoding_is_that_of_the_reference(pages: int) -> None:
    policy = PolicySpec(selector=SelectorSpec("delta", 0.0, pages, recent=2, layers=(1,)))
    settings = {"decode": "delta", "num_pages": 80}  # ample: a preempted request would be computed again in full
    expected, _ = _generate(_engine("tiny-qwen3", "reference", policy, enforce_eager=True, **settings), "long")
    found, _ = _generate(_engine("tiny-qwen3", "triton", policy, async_scheduling=True, **settings), "long")
    assert found == expected
    assert (found == _oracle("tiny-qwen3", "long")) is (pages == 64)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_logprobs_are_those_of_the_reference(ahead: bool) -> None:
    policy = PolicySpec(kind="fixed", params={"g": 4}, selector=_small("verify-per-layer"))
    outputs = []
    for backend, spec, settings in (
        ("reference", PolicySpec(), {"enforce_eager": True}),
        ("triton", policy, {"async_scheduling": ahead}),
    ):
        from aspire import SamplingParams

        engine = _engine("tiny-qwen3", backend, spec, num_pages=80, **settings)
        random = np.random.default_rng(1)
        for index in range(4):
            params = SamplingParams(temperature=0.7, max_tokens=24, ignore_eos=True, seed=index, logprobs=3)
            engine.add_request(str(index), random.integers(0, 60, 140 + index).tolist(), params)
        found = {}
        while engine.has_unfinished_requests:
            found.update({output.request_id: output.outputs[0] for output in engine.step()})
        outputs.append([found[str(index)] for index in range(4)])
    for want, got in zip(*outputs, strict=True):
        assert got.token_ids == want.token_ids and len(got.logprobs) == 24
        for ours, theirs in zip(got.logprobs, want.logprobs, strict=True):
            assert set(ours) == set(theirs)
            np.testing.assert_allclose([ours[token] for token in theirs], list(theirs.values()), atol=1e-3)
