"""Random scenarios: one generator for hypothesis (which shrinks what fails) and for the long fuzz run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

from aspire.sampling_params import SamplingParams
from aspire.scheduler import PAGE_TOKENS, POLICIES, SELECTOR_KINDS, PolicySpec, SelectorSpec
from tests.invariants.harness import Limits
from tests.invariants.models import CONFIGS

T = TypeVar("T")


class Draw(Protocol):
    """Where a scenario's choices come from."""

    def integer(self, low: int, high: int) -> int: ...
    def choice(self, options: Sequence[T]) -> T: ...


class Dice:
    """Choices from a seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def choice(self, options: Sequence[T]) -> T:
        return self._random.choice(options)


class Hypothesis:
    """Choices by hypothesis; the first option of a choice is the simplest."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, high)))

    def choice(self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))


@dataclass(frozen=True)
class Ask:
    """A request with what happens to it: submitted before ``arrive_step``, aborted before ``abort_step``."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrive_step: int = 0
    abort_step: int | None = None
    priority: int = 0


@dataclass(frozen=True)
class Schedule:
    """A policy from ``step`` on; ``random_seed``: dice in place of the policy's rule."""

    step: int
    spec: PolicySpec
    random_seed: int | None = None


@dataclass(frozen=True)
class Scenario:
    """Everything that decides a run."""

    model: str
    asks: tuple[Ask, ...]
    schedules: tuple[Schedule, ...]
    limits: Limits
    engine_seed: int
    sabotage: int | None = None  # seed: some drafts are replaced by wrong ones before they are verified


def draw_selector(draw: Draw, num_layers: int) -> SelectorSpec:
    """Any selector, mostly with budgets so small that drafts go wrong."""
    sinks, recent = draw.integer(0, 2), draw.choice((1, 1, 2))
    return SelectorSpec(
        kind=draw.choice(SELECTOR_KINDS),
        budget_ratio=draw.choice((0.0, 0.0, 0.2, 1.0)),
        min_pages=sinks + recent + draw.choice((0, 0, 1, 20)),
        sinks=sinks,
        recent=recent,
        layer=draw.integer(-num_layers, num_layers - 1),
        refresh_power=draw.choice((0.0, 0.25, 1.0)),
        layers=tuple(range(1, num_layers, draw.integer(1, 2))),
    )


def draw_schedule(draw: Draw, step: int, num_layers: int) -> Schedule:
    """Any policy with any selector and cap on the draft length."""
    drafting = tuple(kind for kind in POLICIES if kind != "autoregressive")
    kind = draw.choice((*drafting, "random", "random", "autoregressive"))
    ratio = draw.choice((0.02, 0.1, 0.3, None))
    params: dict[str, Any] = {
        "fixed": lambda: {"g": draw.integer(1, 6)},
        "staggered": lambda: {"g": draw.integer(1, 6)},
        "fsm": lambda: {"g_init": draw.integer(1, 6), "g_min": draw.integer(0, 1)},
        "aspire": lambda: {"cost_ratio": ratio, "gamma_init": draw.integer(0, 5), "w": draw.choice((0.8, 0.2))},
        "goodput": lambda: {"cost_ratio": ratio, "explore_rounds": draw.integer(1, 8)},
    }.get(kind, dict)()
    spec = PolicySpec(
        kind="fixed" if kind == "random" else kind,
        params=params,
        selector=draw_selector(draw, num_layers),
        num_speculative_tokens=draw.choice(
            (16, 16, 5, 3, 1, 0) if kind not in ("fixed", "staggered") else (16, 16, 5, 3, 1)
        ),
    )
    return Schedule(step, spec, draw.integer(0, 2**16) if kind == "random" else None)


