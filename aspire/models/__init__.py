"""Models: one config-driven decoder, its weights and where they come from.

load_model       name, folder, .gguf file or hub id -> LoadedModel          loader.py
ModelConfig      shape and constants, read from config.json                 config.py
PRESETS          shapes by name, for random weights                         presets.py
Decoder, Attend  the forward pass over flattened tokens                     decoder.py
DenseAttend      plain causal attention over one sequence (the oracle)      decoder.py
rope_tables, apply_rope  rotary embedding, reference                        rope.py
Ops              elementwise operations, given by a back end of kernels/    decoder.py
"""

from __future__ import annotations

from aspire.models.config import ModelConfig, RopeScaling
from aspire.models.decoder import Attend, Decoder, DecoderWeights, DenseAttend, LayerWeights, Ops
from aspire.models.loader import LoadedModel, find_model, load_model, resolve_dtype
from aspire.models.presets import PRESETS
from aspire.models.rope import apply_rope, rope_tables

__all__ = [
    "PRESETS",
    "Attend",
    "Decoder",
    "DecoderWeights",
    "DenseAttend",
    "LayerWeights",
    "LoadedModel",
    "ModelConfig",
    "Ops",
    "RopeScaling",
    "apply_rope",
    "find_model",
    "load_model",
    "resolve_dtype",
    "rope_tables",
]
