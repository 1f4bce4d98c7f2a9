"""GGUF: small files written here in llama.cpp's layout, and the real SmolLM2 against transformers' own loading."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf")
import gguf
import torch

from aspire.errors import ModelError
from aspire.models import Decoder, DenseAttend, LoadedModel, load_model
from aspire.models.gguf_file import _LAYER_NAMES, open_gguf
from aspire.models.weights import allocate_weights, fill, named_views
from tests.models.helpers import hf_logits, make_hf, our_logits, tokens

TEXT = (
    "The lighthouse stood at the end of a long stone pier. Every evening, before the sun went down, the keeper walked "
    "out to light the lamp. In winter the waves broke over the wall, and he had to hold the rope with both hands. "
    "He had done this for thirty years, and in all that time the lamp had never once failed to burn through the night. "
    "When ships passed far out at sea, their captains saw the light and knew that they were safe. One day a boat came."
)


def write_gguf(path: Path, hf: Any, family: str, *, quantize: bool = False, **extra: Any) -> Path:
    """``hf``'s weights as llama.cpp's converter lays them out: q and k rows of the llama family interleaved."""
    config = hf.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    for name, value in extra.items():
        getattr(writer, name)(value)
    short = {long: name for name, long in _LAYER_NAMES.items()}
    for name, tensor in hf.state_dict().items():
        values = tensor.numpy()
        parts = name.split(".")
        if name.startswith("model.layers."):
            kind = short[".".join(parts[3:-1])]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(kind)
            if heads and family == "llama":
                values = values.reshape(heads, 2, head_dim // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
            name = f"blk.{parts[2]}.{kind}.{parts[-1]}"
        elif config.tie_word_embeddings and name == "lm_head.weight":
            continue
        else:
            name = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[-2]] + ".weight"
        values = np.ascontiguousarray(values)
        if quantize and values.ndim == 2:
            quantized = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_small_files_give_transformers_logits(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    reference = make_hf(family, **settings)
    loaded = load_model(write_gguf(tmp_path / "model.gguf", reference, family), "float32")
    assert loaded.config.tie_word_embeddings == settings["tie_word_embeddings"] and loaded.config.eos_token_ids == (2,)
    input_ids = tokens(60)
    assert (our_logits(loaded.model, input_ids) - hf_logits(reference, input_ids)).abs().max() <= 1e-4


def test_quantized_blocks_and_folder_with_one_file(tmp_path: Path) -> None:
    reference = make_hf("llama", hidden_size=64, intermediate_size=96)
    write_gguf(tmp_path / "model.gguf", reference, "llama", quantize=True)
    loaded = load_model(tmp_path, "float32", load_format="gguf")
    assert loaded.tokenizer_source == tmp_path / "model.gguf"
    input_ids = tokens(40)
    exact = hf_logits(reference, input_ids)
    assert (our_logits(loaded.model, input_ids) - exact).abs().mean() < 0.05 * exact.std()


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    reference = make_hf("llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    scaling = {"add_rope_scaling_type": gguf.RopeScalingType.LINEAR, "add_rope_scaling_factor": 2.0}
    loaded = load_model(write_gguf(tmp_path / "model.gguf", reference, "llama", **scaling), "float32")
    input_ids = tokens(60)
    assert (our_logits(loaded.model, input_ids) - hf_logits(reference, input_ids)).abs().max() <= 1e-4


def test_errors_are_one_clear_line(tmp_path: Path) -> None:
    def failure(path: Path, load_format: str = "auto") -> str:
        with pytest.raises(ModelError) as caught:
            load_model(path, load_format=load_format)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
        return str(caught.value)

    reference = make_hf("llama")
    good = write_gguf(tmp_path / "good.gguf", reference, "llama")
    assert "use load format auto or gguf" in failure(good, "safetensors")
    (tmp_path / "cut.gguf").write_bytes(good.read_bytes()[:200])
    assert "not a readable GGUF file" in failure(tmp_path / "cut.gguf")
    (tmp_path / "text.gguf").write_text("not a model, whatever its name says")
    assert "not a readable GGUF file" in failure(tmp_path / "text.gguf")
    assert "GGUF architecture gemma is not supported; supported: llama, qwen2, qwen3" in failure(
        write_gguf(tmp_path / "gemma.gguf", reference, "gemma")
    )
    assert "4 .gguf files" not in failure(tmp_path / "absent.gguf")
    assert "holds 4 .gguf files" in failure(tmp_path)
    reference.model.norm.weight = torch.nn.Parameter(torch.ones(40))
    assert "model.norm.weight is 40 instead of 48" in failure(write_gguf(tmp_path / "odd.gguf", reference, "llama"))


def test_smollm2_equals_transformers(smollm2: LoadedModel, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same tensors as transformers dequantizes and unpermutes from the same file, and the same logits on real text."""
    # transformers parses the file in each call, seconds each time; what it makes of the parsed file stays its own work
    parsed = open_gguf(smollm2_gguf)  # before the patch: the parser derives its reader from the class that is replaced
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: parsed)
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from aspire.tokenizer import load_tokenizer

    config = smollm2.config
    with torch.device("meta"):
        hf_config = transformers.LlamaConfig(**load_gguf_checkpoint(str(smollm2_gguf))["config"])
        reference = transformers.LlamaForCausalLM(hf_config)
    theirs = load_gguf_checkpoint(str(smollm2_gguf), return_tensors=True, model_to_load=reference)["tensors"]
    ours = named_views(config, smollm2.model.weights)
    assert set(theirs) == set(ours)
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    reference = transformers.LlamaForCausalLM(hf_config).eval()
    reference.load_state_dict(theirs, strict=False)
    input_ids = torch.tensor(load_tokenizer(smollm2_gguf).encode(TEXT))
    assert (our_logits(smollm2.model, input_ids) - hf_logits(reference, input_ids)).abs().max() <= 1e-4


