"""The engine: requests in, steps, outputs out.

A step is `Scheduler.schedule` -> `ModelRunner.launch` -> wait -> `Scheduler.update`. With ``async_scheduling`` the next
step is planned and launched before this one is waited for, so that the GPU never waits for the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aspire.engine.config import EngineConfig
from aspire.engine.kv_pool import KVPool, fit_pages, page_bytes, step_bytes
from aspire.engine.live import LiveRequest, seed_of
from aspire.engine.margin_log import MarginLog
from aspire.engine.outcome import commit, outcome_of
from aspire.engine.record import model_identity, request_table
from aspire.engine.runner import ModelRunner, StepResult
from aspire.engine.sequences import Sequences, prompt_array
from aspire.engine.synthetic import SyntheticAcceptance
from aspire.engine.text import OutputText
from aspire.errors import EngineError, InputError, UsageError
from aspire.evidence import provenance
from aspire.models import LoadedModel, load_model
from aspire.outputs import RequestMetrics, RequestOutput
from aspire.runlog import RequestTable, StepLog, log_step
from aspire.sampling_params import SamplingParams
from aspire.scheduler import (
    MAX_DRAFT,
    CostModel,
    PolicySpec,
    Request,
    Scheduler,
    SchedulerConfig,
    StepPlan,
)
from aspire.scheduler.prefix_cache import page_hashes
from aspire.tokenizer import Tokenizer, load_tokenizer
from aspire_calibration import LoadedCostModel, load_cost_model
from aspire_kernels import counters, get_backend

GRAPH_BUCKETS = (
    1,
    2,
    4,
    8,
    *range(16, 257, 16),
    *range(320, 1025, 64),
    *range(1152, 2049, 128),
    *range(2304, 4097, 256),
    *range(4608, 8193, 512),
    *range(9216, 32769, 1024),
)

KEEP_UP_STEPS = 128
"""Steps in which every running request has its turn in `LLMEngine._keep_up`."""

SLACK_S = 100e-6
"""Where the host waited longer than that for the step before, it has time for `LLMEngine._keep_up`, which takes some 10
microseconds at 128 requests: the GPU sets the pace. Where the host does, that work costs less at a request's end, at
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
        device = _resolve_device(config.device)
        backend = get_backend(config.attention_backend, device)
        self.loaded = model or load_model(
            config.model, config.dtype, device, config.load_format, seed=config.seed, ops=backend
        )
        decoder, shape = self.loaded.model, self.loaded.config
        self.device = decoder.device
        max_len = config.max_model_len or shape.max_position_embeddings
        if max_len > shape.max_position_embeddings:
            raise UsageError(
                f"max_model_len {max_len} is more than the model's {shape.max_position_embeddings} positions; lower it"
            )
        use_graphs = self.device.type == "cuda" and not config.enforce_eager and backend.name == "triton"
        limit = max(config.max_num_seqs * (MAX_DRAFT + 1), config.max_num_batched_tokens)
        buckets = (*(b for b in GRAPH_BUCKETS if b < limit), limit) if use_graphs else ()
        pages_per_slot = -(-max_len // config.block_size)
        wanted = config.max_num_seqs * pages_per_slot + 1
        reserved = step_bytes(shape, decoder.dtype, config, pages_per_slot)
        num_pages = config.num_pages or fit_pages(
            shape,
            decoder.dtype,
            self.device,
            utilization=config.gpu_memory_utilization,
            reserved_bytes=reserved,
            wanted_pages=wanted,
        )
        self.scheduler_config = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_len,
            num_pages=num_pages,
            num_layers=shape.num_layers,
            graph_buckets=buckets,
            async_scheduling=self.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling,
            enable_prefix_caching=config.enable_prefix_caching,
            lossy=config.lossy,
        )
        self.pool = KVPool(shape, num_pages, decoder.dtype, self.device)
        policy = config.policy_spec
        prices = cost_model or loaded_prices
        self.scheduler = Scheduler(self.scheduler_config, policy, prices, on_release=self._released)
        self.sequences = Sequences(config.max_num_seqs, max_len, MAX_DRAFT)
        self.runner = ModelRunner(
            decoder,
            self.pool,
            self.scheduler_config,
            self.scheduler.pages,
            self.sequences,
            backend,
            selector=policy.selector,
            drafts=self.scheduler.policy.drafts or config.lossy,
            use_graphs=use_graphs,
        )
        self._synthetic = (
            SyntheticAcceptance(config.synthetic_acceptance_rates, config.seed)
            if config.synthetic_acceptance_rates is not None
            else None
        )
        if loaded_prices is not None:
            self.check_cost_model(loaded_prices)
        self._tokenizer: Tokenizer | None = None
        self._live: dict[str, LiveRequest] = {}
        self._log = StepLog()
        self._margins: MarginLog | None = None
        self._later: list[Callable[[], None]] = []
        self._submitted: list[LiveRequest] = []
        self._recording = True
        self._count = 0  # requests numbered so far
        self._launched = counters.snapshot()  # when the recording began
        self._origin = time.perf_counter()
        self._last_end: float | None = None
        self._flight: deque[_StepInFlight] = deque()  # at most two
        self._ready: list[RequestOutput] = []  # not yet returned by `step`
        self._streams = False
        self._turn = 0  # of the requests that `_keep_up` looks after
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
        self._live[request_id] = live = LiveRequest(
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
        if self._recording:
            self._submitted.append(live)

    def abort(self, request_id: str) -> bool:
        """End a request now; False if it is not there any more."""
        known = self.scheduler.abort(request_id)
        live = self._live.pop(request_id, None)
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
            self._place(plan, planned_s)
            captured_s = self.runner.capture_s
            wait = self.runner.launch(plan, None if self._synthetic is None else self._synthetic.draw(plan))
            # a graph is captured once: the clock of the run stands still
            self._origin += self.runner.capture_s - captured_s
            self._flight.append(_StepInFlight(plan, wait, planned_s, self.sequences.owner[plan.slots]))
            return True

    def end_step(self) -> list[RequestOutput]:
        """Wait for the oldest step in flight and apply what it found."""
        with self._nothing_lost():
            self._catch_up()
            if self._waited_s > SLACK_S:
                self._keep_up()
            step = self._flight.popleft()
            plan = step.plan
            start = step.planned_s if self._last_end is None else self._last_end
            asked = time.perf_counter()
            result = step.wait()
            self._waited_s = time.perf_counter() - asked
            alive = plan.tenancy == self.scheduler.slots.tenancy[plan.slots]
            outcome, committed = outcome_of(plan, result, alive, self.sequences, self._live)
            end = self.clock()
            outcome = replace(outcome, seconds=end - start)
            if plan.num_prefills:  # no other row yields the first token of its request
                self._note_first_tokens(plan, outcome.committed, end)
            if self._margins is not None:
                before = self.scheduler.slots.generated[plan.slots]
                found = (outcome.committed, result.sample_start, result.margin.copy())
                self._later.append(partial(self._margins.append, step.owner, before, *found))
            commit(plan, outcome, committed, result, self.sequences, self._live)
            finished = {request.request_id for request in self.scheduler.update(plan, outcome)}
        ended = np.zeros(plan.num_rows, dtype=bool)
        if finished:
            ended[:] = [name in finished for name in plan.requests]
        if self._recording:
            self._later.append(partial(log_step, self._log, plan, outcome, step.owner, start, ended, step.planned_s))
        self._last_end = end if self.scheduler.has_work else None
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

    def _place(self, plan: StepPlan, now: float) -> None:
        """Tokens and sampling parameters of requests that entered a slot with this step."""
        if not plan.num_prefills:
            return
        for row in np.flatnonzero(plan.prefill).tolist():
            live, slot = self._live[plan.requests[row]], int(plan.slots[row])
            if self.sequences.owner[slot] != live.number:
                stops = () if live.params.ignore_eos else self.loaded.config.eos_token_ids
                stops = (*stops, *live.params.stop_token_ids)
                prompt = live.request.prompt_tokens
                self.sequences.occupy(slot, live.token_ids, prompt, live.params, live.seed, stops, live.number)
                self.sequences.watched[slot] = bool(live.params.stop)
                self.sequences.cumulative_logprob[slot] = live.cumulative_logprob
                if live.metrics.first_scheduled_s is None:
                    live.metrics.first_scheduled_s = now

    def _note_first_tokens(self, plan: StepPlan, committed: NDArray[np.int64], end: float) -> None:
        first = (committed > 0) & (self.scheduler.slots.generated[plan.slots] == 0)
        for row in np.flatnonzero(first).tolist():
            self._live[plan.requests[row]].metrics.first_token_s = end

    def _emit(self, request_id: str, finished: bool, end: float) -> RequestOutput:
        """The output of a request as it stands; a finished one leaves the engine."""
        live = self._live[request_id]
        slot = self.scheduler.slot_of(request_id)
        known = self._known_of(live)
        logprob = live.cumulative_logprob if slot is None else float(self.sequences.cumulative_logprob[slot])
        if finished:
            live.metrics.finish_s = end
            live.metrics.preemptions = live.request.preemptions
            del self._live[request_id]
        synthetic = self._synthetic is not None or self.loaded.synthetic
        return live.output(known, logprob, finished=finished, synthetic=synthetic, lossy=self.config.lossy)

    def _known_of(self, live: LiveRequest) -> NDArray[np.int32]:
        """Prompt and committed output [n] of a waiting or running request."""
        slot = self.scheduler.slot_of(live.request.request_id)
        if slot is None or self.sequences.owner[slot] != live.number:
            return live.token_ids
        return self.sequences.tokens[slot, : self.sequences.known[slot]]

    def _keep_up(self) -> None:
        """Name pages and spell out the text of some of the running requests, so that little is left to do when they
        end: then the next step waits for it."""
        self._turn = (self._turn + 1) % KEEP_UP_STEPS
        for request in self.scheduler.slots.requests[self._turn :: KEEP_UP_STEPS]:
            if request is not None:
                live = self._live[request.request_id]
                known = self._known_of(live)
                live.spell(known)
                if self.config.enable_prefix_caching:
                    live.name_pages(known)

    def _released(self, slot: int, request: Request) -> None:
        """A request left its slot: keep its tokens; nothing of it may be read there any more."""
        live = self._live.get(request.request_id)
        if live is not None and self.sequences.owner[slot] == live.number:
            live.token_ids = self.sequences.tokens[slot, : request.prompt_tokens + request.generated].copy()
            live.cumulative_logprob = float(self.sequences.cumulative_logprob[slot])
            if self.config.enable_prefix_caching:
                live.name_pages(live.token_ids)
                request.page_hashes = live.page_names
        self.sequences.vacate(slot)

    @property
    def capture_s(self) -> float:
        """Seconds spent capturing CUDA graphs so far; steps are timed without them."""
        return self.runner.capture_s

    def identity(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """``(model, settings)``: what a cost model must have been made for to hold here."""
        settings = {
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
            "attention_backend": self.runner.backend.name,
            "block_size": self.config.block_size,
            "tensor_parallel_size": self.config.tensor_parallel_size,
            "async_scheduling": self.scheduler_config.async_scheduling,
            "selector": self.scheduler.policy_spec.selector.kind,
        }
        return model_identity(self.loaded), settings

    def check_cost_model(self, prices: LoadedCostModel) -> list[str]:
        """Differences between what ``prices`` was made for and this engine; `MismatchError` unless they are allowed."""
        model, settings = self.identity()
        settings.pop("selector")  # priced by its features, whichever it is: policies with several are compared
        return prices.check_matches(
            {"name": provenance()["hardware"]},
            model,
            settings,
            graph_buckets=self.scheduler_config.graph_buckets,
            allow_mismatch=self.config.allow_mismatch,
        )

    # ---- records -------------------------------------------------------------------------------------------------

    def begin_record(self, *, margins: bool = False, keep_prefixes: bool = False) -> None:
        """Forget what was recorded and all prefixes, and start the clock anew; only between runs.

        ``margins``: keep those of tokens. ``keep_prefixes``: prompts that ran before are found computed; such a run
        cannot be replayed.
        """
        if self.scheduler.has_work:
            raise UsageError("begin_record while requests run; finish or abort them first")
        self.forget_steps()
        if not keep_prefixes:
            self.scheduler.reset_prefix_cache()  # a replay begins without them
        self._submitted = []
        self._count = 0
        self._launched = counters.snapshot()
        self._recording = True
        self._margins = MarginLog() if margins else None
        self._origin = time.perf_counter()

    def stop_record(self) -> None:
        """Record nothing more, and forget what was: for servers, which run for days."""
        self._recording = False
        self._margins = None
        self._submitted = []
        self._log = StepLog()
        self._later.clear()

    def forget_steps(self) -> None:
        """Start timing the next step at its own begin, and drop the log of steps."""
        self._log = StepLog()
        self._later.clear()
        self._last_end = None

    @property
    def log(self) -> StepLog:
        """The steps recorded since `begin_record`."""
        self._catch_up()
        return self._log

    def margins(self) -> list[NDArray[np.float32]] | None:
        """Margins [output tokens] of each request since `begin_record`, in order of submission, if they were kept."""
        self._catch_up()
        return None if self._margins is None else self._margins.by_request(len(self._submitted))

    def output_of(self, request_id: str) -> RequestOutput:
        """What a waiting or running request has so far."""
        return self._emit(request_id, False, self.clock())

    def _catch_up(self) -> None:
        """Bookkeeping that was put off until the GPU works."""
        for work in self._later:
            work()
        self._later.clear()

    def record(self) -> tuple[RequestTable, StepLog, dict[str, Any]]:
        """What was recorded since `begin_record`: requests, steps, and the configuration that a replay needs."""
        spec = self.scheduler.policy_spec
        config = {
            "source": "engine",
            "model": self.loaded.name,
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
            "scheduler": asdict(self.scheduler_config),
            "policy": spec.to_dict(),
            "policy_label": f"{spec.label}, lossy ({self.config.decode})" if self.config.lossy else spec.label,
            "decode": self.config.decode,
            "lossy": self.config.lossy,
            "launches": counters.since(self._launched),
            "kv_bytes_per_token": page_bytes(self.loaded.config, self.loaded.model.dtype) // self.config.block_size,
            "synthetic_acceptance": self._synthetic is not None or self.loaded.synthetic,
        }
        return request_table(self.log, self._submitted), self.log, config


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise UsageError(f"device '{name}' is not known; allowed: auto, cpu, cuda, cuda:N") from None
