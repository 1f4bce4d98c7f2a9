"""What a model is: one frozen `ModelConfig`, read from a Hugging Face configuration (`presets` has shapes by name)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aspire.errors import InputError, ModelError, did_you_mean
from aspire.fileio import read_json

ROPE_KINDS = ("default", "linear", "llama3", "yarn")

# Hugging Face class name -> family, and what each family leaves out of config.json because it is its default
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; fields that a kind does not use keep their defaults.

    ``divisors`` (kind llama3 only) replaces the formula by explicit divisors, one a frequency, as GGUF files have it.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one decoder-only model."""

    architecture: str  # llama | mistral | qwen2 | qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"model config: {name} is {value!r}; it must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model config: {self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads; "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise ModelError(f"model config: head_dim is {self.head_dim}; rotary embedding needs an even number")

    @property
    def q_size(self) -> int:
        """Width of the query projection: heads x head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (or value) projection: KV heads x head_dim."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V that one token keeps over all layers."""
        return 2 * self.num_layers * self.kv_size * element_bytes

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> ModelConfig:
        """Read a Hugging Face configuration: a mapping, a config.json, or the folder that holds one.

        Both layouts are read: ``rope_theta`` + ``rope_scaling``, and ``rope_parameters`` (transformers 5). The
        end-of-sequence ids of a generation_config.json beside it are added. Raises `ModelError` for all unsupported.
        """
        if isinstance(source, Mapping):
            return _from_mapping(source, "model config")
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        try:
            raw = read_json(file, "model config")
        except InputError as error:
            raise ModelError(str(error)) from error
        if not isinstance(raw, dict):
            raise ModelError(f"model config {file} is not a JSON object; it should be a Hugging Face config.json")
        generation = file.parent / "generation_config.json"
        if generation.is_file():
            raw = {**raw, "eos_token_id": _merge_eos(raw.get("eos_token_id"), generation)}
        return _from_mapping(raw, f"model config {file}")


def _from_mapping(given: Mapping[str, Any], what: str) -> ModelConfig:
    family = _family(given, what)
    raw = {**_FAMILY_DEFAULTS[family], **{key: value for key, value in given.items() if value is not None}}
    if "sliding_window" in given:  # an explicit null means "no window", also where the family's default is one
        raw["sliding_window"] = given["sliding_window"]
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [key for key in required if key not in raw]
    if missing:
        raise ModelError(f"{what} lacks {', '.join(missing)}; use the config.json that belongs to the weights")
    _refuse_unsupported(raw, family, what)
    heads = raw["num_attention_heads"]
    theta, scaling = _rope(raw, what)
    attention_bias = bool(raw.get("attention_bias", False))
    eos = raw.get("eos_token_id", ())
    return ModelConfig(
        architecture=family,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads", heads),
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_position_embeddings=raw["max_position_embeddings"],
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and attention_bias),
        output_bias=family in ("llama", "qwen3") and attention_bias,
        qk_norm=family == "qwen3",
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
    )


def _family(given: Mapping[str, Any], what: str) -> str:
    names = given.get("architectures") or []
    name = names[0] if names else None
    if name is None and given.get("model_type") in FAMILIES.values():
        return str(given["model_type"])
    if name in FAMILIES:
        return FAMILIES[name]
    shown = name or given.get("model_type") or "not named"
    raise ModelError(
        f"{what}: architecture {shown} is not supported{did_you_mean(str(shown), FAMILIES)}; "
        f"supported: {', '.join(sorted(FAMILIES))}"
    )


def _refuse_unsupported(raw: Mapping[str, Any], family: str, what: str) -> None:
    """Raise for every setting that would change the computation and that the decoder does not implement."""
    window = raw.get("sliding_window")
    windowed = bool(raw.get("use_sliding_window")) if family.startswith("qwen") else family == "mistral"
    if windowed and window is not None and window < raw["max_position_embeddings"]:
        raise ModelError(
            f"{what}: sliding window attention ({window} tokens) is not supported; supported: full attention. "
            f"For contexts that fit the window, set in config.json sliding_window to null and max_position_embeddings "
            f"to {window}"
        )
    other_layers = sorted({str(kind) for kind in raw.get("layer_types", ())} - {"full_attention"})
    if other_layers:
        raise ModelError(f"{what}: layer type {', '.join(other_layers)} is not supported; supported: full_attention")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{what}: activation {raw['hidden_act']} is not supported; supported: silu")
    if raw.get("mlp_bias"):
        raise ModelError(f"{what}: mlp_bias true is not supported; supported: MLP layers without bias")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ModelError(
            f"{what}: quantized weights ({method}) are not supported; supported: float32, float16, bfloat16 "
            "safetensors, and GGUF files"
        )


def _rope(raw: Mapping[str, Any], what: str) -> tuple[float, RopeScaling]:
    """(theta, scaling) from ``rope_parameters`` or from the older ``rope_theta`` and ``rope_scaling``."""
    given: dict[str, Any] = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelError(f"{what}: rope scaling {kind} is not supported; supported: {', '.join(ROPE_KINDS)}")
    theta = float(given.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    if (given.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"{what}: a partial rotary embedding is not supported; supported: partial_rotary_factor 1")
    if kind == "default":
        return theta, RopeScaling()
    original = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    original = original or raw["max_position_embeddings"]
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ()}[kind]
    missing = [key for key in needed if given.get(key) is None]
    if missing:
        raise ModelError(f"{what}: rope scaling {kind} lacks {', '.join(missing)}; use the model's own config.json")
    names = ["low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"]
    names += ["attention_factor", "mscale", "mscale_all_dim"]
    optional: dict[str, Any] = {name: float(given[name]) for name in names if given.get(name)}
    scaling = RopeScaling(
        kind=kind,
        factor=float(given.get("factor") or raw["max_position_embeddings"] / original),
        original_max_positions=int(original),
        truncate=bool(given.get("truncate", True)),
        **optional,
    )
    return theta, scaling


def _merge_eos(own: Any, generation_file: Path) -> list[int]:
    """End-of-sequence ids of config.json and generation_config.json, the former first, each once."""
    extra = read_json(generation_file, "generation config")
    ids: list[int] = []
    for value in (own, extra.get("eos_token_id") if isinstance(extra, dict) else None):
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and token not in ids:
                ids.append(token)
    return ids
