"""Configurations: both transformers layouts, defaults, presets, and one clear error for each thing not supported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from aspire.errors import ModelError
from aspire.models import PRESETS, ModelConfig, RopeScaling, rope_tables
from aspire.models.rope import inverse_frequencies

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_both_rope_layouts_mean_the_same() -> None:
    old = ModelConfig.from_hf({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}})
    new = ModelConfig.from_hf({**BASE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}})
    assert old == new
    assert old.rope_theta == 5e5 and old.rope_scaling.kind == "llama3" and old.rope_scaling.original_max_positions == 64


def test_defaults_of_what_a_config_leaves_out() -> None:
    config = ModelConfig.from_hf(BASE)
    assert (config.head_dim, config.rope_theta, config.rms_norm_eps) == (8, 10_000.0, 1e-6)
    assert not config.tie_word_embeddings and config.rope_scaling == RopeScaling()
    assert config.eos_token_ids == (2,) and config.bos_token_id is None
    no_kv_heads = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_hf(no_kv_heads).num_kv_heads == 4
    yarn = ModelConfig.from_hf({**BASE, "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}})
    assert yarn.rope_scaling.factor == 4.0


def test_families() -> None:
    qwen2 = ModelConfig.from_hf({**BASE, "architectures": ["Qwen2ForCausalLM"]})
    qwen3 = ModelConfig.from_hf({**BASE, "architectures": ["Qwen3ForCausalLM"]})
    assert qwen2.qkv_bias and not qwen2.output_bias and not qwen2.qk_norm
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim == 128
    by_type = ModelConfig.from_hf({**BASE, "architectures": None, "model_type": "mistral", "sliding_window": None})
    assert by_type.architecture == "mistral"


def test_eos_of_the_generation_config_is_added(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == (2, 7, 9)
    assert ModelConfig.from_hf(tmp_path / "config.json") == ModelConfig.from_hf(tmp_path)


def test_window_that_changes_nothing_is_accepted() -> None:
    mistral = {**BASE, "architectures": ["MistralForCausalLM"]}
    assert ModelConfig.from_hf({**mistral, "sliding_window": 256}).architecture == "mistral"
    qwen = {**BASE, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "use_sliding_window": False}
    assert ModelConfig.from_hf(qwen).architecture == "qwen2"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": ["LlamaForCausalML"]}, ["did you mean 'LlamaForCausalLM'"]),
        ({"architectures": None}, ["not named", "supported: LlamaForCausalLM"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope scaling longrope", "default, linear, llama3, yarn"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope scaling dynamic"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear lacks factor"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ["lacks low_freq_factor, high_freq_factor"]),
        ({"partial_rotary_factor": 0.5}, ["partial rotary"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, ["sliding window", "32", "to null"]),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}, ["sliding window"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_attention", "supported: full_attention"]),
        ({"hidden_act": "gelu"}, ["activation gelu", "silu"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["gptq", "GGUF"]),
        ({"vocab_size": None, "hidden_size": None}, ["lacks vocab_size, hidden_size"]),
        ({"num_hidden_layers": 0}, ["num_layers is 0", "positive"]),
        ({"num_key_value_heads": 3}, ["4 attention heads cannot share 3 KV heads"]),
        ({"head_dim": 7}, ["head_dim is 7", "even"]),
    ],
)
def test_errors_are_one_clear_line(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_hf({**BASE, **change})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_errors_of_config_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="not a JSON object"):
        ModelConfig.from_hf(tmp_path)


def test_presets_are_sound() -> None:
    assert PRESETS["qwen3-8b"].kv_bytes_per_token(2) == 36 * 2 * 8 * 128 * 2
    for config in PRESETS.values():
        frequencies, factor = inverse_frequencies(config)
        assert frequencies.shape == (config.head_dim // 2,) and factor == 1.0


def test_llama3_divisors_equal_the_formula() -> None:
    """GGUF stores llama3 scaling as divisors of the plain frequencies."""
    config = PRESETS["llama-3.1-8b"]
    plain = ModelConfig(**{**vars(config), "rope_scaling": RopeScaling()})
    scaled, _ = inverse_frequencies(config)
    divisors = tuple((inverse_frequencies(plain)[0] / scaled).tolist())
    stored = ModelConfig(**{**vars(config), "rope_scaling": RopeScaling(kind="llama3", divisors=divisors)})
    assert torch.allclose(inverse_frequencies(stored)[0], scaled, rtol=1e-6)
    assert divisors[0] == 1.0 and math.isclose(divisors[-1], 8.0, rel_tol=1e-5)


def test_tables_carry_the_attention_factor() -> None:
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_positions=64)
    config = ModelConfig(**{**vars(PRESETS["tiny-llama"]), "rope_scaling": scaling})
    cos, sin = rope_tables(config, 10)
    assert cos.shape == sin.shape == (10, 8) and cos.dtype == torch.float32
    assert torch.allclose(cos[0], torch.full((8,), 0.1 * math.log(4.0) + 1.0)) and sin[0].abs().max() == 0
