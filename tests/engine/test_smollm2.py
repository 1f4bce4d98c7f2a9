"""The real SmolLM2 in float32: greedy text equals transformers' `generate` under every policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf")
import torch

from aspire.engine.config import EngineConfig
from aspire.engine.llm_engine import LLMEngine
from aspire.models import LoadedModel
from aspire.models.weights import named_views
from aspire.sampling_params import SamplingParams
from aspire.scheduler import Mode, PolicySpec, SelectorSpec
from tests.invariants.harness import drive

PROMPTS = [
    "The capital of France is Paris, the capital of Italy is Rome, and the capital of Spain is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "Question: What is 12 + 30? Answer: 42. Question: What is 7 + 8? Answer:",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain the air is thinner, so water boils at a lower "
    "temperature, and food that is cooked in it needs more time. That is why people who live high in the mountains",
]
TOKENS = 24
SMALL = {"budget_ratio": 0.0, "min_pages": 2, "sinks": 1, "recent": 1}


@pytest.fixture(scope="module")
def expected(smollm2: LoadedModel) -> tuple[list[list[int]], list[list[int]]]:
    """``(prompt tokens, greedy outputs of transformers)``: its own model code on the same weights."""
    transformers = pytest.importorskip("transformers")
    from aspire.tokenizer import load_tokenizer

    shape = smollm2.config
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        tie_word_embeddings=shape.tie_word_embeddings,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").float().eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its tables are no weights: make them anew
    model.load_state_dict(named_views(shape, smollm2.model.weights), strict=False)
    model.tie_weights()
    assert smollm2.tokenizer_source is not None
    tokenizer = load_tokenizer(smollm2.tokenizer_source)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    width = max(len(prompt) for prompt in prompts)
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made: Any = model.generate(
        padded, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return prompts, made[:, width:].tolist()


@pytest.mark.parametrize(
    "policy",
    [
        PolicySpec("fixed", {"g": 4}, SelectorSpec("verify", **SMALL)),
        PolicySpec("aspire", {"cost_ratio": 0.2}, SelectorSpec("refresh", **SMALL)),
    ],
    ids=lambda policy: policy.label,
)
def test_greedy_output_equals_transformers(
    policy: PolicySpec, smollm2: LoadedModel, expected: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompts, outputs = expected
    config = EngineConfig(device="cpu", policy=policy, max_num_seqs=5, max_num_batched_tokens=64, max_model_len=128)
    engine = LLMEngine(config, model=smollm2)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
    run = drive(engine)
    assert [run.outputs[str(index)].outputs[0].token_ids for index in range(len(prompts))] == outputs
    for index, text in enumerate(PROMPTS):
        assert run.outputs[str(index)].outputs[0].text == engine.tokenizer.decode(outputs[index]), text
    verify = engine.log.column("mode") == Mode.VERIFY
    drafted, accepted = (int(engine.log.column(name)[verify].sum()) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted, "some drafts must be right, some wrong"


def test_the_fixture_is_the_model_it_says(smollm2: LoadedModel, smollm2_gguf: Path) -> None:
    assert smollm2.config.num_layers == 30 and smollm2.tokenizer_source == smollm2_gguf and not smollm2.synthetic
