"""A request in the engine, and the output it has given so far."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aspire.engine.text import OutputText
from aspire.outputs import CompletionOutput, RequestMetrics, RequestOutput
from aspire.sampling_params import SamplingParams
from aspire.scheduler import FinishReason, Request
from aspire.scheduler.prefix_cache import page_hashes


@dataclass
class LiveRequest:
    """While a request runs, its tokens are in `Sequences`; ``token_ids`` is brought up to date when it leaves its
    slot."""

    number: int  # submission order, row of the request table
    request: Request
    prompt: str | None
    prompt_token_ids: list[int]  # shared with all its outputs
    params: SamplingParams
    seed: int
    token_ids: NDArray[np.int32]  # prompt and committed output
    text: OutputText | None
    metrics: RequestMetrics
    logprobs: list[dict[int, float]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    stop_reason: int | str | None = None
    page_names: tuple[bytes, ...] = ()  # of its full pages, as far as they are made; none without prefix caching
    streamed: list[int] = field(default_factory=list)  # output tokens handed out
    spelled: int = 0  # output tokens that ``text`` has seen, where there are no stop strings

    def name_pages(self, known: NDArray[np.int32]) -> None:
        """Name the full pages of the tokens ``known`` [n], prompt first."""
        self.page_names = page_hashes(known, self.page_names)

    def spell(self, known: NDArray[np.int32], *, ends: bool = False) -> None:
        """Bring the text up to the tokens ``known`` [n], prompt first; ``ends``: the last of them is a stop token.

        Texts with stop strings are kept up to date as tokens come.
        """
        if self.text is not None and not self.params.stop:
            new = known[self.request.prompt_tokens + self.spelled :].tolist()
            if new:
                self.text.push(new, ends=ends)
                self.spelled += len(new)

    def output(
        self,
        known: NDArray[np.int32],
        cumulative_logprob: float,
        *,
        finished: bool,
        synthetic: bool,
        lossy: bool,
    ) -> RequestOutput:
        """The output as it stands with the tokens ``known`` [n], prompt first; what is new in it counts as handed
        out."""
        new = known[self.request.prompt_tokens + len(self.streamed) :].tolist()
        self.streamed += new
        reason = self.request.finish_reason
        if self.text is not None:
            self.spell(known, ends=finished and reason == FinishReason.STOP)
            if finished:
                self.text.finish()
        completion = CompletionOutput(
            index=0,
            text=self.text.text if self.text is not None else "",
            token_ids=self.streamed if finished else self.streamed.copy(),
            cumulative_logprob=cumulative_logprob,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            finish_reason=reason.name.lower() if finished else None,
            stop_reason=self.stop_reason if finished else None,
        )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
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
