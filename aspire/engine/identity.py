"""What an engine runs, under the names of cost-model files: what a cost model must have been made for to hold here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aspire.evidence import provenance
from aspire.models import LoadedModel
from aspire_calibration import LoadedCostModel

if TYPE_CHECKING:
    from aspire.engine.llm_engine import LLMEngine


def check_cost_model(engine: LLMEngine, prices: LoadedCostModel) -> list[str]:
    """Differences between what ``prices`` was made for and ``engine``; `MismatchError` unless they are allowed."""
    model, settings = identity_of(engine)
    settings.pop("selector")  # priced by its features, whichever it is: policies with several are compared
    return prices.check_matches(
        {"name": provenance()["hardware"]},
        model,
        settings,
        graph_buckets=engine.scheduler_config.graph_buckets,
        allow_mismatch=engine.config.allow_mismatch,
    )


def identity_of(engine: LLMEngine) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(model, settings)`` of ``engine``."""
    settings = {
        "dtype": str(engine.loaded.model.dtype).removeprefix("torch."),
        "attention_backend": engine.runner.backend.name,
        "block_size": engine.config.block_size,
        "tensor_parallel_size": engine.config.tensor_parallel_size,
        "async_scheduling": engine.scheduler_config.async_scheduling,
        "selector": engine.scheduler.policy_spec.selector.kind,
    }
    return model_identity(engine.loaded), settings


def model_identity(loaded: LoadedModel) -> dict[str, Any]:
    """Name and shape of a model."""
    shape = loaded.config
    return {
        "name": loaded.name,
        "architecture": shape.architecture,
        "layers": shape.num_layers,
        "hidden": shape.hidden_size,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate": shape.intermediate_size,
        "vocab": shape.vocab_size,
    }
