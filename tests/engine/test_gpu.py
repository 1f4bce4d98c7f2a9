"""On a GPU: every selector and policy gives the text of autoregressive decoding, eagerly and from CUDA graphs.

Float32, so that equality is exact: the oracle is the torch reference back end without graphs.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from aspire.scheduler import SELECTOR_KINDS, PolicySpec, SelectorSpec

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

POLICIES = {
    "autoregressive": {},
    "fixed": {"g": 4},
    "staggered": {"g": 3},
    "aspire": {"cost_ratio": 0.2},
    "goodput": {"cost_ratio": 0.2},
}
SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.8, "top_k": 20, "top_p": 0.9}}


@cache
def _model(name: str, backend: str):  # noqa: ANN202  (torch types are imported lazily)
    from aspire.models import load_model
    from aspire_kernels import get_backend

    return load_model(name, "float32", "cuda", "dummy", ops=get_backend(backend, "cuda"))


def _generate(model: str, backend: str, policy: PolicySpec, sampling: dict[str, float], *, eager: bool, pages: int):
    """Tokens of each request, and the share of drafts that were accepted."""
    from aspire import EngineConfig, LLMEngine, SamplingParams

    config = EngineConfig(
        model=model,
        load_format="dummy",
        dtype="float32",
        policy=policy,
        max_num_seqs=4,
        max_model_len=256,
        max_num_batched_tokens=64,
        num_pages=pages,
        attention_backend=backend,
        enforce_eager=eager,
    )
    engine = LLMEngine(config, model=_model(model, backend))
    random = np.random.default_rng(0)
    params = SamplingParams(**{"temperature": 0.0, **sampling}, max_tokens=40, ignore_eos=True)
    for index, length in enumerate((1, 5, 40, 100, 150, 200)):
        engine.add_request(str(index), random.integers(0, 60, length).tolist(), params)
    found = {}
    while engine.has_unfinished_requests:
        found.update({output.request_id: output.outputs[0].token_ids for output in engine.step()})
    assert engine.scheduler.pages.num_free == engine.scheduler.pages.num_usable
    verify = engine.log.column("mode") == 3
    drafted, accepted = engine.log.column("drafted")[verify], engine.log.column("accepted")[verify]
    return found, float(accepted.sum() / max(1, drafted.sum()))


@cache
def _oracle(model: str, sampling: str) -> dict[str, list[int]]:
    return _generate(model, "reference", PolicySpec(), SAMPLING[sampling], eager=True, pages=80)[0]


@pytest.mark.parametrize("sampling", sorted(SAMPLING))
@pytest.mark.parametrize("kind", SELECTOR_KINDS)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_text_is_that_of_autoregressive_decoding(eager: bool, kind: str, sampling: str) -> None:
    for model in ("tiny-llama", "tiny-qwen3"):
        for policy, params in POLICIES.items():
            selector = SelectorSpec(kind=kind, min_pages=4, recent=2, budget_ratio=0.1, layers=(1,))
            spec = PolicySpec(kind=policy, params=params, selector=selector)
            found, _ = _generate(model, "triton", spec, SAMPLING[sampling], eager=eager, pages=60)
            assert found == _oracle(model, sampling), (model, policy)


@pytest.mark.parametrize("kind", SELECTOR_KINDS)
def test_budget_that_covers_the_context_accepts_everything(kind: str) -> None:
    spec = PolicySpec(kind="fixed", params={"g": 4}, selector=SelectorSpec(kind=kind, min_pages=64, layers=(1,)))
    found, accepted = _generate("tiny-llama", "triton", spec, SAMPLING["sampled"], eager=False, pages=80)
    assert found == _oracle("tiny-llama", "sampled")
    assert accepted == 1.0
