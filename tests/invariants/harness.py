"""Runs scenarios through the engine and checks, after every step, what must hold at all times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from aspire.engine.config import EngineConfig
from aspire.engine.llm_engine import LLMEngine
from aspire.outputs import RequestOutput
from aspire.sampling_params import SamplingParams
from aspire.scheduler import PAGE_TOKENS, Action, Policy, PolicySpec, PolicyView, StepFeatures
from tests.invariants.models import LetterTokenizer, tiny_model

STEP_LIMIT = 1500


@dataclass(frozen=True)
class Limits:
    """What an engine may use; ``num_pages`` None: as many as it could ever need."""

    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    max_model_len: int = 160
    num_pages: int | None = None
    async_scheduling: bool = False


class LinearCost:
    """A cost model with made-up prices: the decisions differ from step to step, the outputs must not."""

    def predict(self, features: StepFeatures) -> NDArray[np.float64]:
        kv_tokens = features.sparse_kv_tokens + features.full_kv_tokens + features.select_kv_tokens
        return np.asarray(2e-5 + 2e-6 * features.query_tokens + 4e-6 * kv_tokens)

    def marginal(self, base: StepFeatures, added: StepFeatures) -> NDArray[np.float64]:
        return np.asarray(self.predict(base + added) - self.predict(base))


class RandomPolicy(Policy):
    """Any schedule at all: every request drafts, verifies or waits by the throw of a die."""

    kind = "random"

    def __init__(self, seed: int, max_slots: int, d_max: int) -> None:
        super().__init__(None, max_slots, d_max)
        self._rng = np.random.default_rng(seed)

    def plan(self, view: PolicyView) -> NDArray[np.int8]:
        choices = (Action.DRAFT, Action.DRAFT, Action.DRAFT, Action.VERIFY, Action.WAIT)
        return self._rng.choice(np.array(choices, dtype=np.int8), len(view.slots))


def make_engine(
    model: str,
    policy: PolicySpec | None = None,
    limits: Limits | None = None,
    *,
    random_seed: int | None = None,
    engine_seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention_backend: str = "auto",
    enforce_eager: bool = False,
) -> LLMEngine:
    """An engine over a tiny model. ``random_seed``: draft and verify at random with the selector of ``policy``."""
    limits, policy = limits or Limits(), policy or PolicySpec()
    config = EngineConfig(
        model=model,
        device=device,
        load_format="dummy",
        policy=policy,
        seed=engine_seed,
        attention_backend=attention_backend,
        enforce_eager=enforce_eager,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        num_pages=limits.num_pages,
        async_scheduling=limits.async_scheduling,
    )
    engine = LLMEngine(config, cost_model=LinearCost(), model=tiny_model(model, device, dtype))
    engine._tokenizer = LetterTokenizer()  # type: ignore[assignment]
    use_random(engine, random_seed)
    return engine


def use_random(engine: LLMEngine, seed: int | None) -> None:
    """Let dice decide from the next step on (None: leave the policy)."""
    if seed is not None:
        d_max = engine.scheduler.policy_spec.num_speculative_tokens
        engine.scheduler.policy = RandomPolicy(seed, engine.scheduler_config.max_num_seqs, d_max)


@dataclass
class Run:
    """What came out of a run."""

    outputs: dict[str, RequestOutput] = field(default_factory=dict)  # of the requests that ended by themselves
    streamed: dict[str, list[int]] = field(default_factory=dict)  # new tokens as they came
    steps: int = 0


def drive(
    engine: LLMEngine,
    *,
    before_step: Callable[[int], None] | None = None,
    check: bool = True,
    stream: bool = True,
    more: Callable[[int], bool] | None = None,
) -> Run:
    """Step until all requests ended; ``before_step`` may submit, abort, switch; ``more``: whether it still will."""
    run = Run()
    while engine.has_unfinished_requests or (more is not None and more(run.steps)):
        if before_step is not None:
            before_step(run.steps)
        for output in engine.step(stream=stream):
            run.streamed.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finished:
                if output.request_id in run.outputs:
                    raise AssertionError(f"request {output.request_id} finished twice")
                run.outputs[output.request_id] = output
        if check:
            check_engine(engine)
        run.steps += 1
        if run.steps > STEP_LIMIT:
            raise AssertionError(f"no end after {STEP_LIMIT} steps; {engine.scheduler.counts}")
    check_drained(engine)
    return run


def generate(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[int]]:
    """Output tokens of every prompt; request ids are ``0, 1, ...``."""
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    for index, (prompt, each) in enumerate(zip(prompts, many, strict=True)):
        engine.add_request(str(index), prompt, each)
    run = drive(engine)
    return [run.outputs[str(index)].outputs[0].token_ids for index in range(len(prompts))]


def check_engine(engine: LLMEngine) -> None:
    """Invariants of every moment between two steps: requests, pages, lengths, block table."""
    scheduler = engine.scheduler
    counts, slots, pages = scheduler.counts, scheduler.slots, scheduler.pages
    assert counts.arrived == counts.waiting + counts.running + counts.finished + counts.rejected, counts
    assert counts.running == int(slots.active.sum()) and counts.waiting + counts.running == len(scheduler.requests)
    assert set(engine.live) == set(scheduler.requests)
    held = [pages.held_by(slot) for slot in range(len(slots.active))]
    owned = np.concatenate([*held, scheduler.pages_of_gone])
    owners = np.bincount(owned, minlength=pages.num_pages)
    assert (owners == pages.owners).all() and owners[0] == 0, "owners are counted wrong, or the trash page is held"
    assert pages.num_free + np.count_nonzero(owners) == pages.num_usable
    assert (pages.held[~slots.active] == 0).all(), "an empty slot holds pages"
    assert len(scheduler.in_flight) <= engine.scheduler_config.async_scheduling, "a step was left in flight"
    for slot in np.flatnonzero(slots.active).tolist():
        written = held[slot][int(slots.computed[slot]) // PAGE_TOKENS :]
        assert (owners[written] == 1).all(), "a page that is written has two owners"
        known, computed, drafted = int(slots.known[slot]), int(slots.computed[slot]), int(slots.drafted[slot])
        assert computed < known <= slots.limit[slot] <= engine.scheduler_config.max_model_len
        assert known + slots.slack[slot] + drafted <= slots.limit[slot] and drafted <= 16
        assert slots.slack[slot] == 0 or scheduler.in_flight
        assert drafted == 0 or computed == known - 1
        assert pages.held[slot] * PAGE_TOKENS >= computed + drafted, "KV was written beyond the pages held"
        on_device = engine.runner.block_table[slot, : pages.held[slot]].cpu().numpy()
        assert (on_device == held[slot]).all(), "block table on the device differs"
        request = slots.requests[slot]
        assert request is not None and scheduler.slot_of(request.request_id) == slot
        if slots.last_step[slot] >= 0:  # it was in a step; what it had found computed says nothing
            assert engine.sequences.known[slot] == request.prompt_tokens + slots.generated[slot]
            assert known == engine.sequences.known[slot] or scheduler.in_flight
            assert engine.sequences.prompt_tokens[slot] == request.prompt_tokens


def check_drained(engine: LLMEngine) -> None:
    """Nothing runs: every page, slot and record of a request is free."""
    check_engine(engine)
    pages = engine.scheduler.pages
    assert not engine.has_unfinished_requests and not engine.live
    assert pages.num_free == pages.num_usable, "pages leaked"
    assert engine.scheduler.slots.num_free == engine.scheduler_config.max_num_seqs
