"""The central property: a scenario under any schedule yields the autoregressive outputs, request by request."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from aspire.engine.llm_engine import LLMEngine
from aspire.outputs import CompletionOutput, RequestOutput
from tests.invariants.harness import Limits, Run, drive, make_engine, use_random
from tests.invariants.oracle import DenseOracle, seed_for
from tests.invariants.scenarios import Ask, Scenario


@dataclass(frozen=True)
class Machine:
    """Where the speculating engine runs; the reference always runs on the CPU in float32.

    ``spread``: what rounding moves logits by. Where tokens differ within it, the comparison of that request ends.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    attention_backend: str = "auto"
    enforce_eager: bool = False
    spread: float = 2e-5


CPU = Machine()


@dataclass
class Tally:
    """What a comparison covered."""

    requests: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    aborted: int = 0
    ties: int = 0

    def __iadd__(self, other: Tally) -> Tally:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


class _Player:
    """Plays the events of a scenario: submissions, aborts, switches of the policy."""

    def __init__(self, engine: LLMEngine, scenario: Scenario) -> None:
        self._engine, self._scenario = engine, scenario
        self._last = max(ask.arrive_step for ask in scenario.asks)
        self.aborted: dict[str, list[int]] = {}
        self._sabotage = None if scenario.sabotage is None else np.random.default_rng(scenario.sabotage)

    def more(self, step: int) -> bool:
        return step <= self._last

    def __call__(self, step: int) -> None:
        if self._sabotage is not None:
            self._spoil_drafts(self._sabotage)
        for schedule in self._scenario.schedules[1:]:
            if schedule.step == step:
                self._engine.set_policy(schedule.spec)
                use_random(self._engine, schedule.random_seed)
        for ask in self._scenario.asks:
            if ask.arrive_step == step:
                self._engine.add_request(ask.request_id, ask.prompt, ask.params, priority=ask.priority)
            if ask.abort_step == step and (live := self._engine.live.get(ask.request_id)) is not None:
                known = self._engine.live.known_of(live, self._engine.scheduler.slot_of(ask.request_id))
                self.aborted[ask.request_id] = known[live.request.prompt_tokens :].tolist()
                if not self._engine.abort(ask.request_id):
                    raise AssertionError(f"{ask.request_id} was there and could not be aborted")

    def _spoil_drafts(self, rng: np.random.Generator) -> None:
        """Replace some drafts by random tokens: rejections at every place, as a worse drafter would cause."""
        slots, vocab_size = self._engine.scheduler.slots, self._engine.loaded.config.vocab_size
        for slot in np.flatnonzero(slots.active & (slots.drafted > 0)).tolist():
            if rng.random() < 0.3:
                place = 1 + int(rng.integers(slots.drafted[slot]))
                self._engine.runner.state.pending[slot, place] = int(rng.integers(vocab_size))


def autoregressive(scenario: Scenario) -> Run:
    """Outputs of plain decoding: all requests together, none aborted, memory and token budget ample."""
    limits = Limits(len(scenario.asks), 1024, scenario.limits.max_model_len)
    engine = make_engine(scenario.model, limits=limits, engine_seed=scenario.engine_seed)
    for ask in scenario.asks:
        engine.add_request(ask.request_id, ask.prompt, ask.params)
    return drive(engine, check=False, stream=False)


def check_lossless(scenario: Scenario, *, dense: bool = False, machine: Machine = CPU) -> Tally:
    """Run ``scenario`` on ``machine``; raises `AssertionError` where an output is not the autoregressive one.

    ``dense``: compare the first request with the dense oracle too.
    """
    expected = autoregressive(scenario)
    first = scenario.schedules[0]
    engine = make_engine(
        scenario.model,
        first.spec,
        scenario.limits,
        random_seed=first.random_seed,
        engine_seed=scenario.engine_seed,
        device=machine.device,
        dtype=machine.dtype,
        attention_backend=machine.attention_backend,
        enforce_eager=machine.enforce_eager,
    )
    player = _Player(engine, scenario)
    run = drive(engine, before_step=player, more=player.more)
    tally = Tally(requests=len(scenario.asks), aborted=len(player.aborted))
    verify = engine.log.column("mode") == 3
    tally.drafted = int(engine.log.column("drafted")[verify].sum())
    tally.accepted = int(engine.log.column("accepted")[verify].sum())
    for ask in scenario.asks:
        want = expected.outputs[ask.request_id]
        tokens = want.outputs[0].token_ids
        tally.tokens += len(tokens)
        if ask.request_id in player.aborted:
            got = player.aborted[ask.request_id]
            tally.ties += _equal_tokens(scenario, ask, got, tokens[: len(got)], machine)
            assert ask.request_id not in run.outputs, "an aborted request gave an output"
            continue
        output = run.outputs[ask.request_id]
        tally.preemptions += output.metrics.preemptions
        tied = _equal_tokens(scenario, ask, output.outputs[0].token_ids, tokens, machine)
        tally.ties += tied
        assert run.streamed[ask.request_id] == output.outputs[0].token_ids, "streamed pieces do not add up"
        if not tied and machine.dtype == torch.float32:
            _equal_rest(output, want)
    if dense and not scenario.asks[0].params.stop:
        ask = scenario.asks[0]
        tokens = expected.outputs[ask.request_id].outputs[0].token_ids
        tally.ties += _equal_tokens(scenario, ask, tokens, _oracle(scenario, ask).run(), CPU)
    return tally


def _oracle(scenario: Scenario, ask: Ask) -> DenseOracle:
    seed = seed_for(ask.params, ask.request_id, scenario.engine_seed)
    return DenseOracle(scenario.model, ask.prompt, ask.params, seed, scenario.limits.max_model_len)


def _equal_tokens(scenario: Scenario, ask: Ask, got: list[int], want: list[int], machine: Machine) -> int:
    """0 if equal; 1 if the first difference is a tie within the machine's rounding; raises otherwise."""
    if got == want:
        return 0
    at = next((i for i, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]), None)
    if at is not None and _oracle(scenario, ask).is_tie(want[:at], {got[at], want[at]}, machine.spread):
        return 1
    raise AssertionError(f"{ask.request_id}: tokens differ at {at}: got {got}, autoregressive {want}")


def _equal_rest(output: RequestOutput, want: RequestOutput) -> None:
    """All but the tokens: reasons, text, log probabilities."""
    got, expected = output.outputs[0], want.outputs[0]
    for name in ("text", "finish_reason", "stop_reason"):
        assert getattr(got, name) == getattr(expected, name), (name, getattr(got, name), getattr(expected, name))
    assert math.isclose(got.cumulative_logprob or 0.0, expected.cumulative_logprob or 0.0, abs_tol=2e-3)
    assert (got.logprobs is None) == (expected.logprobs is None)
    _equal_logprobs(got, expected)


def _equal_logprobs(got: CompletionOutput, expected: CompletionOutput) -> None:
    if got.logprobs is None or expected.logprobs is None:
        return
    assert len(got.logprobs) == len(expected.logprobs) == len(got.token_ids)
    for token, ours, theirs in zip(got.token_ids, got.logprobs, expected.logprobs, strict=True):
        assert token in ours and math.isclose(ours[token], theirs[token], abs_tol=1e-3)
        for a, b in zip(sorted(ours.values()), sorted(theirs.values()), strict=True):
            assert math.isclose(a, b, abs_tol=1e-3)
