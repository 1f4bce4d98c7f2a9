"""A request as the scheduler sees it: lengths, limits and state; its tokens belong to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from aspire.scheduler.prefix_cache import Name


class RequestState(Enum):
    """Life of a request. Every request is in exactly one state; FINISHED and REJECTED are final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    REJECTED = "rejected"


class FinishReason(IntEnum):
    """Why a request ended; the names are those of the OpenAI and vLLM APIs."""

    NONE = 0
    STOP = 1  # a stop token or stop string
    LENGTH = 2  # max_tokens or the model's length
    ABORT = 3
    ERROR = 4  # e.g. non-finite logits of this request


@dataclass
class Request:
    """One generation request.

    ``prompt_tokens`` and ``max_tokens`` are counts. ``page_hashes`` name its full pages, prompt first, as far as they
    are known (`prefix_cache.page_hashes`): equal names let requests share pages. None are needed.
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    arrival_s: float = 0.0
    priority: int = 0  # smaller runs first, as in vLLM
    page_hashes: Sequence[Name] = ()
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason = FinishReason.NONE
    generated: int = 0  # committed output tokens
    preemptions: int = 0
    cached_tokens: int = 0  # of the prompt, found in pages that others had computed
    order: int = field(default=-1, compare=False)  # submission order, set by the scheduler