def test_smollm2_needs_the_rows_of_q_and_k_in_order(smollm2: LoadedModel, smollm2_gguf: Path) -> None:
    """On real text the loss is that of a language model, and far worse when q and k rows stay as GGUF stores them."""
    from aspire.tokenizer import load_tokenizer

    config, input_ids = smollm2.config, torch.tensor(load_tokenizer(smollm2_gguf).encode(TEXT))
    shuffled = allocate_weights(config, torch.float32, "cpu")
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def as_stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
        count = heads.get(name.split(".")[-2])
        if count is None:
            return tensor
        return tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape_as(tensor)

    views = named_views(config, smollm2.model.weights)
    fill(named_views(config, shuffled), ((name, as_stored(name, view)) for name, view in views.items()))

    def loss(model: Decoder) -> float:
        logits = our_logits(model, input_ids)
        return float(torch.nn.functional.cross_entropy(logits[:-1], input_ids[1:]))

    right, wrong = loss(smollm2.model), loss(Decoder(config, shuffled))
    assert right < 3.2 and wrong > right + 1.0
    assert math.exp(right) < 25


def test_smollm2_continues_a_sentence(smollm2: LoadedModel, smollm2_gguf: Path) -> None:
    from aspire.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2_gguf)
    question = {"role": "user", "content": "What is the capital of France?"}
    prompt = tokenizer.apply_chat_template([question], tokenize=True)
    attend = DenseAttend(smollm2.config, 256)
    input_ids, position, stream, text = torch.tensor(prompt), 0, tokenizer.stream(), ""
    for _ in range(24):
        hidden = smollm2.model.forward(input_ids, torch.arange(position, position + len(input_ids)), attend)
        position += len(input_ids)
        token = int(smollm2.model.logits(hidden[-1:]).argmax())
        if token in smollm2.config.eos_token_ids:
            break
        text += stream.push([token])
        input_ids = torch.tensor([token])
    assert "Paris" in text + stream.finish()