def draw_params(draw: Draw, vocab_size: int) -> SamplingParams:
    """Any sampling parameters; half of them plain."""
    plain = draw.choice((True, False))
    temperature = draw.choice((0.0, 0.7, 1.0))
    max_tokens = draw.choice((draw.integer(1, 6), draw.integer(8, 26)))
    filters: dict[str, Any] = draw.choice(
        (
            {},
            {"top_k": 50, "top_p": 0.9},
            {"top_p": 0.9},
            {"top_k": 3},
            {"min_p": 0.05},
            {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
        )
    )
    seed = draw.choice((None, 0, 12345, 2**40 + 1))
    base = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed, **filters}
    if plain:
        return SamplingParams(**base, ignore_eos=True, detokenize=False)
    stops = tuple(draw.integer(0, vocab_size - 1) for _ in range(draw.choice((0, 0, 2, 12))))
    return SamplingParams(
        **base,
        ignore_eos=draw.choice((True, False)),
        stop_token_ids=stops,
        stop=draw.choice(((), ("abab",), ("bca", "cc"), ("abcabc", "aa", "bb"))),
        include_stop_str_in_output=draw.choice((False, True)),
        min_tokens=draw.integer(0, max_tokens) if draw.choice((False, True)) else 0,
        presence_penalty=draw.choice((0.0, 0.5, -0.5)),
        frequency_penalty=draw.choice((0.0, 0.3, -0.3)),
        repetition_penalty=draw.choice((1.0, 1.2, 0.9)),
        logprobs=draw.choice((None, 0, 3)),
    )


def draw_prompt(draw: Draw, vocab_size: int, max_model_len: int) -> tuple[int, ...]:
    """A prompt whose length likes page boundaries and the model's limit; those whose tokens come from one seed begin
    alike."""
    length = draw.choice(
        (
            draw.integer(1, 12),
            draw.integer(1, 8) * PAGE_TOKENS + draw.integer(-1, 1),
            draw.integer(13, 100),
            draw.integer(13, 100),
            max_model_len - draw.integer(1, 6),
        )
    )
    rng = random.Random(draw.choice((0, 0, 1, draw.integer(0, 2**16))))
    span = draw.choice((vocab_size, 6))
    return tuple(rng.randrange(span) for _ in range(min(length, max_model_len - 1)))


def draw_scenario(draw: Draw) -> Scenario:
    """Any scenario that an engine must survive with the autoregressive outputs."""
    model = draw.choice(("llama", "qwen3", "wide", "qwen2"))
    config = CONFIGS[model]
    max_model_len = draw.choice((160, 96, 130))
    storm = draw.choice((False, False, True))  # short prompts, long outputs, few pages: preemption
    asks = []
    for index in range(5 if storm else draw.integer(1, 5)):
        abort = draw.integer(0, 40) if draw.choice((False, False, False, True)) else None
        arrive = draw.choice((0, 0, draw.integer(0, 20)))
        prompt = draw_prompt(draw, config.vocab_size, max_model_len)
        params = draw_params(draw, config.vocab_size)
        if storm:
            prompt = prompt[: draw.integer(10, 34)]
            params = replace(params, max_tokens=draw.integer(params.max_tokens, 40))
        priority = draw.choice((0, 0, 1))
        asks.append(Ask(f"request-{index}", prompt, params, arrive, abort, priority))
    schedules = [draw_schedule(draw, 0, config.num_layers)]
    for _ in range(draw.choice((0, 0, 1, 3))):
        schedules.append(draw_schedule(draw, draw.integer(1, 40), config.num_layers))
    seqs = 5 if storm else draw.choice((3, 5, 2, 1))
    longest = max(min(len(ask.prompt) + ask.params.max_tokens, max_model_len) for ask in asks)
    needed = -(-longest // PAGE_TOKENS) + 1  # the trash page too
    spare = (needed, needed + draw.integer(1, 3), needed + draw.integer(1, 8))
    limits = Limits(
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + draw.choice((60, 30, 4, 0, 200)),
        max_model_len=max_model_len,
        num_pages=draw.choice(spare if storm else (None, *spare)),
        async_scheduling=draw.choice((False, True)),
    )
    sabotage = draw.choice((None, draw.integer(0, 2**16)))
    return Scenario(model, tuple(asks), tuple(schedules), limits, draw.integer(0, 3), sabotage)


@st.composite
def scenarios(draw: Any) -> Scenario:
    """`draw_scenario` as a hypothesis strategy."""
    return draw_scenario(Hypothesis(draw))
