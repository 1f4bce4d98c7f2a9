"""Weights of a decoder: allocation, Hugging Face names as views of the fused tensors, safetensors folders, random."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aspire.errors import InputError, ModelError
from aspire.fileio import read_json
from aspire.models.config import ModelConfig
from aspire.models.decoder import DecoderWeights, LayerWeights

# Older checkpoints store tables that follow from the config
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "masked_bias")


def allocate_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> DecoderWeights:
    """Uninitialised tensors of every weight of ``config``."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    qkv_size = config.q_size + 2 * config.kv_size
    layers = [
        LayerWeights(
            input_norm=new(config.hidden_size),
            qkv=new(qkv_size, config.hidden_size),
            qkv_bias=new(qkv_size) if config.qkv_bias else None,
            q_norm=new(config.head_dim) if config.qk_norm else None,
            k_norm=new(config.head_dim) if config.qk_norm else None,
            output=new(config.hidden_size, config.q_size),
            output_bias=new(config.hidden_size) if config.output_bias else None,
            mlp_norm=new(config.hidden_size),
            gate_up=new(2 * config.intermediate_size, config.hidden_size),
            down=new(config.hidden_size, config.intermediate_size),
        )
        for _ in range(config.num_layers)
    ]
    embed = new(config.vocab_size, config.hidden_size)
    lm_head = embed if config.tie_word_embeddings else new(config.vocab_size, config.hidden_size)
    return DecoderWeights(embed=embed, layers=layers, norm=new(config.hidden_size), lm_head=lm_head)


def named_views(config: ModelConfig, weights: DecoderWeights) -> dict[str, Tensor]:
    """Hugging Face tensor name -> view of the (fused) tensor that holds it. Writing to a view fills the model."""
    views = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.norm}
    if not config.tie_word_embeddings:
        views["lm_head.weight"] = weights.lm_head
    qkv_sizes = (config.q_size, config.kv_size, config.kv_size)
    for index, layer in enumerate(weights.layers):
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        views[f"model.layers.{index}.input_layernorm.weight"] = layer.input_norm
        views[f"model.layers.{index}.post_attention_layernorm.weight"] = layer.mlp_norm
        for name, part in zip("qkv", layer.qkv.split(qkv_sizes), strict=True):
            views[f"{attention}{name}_proj.weight"] = part
        if layer.qkv_bias is not None:
            for name, part in zip("qkv", layer.qkv_bias.split(qkv_sizes), strict=True):
                views[f"{attention}{name}_proj.bias"] = part
        if layer.q_norm is not None and layer.k_norm is not None:
            views[f"{attention}q_norm.weight"] = layer.q_norm
            views[f"{attention}k_norm.weight"] = layer.k_norm
        views[f"{attention}o_proj.weight"] = layer.output
        if layer.output_bias is not None:
            views[f"{attention}o_proj.bias"] = layer.output_bias
        for name, part in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):
            views[f"{mlp}{name}_proj.weight"] = part
        views[f"{mlp}down_proj.weight"] = layer.down
    return views


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor name -> shape, for every tensor that ``config`` needs."""
    skeleton = allocate_weights(config, torch.float32, "meta")
    return {name: tuple(view.shape) for name, view in named_views(config, skeleton).items()}


def check_tensors(config: ModelConfig, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise one `ModelError` naming the tensors of ``found`` (name -> shape) that are missing, extra or misshapen."""
    expected = expected_shapes(config)
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing = sorted(set(expected) - set(found))
    extra = sorted(name for name in set(found) - set(expected) - ignored if not name.endswith(_DERIVED_SUFFIXES))
    misshapen = [
        f"{name} is {_shape(found[name])} instead of {_shape(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = [
        f"{count_and_list(names)} {label}"
        for names, label in ((missing, "missing"), (extra, "not part of the model"), (misshapen, ""))
        if names
    ]
    if problems:
        raise ModelError(
            f"weights in {where} do not fit the config: {'; '.join(problem.strip() for problem in problems)}. "
            "Use the config.json that belongs to these weights, or download the files again"
        )


def count_and_list(names: list[str], limit: int = 4) -> str:
    """``3 tensors (a, b, c)``; at most ``limit`` are named."""
    shown = ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
    return f"{len(names)} tensor{'s' if len(names) != 1 else ''} ({shown})"


def load_safetensors(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> DecoderWeights:
    """Weights from the .safetensors files of a Hugging Face ``folder``, cast to ``dtype``.

    Names and shapes of all files are checked before anything is allocated. Raises `ModelError`.
    """
    files = safetensors_files(folder)
    found: dict[str, tuple[int, ...]] = {}
    coded: list[str] = []
    try:
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                names = list(tensors.keys())
                if twice := sorted(set(names) & set(found)):
                    raise ModelError(
                        f"{count_and_list(twice)} of {file} in another file of {folder}, too; "
                        "remove the files that do not belong to the model"
                    )
                slices = {name: tensors.get_slice(name) for name in names}
                found.update({name: tuple(part.get_shape()) for name, part in slices.items()})
                coded += [name for name, part in slices.items() if part.get_dtype() not in _PLAIN_DTYPES]
        if coded:
            raise ModelError(
                f"{count_and_list(sorted(coded))} in {folder} of another dtype than float32, float16 or bfloat16; "
                "give weights that are not quantized"
            )
        check_tensors(config, found, str(folder))
        weights = allocate_weights(config, dtype, device)
        views = named_views(config, weights)
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                fill(views, ((name, tensors.get_tensor(name)) for name in tensors.keys() if name in views))  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read the weights in {folder}: {error}; download the files again") from error
    return weights


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of ``folder``: those of model.safetensors.index.json if there is one, else all *.safetensors."""
    index_file = folder / "model.safetensors.index.json"
    if index_file.is_file():
        try:
            names = sorted(set(read_json(index_file, "weight index")["weight_map"].values()))
        except (InputError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"weight index {index_file} cannot be used ({error}); download it again") from error
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise ModelError(f"{folder} lacks the weight files {', '.join(absent)}; download them again")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{folder} holds no .safetensors file; give a folder with safetensors weights, a .gguf file, "
            "or use load format dummy for random weights"
        )
    return files


def fill(views: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy (name, tensor) pairs into the views of those names, cast to the views' dtype and device."""
    for name, tensor in tensors:
        views[name].copy_(tensor)


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> DecoderWeights:
    """Seeded random weights made on ``device``: norms 1, biases small, matrices with variance 1 / input width.

    Hidden states and logits then have a spread of about 1 at any depth. CPU and CUDA draw different numbers.
    """
    weights = allocate_weights(config, dtype, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
            matrix.normal_(0.0, matrix.shape[1] ** -0.5, generator=generator)
        for bias in (layer.qkv_bias, layer.output_bias):
            if bias is not None:
                bias.normal_(0.0, 0.1, generator=generator)
        for norm in (layer.input_norm, layer.q_norm, layer.k_norm, layer.mlp_norm):
            if norm is not None:
                norm.fill_(1.0)
    weights.norm.fill_(1.0)
    weights.embed.normal_(0.0, config.hidden_size**-0.5, generator=generator)
    if weights.lm_head is not weights.embed:
        weights.lm_head.normal_(0.0, config.hidden_size**-0.5, generator=generator)
    return weights


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)
