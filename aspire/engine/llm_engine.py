"""The engine: requests in, steps, outputs out.

A step is `Scheduler.schedule` -> `ModelRunner.launch` -> wait -> `Scheduler.update`. With ``async_scheduling`` the next
step is planned and launched before this one is waited for, so that the GPU never waits for the host. What the next plan
does not depend on is done between launch and wait: records, ends of requests to come, the policy's learning.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aspire.engine.config import EngineConfig
from aspire.engine.identity import check_cost_model
from aspire.engine.kv_pool import KVPool
from aspire.engine.limits import device_of, scheduler_config_of
from aspire.engine.live import LiveRequest, LiveRequests, seed_of
from aspire.engine.outcome import commit, outcome_of
from aspire.engine.record import Recorder, run_config
from aspire.engine.runner import ModelRunner, StepResult
from aspire.engine.sequences import Sequences, prompt_array
from aspire.engine.synthetic import SyntheticAcceptance
from aspire.engine.text import OutputText
from aspire.errors import EngineError, InputError, UsageError
from aspire.models import LoadedModel, load_model
from aspire.outputs import RequestMetrics, RequestOutput
from aspire.runlog import RequestTable, StepLog
from aspire.sampling_params import SamplingParams
from aspire.scheduler import MAX_DRAFT, CostModel, PolicySpec, Request, Scheduler, StepPlan
from aspire.scheduler.prefix_cache import page_hashes
from aspire.tokenizer import Tokenizer, load_tokenizer
from aspire_calibration import load_cost_model
from aspire_kernels import get_backend

SLACK_S = 100e-6
"""Where the host waited longer than that for the step before, it has time for `LiveRequests.keep_up`, which takes some
10 microseconds at 128 requests: the GPU sets the pace. Where the host does, that work costs less at a request's end, at
once."""


@dataclass(frozen=True)
class _StepInFlight:
    """A step that was launched and not yet waited for."""

    plan: StepPlan
    wait: Callable[[], StepResult]
    planned_s: float
    owner: NDArray[np.int64]  # [rows] number of each row's request


class LLMEngine:
    """Runs requests under one scheduler and one policy. Not thread-safe; `aspire.AsyncLLM` wraps it for servers."""

    def __init__(
        self, config: EngineConfig, *, cost_model: CostModel | None = None, model: LoadedModel | None = None
    ) -> None:
        self.config = config
        loaded_prices = load_cost_model(config.cost_model) if cost_model is None and config.cost_model else None
        device = device_of(config.device)
        backend = get_backend(config.attention_backend, device)
        self.loaded = model or load_model(
            config.model, config.dtype, device, config.load_format, seed=config.seed, ops=backend
        )
        decoder, policy = self.loaded.model, config.policy_spec
        self.device = decoder.device
        use_graphs = self.device.type == "cuda" and not config.enforce_eager and backend.name == "triton"
        self.scheduler_config = limits = scheduler_config_of(config, self.loaded, use_graphs=use_graphs)
        self.pool = KVPool(self.loaded.config, limits.num_pages, decoder.dtype, self.device)
        self.sequences = Sequences(limits.max_num_seqs, limits.max_model_len, MAX_DRAFT)
        self.live = LiveRequests(
            self.sequences, self.loaded.config.eos_token_ids, names_pages=config.enable_prefix_caching
        )
        self.scheduler = Scheduler(limits, policy, cost_model or loaded_prices, on_release=self.live.released)
        self.runner = ModelRunner(
            decoder,
            self.pool,
            limits,
            self.scheduler.pages,
            self.sequences,
            backend,
            selector=policy.selector,
            drafts=self.scheduler.policy.drafts or config.lossy,
            use_graphs=use_graphs,
        )
        rates = config.synthetic_acceptance_rates
        self._synthetic = None if rates is None else SyntheticAcceptance(rates, config.seed)
        self.synthetic = rates is not None or self.loaded.synthetic  # acceptance is drawn, or that of random weights
        if loaded_prices is not None:
            check_cost_model(self, loaded_prices)
        self.scheduler.prepare()
        self.recorder = Recorder()
        self._tokenizer: Tokenizer | None = None
        self._count = 0  # requests numbered so far
        self._origin = time.perf_counter()
        self._last_end: float | None = None
        self._idle_since: float | None = None  # by `time.perf_counter`: when the step that ended last did
        self._flight: deque[_StepInFlight] = deque()  # at most two
        self._ready: list[RequestOutput] = []  # not yet returned by `step`
        self._streams = False
        self._waited_s = 0.0  # for the step that ended last

    # ---- requests ------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises `InputError` where the model has none."""
        if self._tokenizer is None:
            if self.loaded.tokenizer_source is None:
                raise InputError(f"model '{self.loaded.name}' has no tokenizer; give prompts as token ids")
            self._tokenizer = load_tokenizer(self.loaded.tokenizer_source)
        return self._tokenizer

    def clock(self) -> float:
        """Seconds since the engine (or the recording) began."""
        return time.perf_counter() - self._origin

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_s: float | None = None,
    ) -> None:
        """Queue a prompt (text or token ids). Raises `InputError` or `CapacityError` for one that can never run."""
        params = params or SamplingParams()
        text, ids = (prompt, self.tokenizer.encode(prompt)) if isinstance(prompt, str) else (None, list(prompt))
        tokens = prompt_array(request_id, ids, self.loaded.config.vocab_size)
        queued_s = self.clock()
        arrival = queued_s if arrival_s is None else arrival_s
        names = page_hashes(tokens) if self.config.enable_prefix_caching else ()
        request = Request(request_id, len(ids), params.max_tokens, arrival, priority, names)
        self.scheduler.add_request(request)
        wants_text = params.detokenize and self.loaded.tokenizer_source is not None
        if params.stop and not wants_text:
            self.scheduler.abort(request_id)
            raise InputError(
                f"request '{request_id}' has stop strings and the model has no tokenizer; use stop_token_ids"
            )
        self.live[request_id] = live = LiveRequest(
            number=self._count,
            request=request,
            prompt=text,
            prompt_token_ids=ids,
            params=params,
            seed=seed_of(self.config.seed, request_id) if params.seed is None else params.seed,
            token_ids=tokens,
            page_names=names,
            text=OutputText(self.tokenizer, params) if wants_text else None,
            metrics=RequestMetrics(arrival_s=arrival, queued_s=queued_s),
        )
        self._count += 1
        self.recorder.note_request(live)

    def abort(self, request_id: str) -> bool:
        """End a request now; False if it is not there any more."""
        known = self.scheduler.abort(request_id)
        live = self.live.pop(request_id, None)
        if live is not None:
            live.metrics.finish_s = self.clock()
        if not self.scheduler.has_work:
            self._drain()
        return known

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_work or bool(self._ready)

    def set_policy(self, policy: PolicySpec | str) -> None:
        """Switch policy and selector between two steps; outputs do not change, only their speed."""
        spec = PolicySpec.parse(policy) if isinstance(policy, str) else policy
        self._drain()
        self.scheduler.set_policy(spec)
        if not self.scheduler.has_work:  # else requests would wait for it
            self.scheduler.prepare()
        self.runner.set_selector(spec.selector, self.scheduler.policy.drafts or self.config.lossy)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def step(self, *, stream: bool = False) -> list[RequestOutput]:
        """Finish one step; returns the requests that ended in it, and with ``stream`` those that got tokens, too.

        When a step fails, its error is raised and the requests in it are queued again.
        """
        self._streams = stream
        if self._flight or self.begin_step():
            # penalties and min_tokens are worked out on the host, from the tokens of the step before
            if self.scheduler_config.async_scheduling and not np.count_nonzero(self.sequences.edits):
                self.begin_step()
            self._ready += self.end_step()
        if not self.scheduler.has_work:
            self._drain()
        outputs, self._ready = self._ready, []
        return outputs

    def begin_step(self) -> bool:
        """Plan and launch a step; False when there is none to run, or none before the one in flight has ended."""
        with self._nothing_lost():
            planned_s = self.clock()
            plan = self.scheduler.schedule()
            if plan is None:
                return False
            if plan.num_prefills:
                self.live.place(plan, planned_s)
            captured_s = self.runner.capture_s
            wait = self.runner.launch(plan, None if self._synthetic is None else self._synthetic.draw(plan))
            # a graph is captured once: the clock of the run stands still
            self._origin += self.runner.capture_s - captured_s
            self._flight.append(_StepInFlight(plan, wait, planned_s, self.sequences.owner[plan.slots]))
            return True

    def end_step(self) -> list[RequestOutput]:
        """Wait for the oldest step in flight and apply what it found."""
        with self._nothing_lost():
            self.recorder.catch_up()
            self.scheduler.learn()
            if self._waited_s > SLACK_S:
                self.live.keep_up(self.scheduler.slots.requests)
            step = self._flight.popleft()
            plan = step.plan
            start = step.planned_s if self._last_end is None else self._last_end
            asked = time.perf_counter()
            result = step.wait()
            self._waited_s = time.perf_counter() - asked
            alive = self.scheduler.alive(plan)
            outcome, committed = outcome_of(plan, result, alive, self.sequences, self.live)
            end = self.clock()
            outcome = replace(outcome, seconds=end - start)
            if plan.num_prefills:  # no other row yields the first token of its request
                self._note_first_tokens(plan, outcome.committed, end)
            self.recorder.note_margins(plan, outcome, step.owner, self.scheduler.slots.generated, result)
            commit(plan, outcome, committed, result, self.sequences, self.live)
            finished = {request.request_id for request in self.scheduler.update(plan, outcome)}
        ended = np.zeros(plan.num_rows, dtype=bool)
        if finished:
            ended[:] = [name in finished for name in plan.requests]
        self.recorder.note_step(plan, outcome, step.owner, start, ended, step.planned_s)
        self._last_end = end if self.scheduler.has_work else None
        self._idle_since = end + self._origin
        if not finished and not self._streams:
            return []
        wanted = ended | (outcome.committed > 0) if self._streams else ended
        return [self._emit(plan.requests[row], bool(ended[row]), end) for row in np.flatnonzero(wanted).tolist()]

    def _drain(self) -> None:
        """End the steps in flight; their outputs come with the next `step`."""
        while self._flight:
            self._ready += self.end_step()

    @contextmanager
    def _nothing_lost(self) -> Iterator[None]:
        """A step that fails gives its requests back to the queue."""
        try:
            yield
        except BaseException as error:  # an interrupt, too
            largest = max(self.scheduler.in_flight, key=lambda plan: plan.num_query_tokens, default=None)
            self._flight.clear()
            self.scheduler.discard_in_flight()
            if largest is None or not isinstance(error, torch.OutOfMemoryError):
                raise
            raise EngineError(
                f"a step of {largest.num_rows} requests and {largest.num_query_tokens} tokens does not fit in the "
                f"memory of {self.device}; lower max_num_batched_tokens, max_num_seqs or gpu_memory_utilization"
            ) from error

    def _note_first_tokens(self, plan: StepPlan, committed: NDArray[np.int64], end: float) -> None:
        first = (committed > 0) & (self.scheduler.slots.generated[plan.slots] == 0)
        for row in np.flatnonzero(first).tolist():
            self.live[plan.requests[row]].metrics.first_token_s = end

    def _emit(self, request_id: str, finished: bool, end: float) -> RequestOutput:
        """The output of a request as it stands; a finished one leaves the engine."""
        live = self.live[request_id]
        slot = self.scheduler.slot_of(request_id)
        known = self.live.known_of(live, slot)
        logprob = live.cumulative_logprob if slot is None else float(self.sequences.cumulative_logprob[slot])
        if finished:
            live.metrics.finish_s = end
            live.metrics.preemptions = live.request.preemptions
            del self.live[request_id]
        return live.output(known, logprob, finished=finished, synthetic=self.synthetic, lossy=self.config.lossy)

    def output_of(self, request_id: str) -> RequestOutput:
        """What a waiting or running request has so far."""
        return self._emit(request_id, False, self.clock())

    # ---- records -------------------------------------------------------------------------------------------------

    def begin_record(self, *, margins: bool = False, keep_prefixes: bool = False) -> None:
        """Forget what was recorded and all prefixes, and start the clock anew; only between runs.

        ``margins``: keep those of tokens. ``keep_prefixes``: prompts that ran before are found computed; such a run
        cannot be replayed.
        """
        if self.scheduler.has_work:
            raise UsageError("begin_record while requests run; finish or abort them first")
        if not keep_prefixes:
            self.scheduler.reset_prefix_cache()  # a replay begins without them
        now = time.perf_counter()
        self.recorder.begin(margins=margins, rest_s=None if self._idle_since is None else now - self._idle_since)
        self._count = 0
        self._last_end = None
        self._origin = now

    @property
    def log(self) -> StepLog:
        """The steps recorded since `begin_record`."""
        return self.recorder.log

    def record(self) -> tuple[RequestTable, StepLog, dict[str, Any]]:
        """What was recorded since `begin_record`: requests, steps, and the configuration that a replay needs."""
        return self.recorder.table(), self.recorder.log, run_config(self)
