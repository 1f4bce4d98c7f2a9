"""A request in the engine, and the output it has given so far."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from aspire.engine.text import OutputText
from aspire.outputs import CompletionOutput, RequestMetrics, RequestOutput
from aspire.sampling_params import SamplingParams
from aspire.scheduler import FinishReason, Request


@dataclass
class LiveRequest:
    """While a request runs, its tokens are in `Sequences`; ``token_ids`` is brought up to date when it leaves its
    slot."""

    number: int  # submission order, row of the request table
    request: Request
    prompt: str | None
    params: SamplingParams
    seed: int
    token_ids: list[int]  # prompt and committed output
    text: OutputText | None
    metrics: RequestMetrics
    logprobs: list[dict[int, float]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    stop_reason: int | str | None = None
    streamed: int = 0  # output tokens handed out

    def output(
        self, token_ids: list[int], cumulative_logprob: float, *, finished: bool, synthetic: bool, lossy: bool
    ) -> RequestOutput:
        """The output as it stands with the output tokens ``token_ids``; what is new in it counts as handed out."""
        new = token_ids[self.streamed :]
        self.streamed = len(token_ids)
        reason = self.request.finish_reason
        if self.text is not None:
            if not self.params.stop:  # texts with stop strings are kept up to date as tokens come
                self.text.push(new, ends=finished and reason == FinishReason.STOP)
            if finished:
                self.text.finish()
        completion = CompletionOutput(
            index=0,
            text=self.text.text if self.text is not None else "",
            token_ids=token_ids,
            cumulative_logprob=cumulative_logprob,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            finish_reason=reason.name.lower() if finished else None,
            stop_reason=self.stop_reason if finished else None,
        )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.token_ids[: self.request.prompt_tokens],
            outputs=[completion],
            finished=finished,
            metrics=self.metrics,
            lossy=lossy,
            synthetic=synthetic,
            new_token_ids=new,
            num_cached_tokens=self.request.cached_tokens,
        )


def seed_of(engine_seed: int, request_id: str) -> int:
    """A seed that depends on nothing but the engine's seed and the request's id."""
    digest = hashlib.blake2b(f"{engine_seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
