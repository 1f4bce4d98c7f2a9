"""The options of the real engine, shared by profile, generate, bench and acceptance. They become an `EngineChoice`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aspire.cli.options import AllowMismatch, existing_file
from aspire.errors import UsageError

if TYPE_CHECKING:
    from aspire import EngineConfig
    from aspire.scheduler import PolicySpec


def engine_choice(
    model: Annotated[
        str, typer.Option("--model", help="smollm2-135m, a folder, a .gguf file, a hub id, or a shape (dummy weights).")
    ] = "smollm2-135m",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    load_format: Annotated[
        str, typer.Option("--load-format", help="auto, safetensors, gguf, or dummy: random weights of the shape.")
    ] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", min=2, help="Longest context in tokens.", show_default="the model's"),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, help="Most requests that run at once.")] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", min=1, help="Most query tokens of a step.")
    ] = 8192,
    block_size: Annotated[int, typer.Option("--block-size", help="Tokens of a KV page; only 16.")] = 16,
    gpu_memory_utilization: Annotated[
        float, typer.Option("--gpu-memory-utilization", help="Share of the GPU's memory to use.")
    ] = 0.9,
    num_pages: Annotated[
        int | None,
        typer.Option("--num-pages", min=2, help="KV pages, instead of what memory allows.", show_default=False),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", min=1, help="GPUs a model is spread over.")
    ] = 1,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="Plan each step while the one before runs.",
            show_default="on a GPU",
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching", help="Compute equal beginnings of prompts once."
        ),
    ] = True,
    attention_backend: Annotated[str, typer.Option("--attention-backend", help="auto, triton or reference.")] = "auto",
    cost_model: Annotated[
        Path | None,
        typer.Option(
            "--cost-model", help="cost_model.json of this machine, for policies that use it.", show_default=False
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option("--num-speculative-tokens", min=0, help="Cap on the draft length.", show_default="the policy's"),
    ] = None,
    selector: Annotated[
        str | None,
        typer.Option("--selector", help="Which KV pages a draft step reads.", show_default="the policy's"),
    ] = None,
    budget_ratio: Annotated[
        float | None,
        typer.Option("--budget-ratio", help="Pages that a draft step reads, as a share.", show_default="the policy's"),
    ] = None,
    synthetic_acceptance_rates: Annotated[
        str | None,
        typer.Option(
            "--synthetic-acceptance-rates",
            help="Draw acceptance with these rates by draft position, e.g. 0.9,0.85: for dummy weights.",
            show_default=False,
        ),
    ] = None,
    allow_mismatch: AllowMismatch = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")] = 0,
) -> EngineChoice:
    policy_changes = {
        "num_speculative_tokens": num_speculative_tokens,
        "selector": selector,
        "budget_ratio": budget_ratio,
    }
    settings = {
        "model": model,
        "device": device,
        "dtype": dtype,
        "load_format": load_format,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "gpu_memory_utilization": gpu_memory_utilization,
        "num_pages": num_pages,
        "tensor_parallel_size": tensor_parallel_size,
        "enforce_eager": enforce_eager,
        "async_scheduling": async_scheduling,
        "enable_prefix_caching": enable_prefix_caching,
        "attention_backend": attention_backend,
        "seed": seed,
        "cost_model": existing_file(cost_model, "cost model", "aspire calibrate") if cost_model else None,
        "allow_mismatch": allow_mismatch,
        "synthetic_acceptance_rates": _rates(synthetic_acceptance_rates),
    }
    return EngineChoice(settings, {name: value for name, value in policy_changes.items() if value is not None})


@dataclass(frozen=True)
class EngineChoice:
    """The options as given. ``config`` makes an `EngineConfig` of them, for one policy."""

    settings: dict[str, Any]
    policy_changes: dict[str, Any]

    def policy(self, text: str) -> PolicySpec:
        """The policy ``text`` (policy.json or ``kind:key=value+selector``) with the options that override it."""
        from aspire.scheduler import PolicySpec

        changes = dict(self.policy_changes)
        spec = PolicySpec.parse(text)
        selector = {"kind": changes.pop("selector", None), "budget_ratio": changes.pop("budget_ratio", None)}
        chosen = {name: value for name, value in selector.items() if value is not None}
        return replace(spec, selector=replace(spec.selector, **chosen), **changes)

    def config(self, policy: PolicySpec) -> EngineConfig:
        """Settings of an engine that runs ``policy``; raises `UsageError` for values that are not allowed."""
        from aspire import EngineConfig

        return EngineConfig(**self.settings, policy=policy)


def _rates(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--synthetic-acceptance-rates '{text}' is not a list of shares; write for example 0.9,0.85,0.8"
        ) from None
