"""Settings of an engine, checked once; names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from aspire.errors import UsageError, check_choice
from aspire.scheduler import PAGE_TOKENS, PolicySpec, SelectorSpec

DECODES = ("exact", "delta")
DELTA = SelectorSpec("delta", budget_ratio=0.0, min_pages=64)  # arXiv 2510.09883: 64 pages, the newest 8 among them


@dataclass(frozen=True)
class EngineConfig:
    """What to run and within which limits.

    ``device`` auto is the first GPU if there is one. ``max_model_len`` None is the model's own. ``num_pages`` None
    sizes the KV pool from memory. ``policy`` is a `PolicySpec`, a policy.json path or ``kind:key=value+selector``.
    ``cost_model`` is a cost_model.json path; one made for another setup raises `MismatchError` unless
    ``allow_mismatch``. ``synthetic_acceptance_rates`` (by draft position) replaces acceptance by draws, for models
    without trained weights; every output then says so. ``async_scheduling`` plans each step while the one before runs
    (None: on a GPU); outputs do not change, policies see evidence that is one step old. ``decode`` delta is lossy:
    every token is generated from the pages that a few selection layers choose (selector delta, 64 pages where none is
    given), nothing is drafted or verified, and every output says so. ``enable_prefix_caching``: requests share the KV
    pages of equal prefixes; outputs do not change.
    """

    model: str = "smollm2-135m"
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    block_size: int = PAGE_TOKENS
    gpu_memory_utilization: float = 0.9
    num_pages: int | None = None
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    enable_prefix_caching: bool = True
    attention_backend: str = "auto"
    seed: int = 0
    policy: PolicySpec | str = field(default_factory=PolicySpec)
    decode: str = "exact"
    cost_model: str | Path | None = None
    allow_mismatch: bool = False
    synthetic_acceptance_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.block_size != PAGE_TOKENS:
            raise UsageError(f"block_size {self.block_size} is not supported; KV pages hold {PAGE_TOKENS} tokens")
        if self.tensor_parallel_size != 1:
            raise UsageError(
                f"tensor_parallel_size {self.tensor_parallel_size} is not supported; "
                "use 1 and start one engine per GPU, each with its share of the prompts"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise UsageError(f"gpu_memory_utilization {self.gpu_memory_utilization} is not in (0, 1]")
        check_choice("attention back end", self.attention_backend, ("auto", "reference", "triton"))
        rates = self.synthetic_acceptance_rates
        if rates is not None and (not rates or not all(0.0 <= rate <= 1.0 for rate in rates)):
            raise UsageError(f"synthetic_acceptance_rates {rates} must be one or more probabilities in 0..1")
        if isinstance(self.policy, str):
            object.__setattr__(self, "policy", PolicySpec.parse(self.policy))
        check_choice("decode", self.decode, DECODES)
        if self.lossy:
            self._check_lossy()

    def _check_lossy(self) -> None:
        """Nothing that needs drafts goes with lossy decoding; an unspoken selector becomes delta's own."""
        spec = self.policy_spec
        if spec.kind != "autoregressive":
            raise UsageError(f"decode '{self.decode}' drafts nothing, so policy '{spec.kind}' has no use; leave it out")
        if self.synthetic_acceptance_rates is not None:
            raise UsageError(f"decode '{self.decode}' verifies nothing; leave out synthetic_acceptance_rates")
        if spec.num_speculative_tokens != PolicySpec().num_speculative_tokens:
            raise UsageError(f"decode '{self.decode}' drafts nothing; leave out num_speculative_tokens")
        if spec.selector == SelectorSpec():
            object.__setattr__(self, "policy", replace(spec, selector=DELTA))
        elif spec.selector.kind != "delta":
            raise UsageError(
                f"decode '{self.decode}' goes with selector delta, not '{spec.selector.kind}'; give --selector delta"
            )

    @property
    def lossy(self) -> bool:
        """Whether the text may differ from that of the model."""
        return self.decode != "exact"

    @property
    def policy_spec(self) -> PolicySpec:
        """The policy as data."""
        return self.policy if isinstance(self.policy, PolicySpec) else PolicySpec.parse(self.policy)
