"""GGUF files: config and weights, dequantized. The package ``gguf`` is imported when first needed.

llama.cpp stores the rows of q and k of the llama architecture interleaved (its rotary embedding pairs element 2i with
2i + 1); Hugging Face pairs i with i + head_dim / 2. `_unpermute` restores the latter order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from aspire.errors import ModelError
from aspire.models.config import ModelConfig, RopeScaling
from aspire.models.decoder import DecoderWeights
from aspire.models.weights import allocate_weights, check_tensors, fill, named_views

if TYPE_CHECKING:
    from gguf import GGUFReader

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral models are stored as llama

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"


def open_gguf(path: Path) -> GGUFReader:
    """Open a GGUF file; raises `ModelError` when it is absent, broken, or the package ``gguf`` is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ModelError("reading .gguf files needs the package gguf; install it with: pip install gguf") from error
    if not path.is_file():
        raise ModelError(f"GGUF file {path} does not exist; check the path")
    try:
        return _parse(path, path.stat().st_mtime_ns)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ModelError(f"{path} is not a readable GGUF file ({error}); download it again") from error


@lru_cache(maxsize=1)  # config, weights and tokenizer read the same file one after the other
def _parse(path: Path, _mtime_ns: int) -> GGUFReader:
    from gguf import GGUFReader

    class PlainReader(GGUFReader):
        """The package slices a numpy memmap for each string; a plain view of the mapping is three times faster."""

        @property  # type: ignore[override]
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._plain = np.asarray(mapped)

    return PlainReader(str(path))


def metadata(reader: GGUFReader, key: str, default: Any = None) -> Any:
    """Value of a metadata key as Python data, or ``default`` when the file has no such key."""
    found = reader.get_field(key)
    return default if found is None else found.contents()


def read_config(reader: GGUFReader, path: Path) -> ModelConfig:
    """The model config that the metadata and the tensor list describe. Raises `ModelError`."""
    family = metadata(reader, "general.architecture")
    if family not in ARCHITECTURES:
        raise ModelError(f"{path}: GGUF architecture {family} is not supported; supported: {', '.join(ARCHITECTURES)}")
    if metadata(reader, f"{family}.expert_count", 0):
        raise ModelError(f"{path}: mixture-of-experts models are not supported; supported: dense models")

    def required(key: str) -> Any:
        value = metadata(reader, f"{family}.{key}")
        if value is None:
            raise ModelError(f"{path} lacks the metadata {family}.{key}; convert the model to GGUF again")
        return value

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path} lacks the tensor token_embd.weight; download the file again")
    heads, hidden = required("attention.head_count"), required("embedding_length")
    head_dim = metadata(reader, f"{family}.attention.key_length") or hidden // heads
    if metadata(reader, f"{family}.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{path}: a partial rotary embedding is not supported; supported: rope over the whole head")
    eos = metadata(reader, "tokenizer.ggml.eos_token_id")
    eot = metadata(reader, "tokenizer.ggml.eot_token_id")
    return ModelConfig(
        architecture=family,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=hidden,
        intermediate_size=required("feed_forward_length"),
        num_layers=required("block_count"),
        num_heads=heads,
        num_kv_heads=metadata(reader, f"{family}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=required("context_length"),
        rms_norm_eps=float(required("attention.layer_norm_rms_epsilon")),
        rope_theta=float(metadata(reader, f"{family}.rope.freq_base", 10_000.0)),
        rope_scaling=_rope_scaling(reader, family, path, tensors),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        bos_token_id=metadata(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(token for token in (eos, eot) if token is not None)),
    )


def load_weights(
    reader: GGUFReader, path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> DecoderWeights:
    """Dequantized weights in the Hugging Face row order, cast to ``dtype``. Raises `ModelError`."""
    found = {_hf_name(tensor.name): tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    found.pop(_ROPE_DIVISORS, None)
    check_tensors(config, found, str(path))
    weights = allocate_weights(config, dtype, device)
    fill(named_views(config, weights), _dequantized(reader, config))
    return weights


def _dequantized(reader: GGUFReader, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, float32 tensor) one by one, q and k rows back in Hugging Face order."""
    from gguf.quants import dequantize

    permuted = config.architecture == "llama"
    permuted_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if permuted else {}
    for tensor in reader.tensors:
        if tensor.name == _ROPE_DIVISORS:
            continue
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        heads = permuted_heads.get(tensor.name.split(".")[-2])
        yield _hf_name(tensor.name), torch.from_numpy(_unpermute(values, heads) if heads else values.copy())


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, ...] from interleaved order (0, h/2, 1, h/2 + 1, ...) to halves (0, 1, ..., h/2, ...)."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; an unknown name is returned as it is (and then reported as extra)."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[parts[0]]}.{parts[1]}"
    return name


def _rope_scaling(reader: GGUFReader, family: str, path: Path, tensors: dict[str, Any]) -> RopeScaling:
    if _ROPE_DIVISORS in tensors:  # llama3 scaling is stored as one divisor for each frequency
        divisors = tuple(float(value) for value in tensors[_ROPE_DIVISORS].data.reshape(-1))
        return RopeScaling(kind="llama3", divisors=divisors)
    kind = metadata(reader, f"{family}.rope.scaling.type", "none")
    factor = float(metadata(reader, f"{family}.rope.scaling.factor", 1.0))
    if kind == "none":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "yarn":
        original = metadata(reader, f"{family}.rope.scaling.original_context_length")
        if original is None:
            raise ModelError(f"{path}: yarn scaling lacks {family}.rope.scaling.original_context_length")
        return RopeScaling(kind="yarn", factor=factor, original_max_positions=int(original))
    raise ModelError(f"{path}: rope scaling {kind} is not supported; supported: none, linear, yarn")
