"""How the tokens of one request are drawn; names and defaults as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from aspire.errors import UsageError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request. Raises `UsageError` for values outside their range.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 is off. ``seed`` None derives a seed from the engine's seed and the
    request id. ``logprobs`` k returns the k likeliest tokens beside each sampled one. ``stop`` strings end the text
    before them (after them with ``include_stop_str_in_output``).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check("temperature", self.temperature >= 0.0, ">= 0")
        self._check("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]")
        self._check("top_k", self.top_k >= -1, ">= 1, or 0 for off")
        self._check("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]")
        self._check("max_tokens", self.max_tokens >= 1, ">= 1")
        self._check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens")
        self._check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]")
        self._check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]")
        self._check("repetition_penalty", 0.0 < self.repetition_penalty <= 2.0, "in (0, 2]")
        self._check("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "in 0..20")
        self._check("stop", all(self.stop), "non-empty strings")
        self._check("stop with detokenize", self.detokenize or not self.stop, "given only with detokenize=True")

    def _check(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise UsageError(
                f"sampling parameter {name}={getattr(self, name, None)!r} is not allowed; it must be {allowed}"
            )

    @property
    def edits_logits(self) -> bool:
        """Whether penalties or ``min_tokens`` change logits before they are filtered."""
        penalties = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0
        return penalties or self.min_tokens > 0
