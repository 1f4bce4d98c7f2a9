"""Logits equal transformers' own, for every family, rope kind and head, through files on disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from aspire.models import PRESETS, DenseAttend, load_model
from aspire_kernels.backend import REFERENCE
from tests.models.helpers import hf_logits, make_hf, our_logits, save_hf, tokens

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7}}),
    "llama-yarn-own-factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.3, "truncate": False}}),
    "mistral-untied": ("mistral", {}),
    "mistral-tied-yarn": ("mistral", {"tie_word_embeddings": True, "rope_parameters": {**YARN, "beta_fast": 16}}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied-linear": ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 3.0}}),
    "qwen3-tied-llama3": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "qwen3-untied-yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    reference = make_hf(family, **settings)
    loaded = load_model(save_hf(reference, tmp_path, max_shard_size="30KB"), "float32")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert loaded.config.architecture == family and loaded.tokenizer_source is None and not loaded.synthetic
    input_ids = tokens(100)
    expected = hf_logits(reference, input_ids)
    assert expected.std() > 0.5  # the comparison must have something to compare
    assert (our_logits(loaded.model, input_ids) - expected).abs().max() <= 1e-4


def test_chunks_give_the_same_logits(tmp_path: Path) -> None:
    reference = make_hf("qwen3", rope_parameters=YARN)
    model = load_model(save_hf(reference, tmp_path), "float32").model
    input_ids = tokens(60)
    chunked = our_logits(model, input_ids, chunks=(17, 1, 1, 30, 11))
    assert (chunked - hf_logits(reference, input_ids)).abs().max() <= 1e-4


def test_bfloat16_follows_transformers(tmp_path: Path) -> None:
    reference = make_hf("llama")
    loaded = load_model(save_hf(reference, tmp_path), torch.bfloat16)
    assert loaded.model.dtype == torch.bfloat16
    input_ids = tokens(40)
    ours = our_logits(loaded.model, input_ids)
    assert ours.dtype == torch.float32
    exact = hf_logits(reference, input_ids)
    theirs = hf_logits(reference.to(torch.bfloat16), input_ids)
    assert (ours - exact).abs().mean() <= 1.5 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_folded_norms_are_the_same_function(family: str) -> None:
    model = load_model(f"tiny-{family}", load_format="dummy").model
    for layer in model.weights.layers:
        for norm in (layer.input_norm, layer.mlp_norm):
            assert norm is not None
            norm.uniform_(0.5, 2.0)
    expected = our_logits(model, torch.arange(20))
    for _ in range(2):  # folding twice changes nothing more
        model.fold_norms()
        assert torch.allclose(our_logits(model, torch.arange(20)), expected, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_attend_gets_q_and_k_before_rope(family: str) -> None:
    """Shapes and meaning of what `Attend` is given: with all positions equal, q and k must not depend on them."""
    model = load_model(f"tiny-{family}", load_format="dummy").model
    config, seen = model.config, []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        seen.append((layer, q.clone(), k.clone(), positions))
        assert v.stride(-1) == 1 and q.stride(-1) == 1 and q.stride(-2) == config.head_dim
        return torch.zeros_like(q)

    input_ids = torch.arange(5)
    for positions in (torch.zeros(5, dtype=torch.int32), torch.arange(5, dtype=torch.int32)):
        model.forward(input_ids, positions, attend)
    layers = config.num_layers
    assert [call[0] for call in seen] == list(range(layers)) * 2
    assert seen[0][1].shape == (5, config.num_heads, config.head_dim)
    assert seen[0][2].shape == (5, config.num_kv_heads, config.head_dim)
    assert torch.equal(seen[0][1], seen[layers][1]) and torch.equal(seen[0][2], seen[layers][2])


def test_no_tokens_give_no_rows() -> None:
    model = load_model("tiny-qwen3", load_format="dummy").model
    nothing = torch.zeros(0, dtype=torch.int64)
    assert our_logits(model, nothing).shape == (0, model.config.vocab_size)


def test_qk_norm_may_be_left_to_attend() -> None:
    model = load_model("tiny-qwen3", load_format="dummy").model
    input_ids = torch.arange(20)
    expected = our_logits(model, input_ids)
    plain = DenseAttend(model.config, 32)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        weights, eps = model.weights.layers[layer], model.config.rms_norm_eps
        q = REFERENCE.rms_norm(q, weights.q_norm, eps)
        k = REFERENCE.rms_norm(k, weights.k_norm, eps)
        return plain(layer, q, k, v, positions)

    model.qk_norm_in_attend = True
    assert torch.allclose(model.logits(model.forward(input_ids, input_ids, attend)), expected, atol=1e-5)


def test_operations_come_from_ops() -> None:
    calls: list[str] = []

    def counted(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return getattr(REFERENCE, name)(*arguments)

        return call

    names = ("rms_norm", "add_rms_norm", "norm_linear", "norm_gated", "linear_add")
    ops = SimpleNamespace(**{name: counted(name) for name in names})
    model = load_model("tiny-llama", load_format="dummy", ops=ops).model
    our_logits(model, torch.arange(4))
    layers = model.config.num_layers
    assert [calls.count(name) for name in names] == [0, 1, layers, layers, 2 * layers]


@pytest.mark.gpu
@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("tiny")])
def test_forward_can_be_captured_in_a_graph(preset: str) -> None:
    model = load_model(preset, torch.bfloat16, "cuda", "dummy").model
    input_ids = torch.arange(8, device="cuda")

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return q * v.mean(dim=(1, 2))[:, None, None]

    expected = model.logits(model.forward(input_ids, input_ids, attend))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model.logits(model.forward(input_ids, input_ids, attend))
    graph.replay()
    assert out.dtype == torch.float32 and torch.equal(out, expected)
