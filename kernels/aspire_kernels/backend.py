"""Back ends: one namespace of operations each, chosen by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from aspire.errors import UsageError, check_choice
from aspire_kernels import activation, norm, products, rope, sample, select, step_state
from aspire_kernels._triton import HAS_TRITON, INTERPRETED
from aspire_kernels.attention import paged, reference


@dataclass(frozen=True)
class Backend:
    """Operations of a forward. Every back end computes the same functions; see the `*_reference` docstrings for their
    meaning."""

    name: str
    paged_attention: Callable[..., torch.Tensor]
    prepare: Callable[..., None]
    """``prepare(batch, heads, kv_heads, head_dim, dtype, tokens)``: compute the work lists of a forward once, before
    its layers."""
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rope_and_kv_write: Callable[..., torch.Tensor]
    silu_mul: Callable[..., torch.Tensor]
    fuses: Callable[[torch.Tensor], bool]
    """Whether a norm's weight should be folded into the weight of the product that follows it, see `products`."""
    norm_linear: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    norm_gated: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    linear_add: Callable[..., tuple[torch.Tensor | None, torch.Tensor]]
    select_pages: Callable[..., None]
    sample: Callable[..., sample.Sampled]
    resolve: Callable[..., step_state.Resolved]
    advance: Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _nothing_to_prepare(*_args: Any, **_kwargs: Any) -> None:
    """The reference needs no work lists."""


def _never(_weight: torch.Tensor) -> bool:
    """The reference folds nothing."""
    return False


REFERENCE = Backend(
    name="reference",
    paged_attention=reference.paged_attention,
    prepare=_nothing_to_prepare,
    rms_norm=norm.rms_norm_reference,
    add_rms_norm=norm.add_rms_norm_reference,
    rope_and_kv_write=rope.rope_and_kv_write_reference,
    silu_mul=activation.silu_mul_reference,
    fuses=_never,
    norm_linear=products.norm_linear_reference,
    norm_gated=products.norm_gated_reference,
    linear_add=products.linear_add_reference,
    select_pages=select.select_pages_reference,
    sample=sample.sample_reference,
    resolve=step_state.resolve_reference,
    advance=step_state.advance_reference,
)


TRITON = Backend(
    name="triton",
    paged_attention=paged.paged_attention,
    prepare=paged.prepare,
    rms_norm=norm.rms_norm,
    add_rms_norm=norm.add_rms_norm,
    rope_and_kv_write=rope.rope_and_kv_write,
    silu_mul=activation.silu_mul,
    fuses=products.fuses,
    norm_linear=products.norm_linear,
    norm_gated=products.norm_gated,
    linear_add=products.linear_add,
    select_pages=select.select_pages,
    sample=sample.sample,
    resolve=step_state.resolve,
    advance=step_state.advance,
)


def get_backend(name: str = "auto", device: torch.device | str | None = None) -> Backend:
    """Back end ``reference``, ``triton`` or ``auto`` (triton on a CUDA device, else reference).

    Without a GPU, ``triton`` runs in Triton's interpreter: right but slow, for tests. Raises `UsageError` for another
    name, or for ``triton`` where Triton is not installed.
    """
    check_choice("attention back end", name, ("auto", "reference", "triton"))
    if name == "auto":
        on_cuda = torch.device(device).type == "cuda" if device is not None else torch.cuda.is_available()
        name = "triton" if on_cuda and HAS_TRITON else "reference"
    if name == "reference":
        return REFERENCE
    if not HAS_TRITON:
        raise UsageError("attention back end 'triton' needs the package triton; install it or use 'reference'")
    if not torch.cuda.is_available() and not INTERPRETED:
        raise UsageError("attention back end 'triton' needs a CUDA GPU; use 'reference' (or set TRITON_INTERPRET=1)")
    return TRITON
