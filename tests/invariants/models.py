"""Tiny random models, built once per process, and a tokenizer whose tokens are short strings that run together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from aspire.models import PRESETS, Decoder, LoadedModel, ModelConfig
from aspire.models.weights import allocate_weights, named_views, random_weights
from aspire_kernels.backend import REFERENCE

CONFIGS: dict[str, ModelConfig] = {
    "llama": PRESETS["tiny-llama"],
    "qwen2": PRESETS["tiny-qwen2"],
    "qwen3": PRESETS["tiny-qwen3"],  # 4 layers: the refresh layer and delta's selection layers are not the last ones
    # more than 256 tokens: sampling with a small top-k takes its own path; two tokens end a text
    "wide": replace(PRESETS["tiny-mistral"], num_layers=3, vocab_size=320, eos_token_ids=(2, 7)),
    # few enough tokens for exact distributions
    "dice": replace(PRESETS["tiny-llama"], vocab_size=12, num_layers=2, eos_token_ids=(0,)),
}


@cache
def tiny_model(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A random model of `CONFIGS`; the same weights in every process, on every device, rounded to ``dtype``."""
    config = CONFIGS[name]
    weights = random_weights(config, torch.float32, "cpu", seed=sum(map(ord, name)))
    if device != "cpu" or dtype != torch.float32:
        source, weights = weights, allocate_weights(config, dtype, device)
        fill_from = named_views(config, source)
        for key, view in named_views(config, weights).items():
            view.copy_(fill_from[key])
    return LoadedModel(name, config, Decoder(config, weights, REFERENCE), Path("letters"), synthetic=True)


class LetterStream:
    """Text stream of `LetterTokenizer`: every token is certain at once."""

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(LETTERS[token % len(LETTERS)] for token in token_ids)

    def finish(self) -> str:
        return ""


class LetterTokenizer:
    """Token t spells ``LETTERS[t % 8]``, so stop strings often span tokens and begin inside one."""

    def encode(self, text: str, **_options: Any) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def stream(self, **_options: Any) -> LetterStream:
        return LetterStream()


LETTERS = ("a", "b", "c", "ab", "bc", "ca", "", "abc")
