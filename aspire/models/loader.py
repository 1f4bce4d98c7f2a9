"""From a name to a model that runs: aliases and presets, local folders, GGUF files, hub ids."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from aspire.errors import ModelError, check_choice, did_you_mean
from aspire.models import embedded, gguf_file
from aspire.models.config import ModelConfig
from aspire.models.decoder import Decoder, DecoderWeights, Ops
from aspire.models.presets import PRESETS
from aspire.models.weights import load_safetensors, random_weights
from aspire_kernels.backend import REFERENCE

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A decoder with its weights, and where its tokenizer comes from."""

    name: str
    config: ModelConfig
    model: Decoder
    tokenizer_source: Path | None  # a Hugging Face folder or a .gguf file; None when there is none
    synthetic: bool  # True: random weights; text and acceptance mean nothing


@dataclass(frozen=True)
class ModelSource:
    """Where a model was found: ``path`` is a folder or a .gguf file; None for a preset, which is only a shape."""

    config: ModelConfig
    path: Path | None
    tokenizer_source: Path | None


def load_model(
    name_or_path: str | Path,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    *,
    seed: int = 0,
    ops: Ops = REFERENCE,
) -> LoadedModel:
    """Load a model by alias (``smollm2-135m``), preset (dummy only), folder, .gguf file or hub id.

    ``dtype`` auto is bfloat16 on CUDA and float32 on the CPU. ``load_format``: auto (what the files are), safetensors,
    gguf, or dummy: random weights from ``seed``, for which only a config is needed. Raises `ModelError`, `UsageError`.
    """
    check_choice("load format", load_format, LOAD_FORMATS)
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {device} was asked for but torch sees no CUDA GPU; use device cpu")
    chosen = resolve_dtype(dtype, device)
    source = find_model(name_or_path, load_format)
    try:
        weights = _load_weights(source, chosen, device, load_format, seed)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the weights of {name_or_path} do not fit in the memory of {device}; "
            "use a smaller model, dtype bfloat16, or a GPU with more free memory"
        ) from error
    decoder = Decoder(source.config, weights, ops)
    return LoadedModel(str(name_or_path), source.config, decoder, source.tokenizer_source, load_format == "dummy")


def resolve_dtype(dtype: torch.dtype | str, device: torch.device | str) -> torch.dtype:
    """torch dtype for a name or dtype; ``auto`` is bfloat16 on CUDA, float32 elsewhere."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    check_choice("dtype", dtype, ("auto", *_DTYPES))
    if dtype == "auto":
        return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    return _DTYPES[dtype]


def find_model(name_or_path: str | Path, load_format: str = "auto") -> ModelSource:
    """Find (and if need be download) a model and read its config, without loading weights. Raises `ModelError`."""
    name = str(name_or_path)
    dummy = load_format == "dummy"
    if name == embedded.NAME:
        file = embedded.find_local() if dummy else embedded.fetch()
        return ModelSource(PRESETS[name], None, file) if dummy else _from_path(file or Path(), load_format)
    if name in PRESETS:
        if not dummy:
            raise ModelError(
                f"'{name}' names a shape without weights; use load format dummy for random weights, "
                "or give a folder, a .gguf file or a hub id that has weights"
            )
        return ModelSource(PRESETS[name], None, None)
    path = Path(name).expanduser()
    if path.exists():
        return _from_path(path, load_format)
    if _HUB_ID.fullmatch(name):
        return _from_path(download(name, config_only=dummy), load_format)
    raise ModelError(
        f"model '{name}' is neither a file nor a folder{did_you_mean(name, PRESETS)}; "
        f"give a path, a hub id (owner/name) or one of {', '.join(sorted(PRESETS))}"
    )


def _from_path(path: Path, load_format: str) -> ModelSource:
    """Read the config of a .gguf file, of a folder with config.json, or of a folder with one .gguf file."""
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        use_gguf = load_format == "gguf" or (load_format != "safetensors" and not (path / "config.json").is_file())
        if use_gguf and len(ggufs) == 1:
            path = ggufs[0]
        elif use_gguf:
            raise ModelError(
                f"{path} holds {len(ggufs)} .gguf files and {'a' if (path / 'config.json').is_file() else 'no'} "
                "config.json; give a folder with config.json and .safetensors files, or one .gguf file"
            )
    if path.is_dir():
        has_tokenizer = any((path / name).is_file() for name in _TOKENIZER_FILES)
        return ModelSource(ModelConfig.from_hf(path), path, path if has_tokenizer else None)
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is not a .gguf file; give a .gguf file or a folder with config.json and .safetensors")
    if load_format == "safetensors":
        raise ModelError(f"{path} is a GGUF file; use load format auto or gguf")
    return ModelSource(gguf_file.read_config(gguf_file.open_gguf(path), path), path, path)


def _load_weights(
    source: ModelSource, dtype: torch.dtype, device: torch.device, load_format: str, seed: int
) -> DecoderWeights:
    if load_format == "dummy" or source.path is None:
        return random_weights(source.config, dtype, device, seed)
    if source.path.is_dir():
        return load_safetensors(source.path, source.config, dtype, device)
    return gguf_file.load_weights(gguf_file.open_gguf(source.path), source.path, source.config, dtype, device)


def download(hub_id: str, *, config_only: bool) -> Path:
    """Folder of a hub model's files (``config_only``: no weights), cached or downloaded. Raises `ModelError`."""
    if not _HUB_ID.fullmatch(hub_id):
        raise ModelError(f"'{hub_id}' is neither an existing path nor a hub id (owner/name); check the path")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(f"'{hub_id}' needs huggingface_hub; install it with: pip install huggingface_hub") from error
    patterns = _HUB_FILES[2:] if config_only else _HUB_FILES
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many unrelated types; each means the model is not to be had
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"cannot download '{hub_id}' ({reason}); check the name and the connection, or give a local folder"
        ) from error
