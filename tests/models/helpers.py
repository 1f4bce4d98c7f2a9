"""Tiny transformers models with random weights, saved as folders, and the two ways to run a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aspire.models import Decoder, DenseAttend

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def make_hf(family: str, **settings: Any) -> Any:
    """A transformers model of ``family`` whose weights, norms and biases are all random, logits of order 1 to 10."""
    fields = {**SHAPE, "sliding_window": None, **settings}
    if family == "qwen2":  # it has no head_dim of its own: hidden size over heads
        fields["hidden_size"] = fields["num_attention_heads"] * fields.pop("head_dim")
    config = getattr(transformers, f"{CLASSES[family]}Config")(**fields)
    model = getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(sum(map(ord, family)) + len(settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
            if "norm" in name:
                parameter.add_(1.0)
    return model


def save_hf(model: Any, folder: Path, *, max_shard_size: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tokens(count: int, vocab_size: int = SHAPE["vocab_size"], seed: int = 0) -> Tensor:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def hf_logits(model: Any, input_ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids[None]).logits[0].float()


def our_logits(model: Decoder, input_ids: Tensor, chunks: tuple[int, ...] = ()) -> Tensor:
    """Logits [tokens, vocab] of one sequence, run in the given chunks (all at once by default)."""
    attend = DenseAttend(model.config, len(input_ids), model.device)
    pieces, begin = [], 0
    for size in chunks or (len(input_ids),):
        positions = torch.arange(begin, begin + size)
        pieces.append(model.forward(input_ids[begin : begin + size], positions, attend))
        begin += size
    return model.logits(torch.cat(pieces))
