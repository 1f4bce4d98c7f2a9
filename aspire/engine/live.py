"""The requests in the engine: where the tokens of each are, and the output it has given so far."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from aspire.engine.sequences import Sequences
from aspire.engine.text import OutputText
from aspire.outputs import CompletionOutput, RequestMetrics, RequestOutput
from aspire.sampling_params import SamplingParams
from aspire.scheduler import FinishReason, Request, StepPlan
from aspire.scheduler.prefix_cache import page_hashes

KEEP_UP_STEPS = 128
"""Steps in which every running request has its turn in `LiveRequests.keep_up`."""


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

    def name_pages(self, known: NDArray[np.int32]) -> tuple[bytes, ...]:
        """Names of the full pages of the tokens ``known`` [n], prompt first."""
        self.page_names = page_hashes(known, self.page_names)
        return self.page_names

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


class LiveRequests(dict[str, LiveRequest]):
    """By id, those that wait or run. Their tokens are handed to ``sequences`` when they enter a slot, and fetched back
    when they leave it."""

    def __init__(self, sequences: Sequences, eos_token_ids: tuple[int, ...], *, names_pages: bool) -> None:
        super().__init__()
        self._sequences = sequences
        self._eos_token_ids = eos_token_ids
        self._names_pages = names_pages
        self._turn = 0  # of the requests that `keep_up` looks after

    def place(self, plan: StepPlan, now_s: float) -> None:
        """Tokens and sampling parameters of requests that entered a slot with the step ``plan``."""
        sequences = self._sequences
        for row in np.flatnonzero(plan.prefill).tolist():
            live, slot = self[plan.requests[row]], int(plan.slots[row])
            if sequences.owner[slot] != live.number:
                stops = () if live.params.ignore_eos else self._eos_token_ids
                stops = (*stops, *live.params.stop_token_ids)
                prompt = live.request.prompt_tokens
                sequences.occupy(slot, live.token_ids, prompt, live.params, live.seed, stops, live.number)
                sequences.watched[slot] = bool(live.params.stop)
                sequences.cumulative_logprob[slot] = live.cumulative_logprob
                if live.metrics.first_scheduled_s is None:
                    live.metrics.first_scheduled_s = now_s

    def released(self, slot: int, request: Request) -> Callable[[], tuple[bytes, ...]] | None:
        """A request left its slot: keep its tokens; nothing of it may be read there any more. Returns what names its
        pages, which takes longer."""
        names = None
        live, sequences = self.get(request.request_id), self._sequences
        if live is not None and sequences.owner[slot] == live.number:
            live.token_ids = sequences.tokens[slot, : request.prompt_tokens + request.generated].copy()
            live.cumulative_logprob = float(sequences.cumulative_logprob[slot])
            if self._names_pages:
                names = partial(live.name_pages, live.token_ids)
        sequences.vacate(slot)
        return names

    def known_of(self, live: LiveRequest, slot: int | None) -> NDArray[np.int32]:
        """Prompt and committed output [n] of a request that runs in ``slot``, or waits (None)."""
        if slot is None or self._sequences.owner[slot] != live.number:
            return live.token_ids
        return self._sequences.tokens[slot, : self._sequences.known[slot]]

    def keep_up(self, running: Sequence[Request | None]) -> None:
        """Name pages and spell out the text of some of the requests ``running``, by slot, so that little is left to do
        when they end: then the next step waits for it."""
        self._turn = (self._turn + 1) % KEEP_UP_STEPS
        for slot in range(self._turn, len(running), KEEP_UP_STEPS):
            request = running[slot]
            if request is not None:
                live = self[request.request_id]
                known = self.known_of(live, slot)
                live.spell(known)
                if self._names_pages:
                    live.name_pages(known)


def seed_of(engine_seed: int, request_id: str) -> int:
    """A seed that depends on nothing but the engine's seed and the request's id."""
    digest = hashlib.blake2b(f"{engine_seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
