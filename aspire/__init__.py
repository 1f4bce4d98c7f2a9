"""ASPIRE: non-synchronized batched self-speculative decoding, with a simulator and a cost-model calibrator.

Generation   `LLM`, `AsyncLLM`, `SamplingParams`, `RequestOutput`, `CompletionOutput`
Engine       `EngineConfig`, `LLMEngine`
Scheduling   `PolicySpec`, `SelectorSpec` (also in `aspire.scheduler`, which needs no torch)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aspire.async_llm import AsyncLLM
    from aspire.engine.config import EngineConfig
    from aspire.engine.llm_engine import LLMEngine
    from aspire.llm import LLM
    from aspire.outputs import CompletionOutput, RequestOutput
    from aspire.sampling_params import SamplingParams
    from aspire.scheduler import PolicySpec, SelectorSpec

_HOME = {
    "LLM": "aspire.llm",
    "AsyncLLM": "aspire.async_llm",
    "SamplingParams": "aspire.sampling_params",
    "RequestOutput": "aspire.outputs",
    "CompletionOutput": "aspire.outputs",
    "EngineConfig": "aspire.engine.config",
    "LLMEngine": "aspire.engine.llm_engine",
    "PolicySpec": "aspire.scheduler",
    "SelectorSpec": "aspire.scheduler",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "PolicySpec",
    "RequestOutput",
    "SamplingParams",
    "SelectorSpec",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that the pure parts load without torch."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'aspire' has no attribute '{name}'")
