"""What generation returns; names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RequestMetrics:
    """Times of a request in seconds on the engine's clock; None where not reached."""

    arrival_s: float
    queued_s: float | None = None
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finish_s: float | None = None
    preemptions: int = 0


@dataclass
class CompletionOutput:
    """The generated text and tokens. ``logprobs``: one dict a token, of the sampled and the likeliest tokens."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None  # stop | length | abort | error; None while it runs
    stop_reason: int | str | None = None  # the stop token or string that ended it


@dataclass
class RequestOutput:
    """State of a request: final where ``finished``, what there is so far otherwise.

    ``lossy`` and ``synthetic`` mark outputs that are not the model's own text: sparse decoding, or drawn acceptance.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    lossy: bool = False
    synthetic: bool = False
    new_token_ids: list[int] = field(default_factory=list)  # since the output before, when streaming
    num_cached_tokens: int = 0  # of the prompt, whose KV was there already
