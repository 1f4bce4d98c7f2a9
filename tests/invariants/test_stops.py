"""Stops cut an accepted run where they stand: EOS, stop tokens, stop strings, lengths, at every place."""

from __future__ import annotations

import pytest

from aspire.sampling_params import SamplingParams
from tests.invariants.cases import ample, fixed, prompt_of
from tests.invariants.harness import Limits, Run, drive, make_engine
from tests.invariants.models import CONFIGS, LETTERS

PROMPT = prompt_of(20, seed=9)
BASE = {"temperature": 1.0, "seed": 11, "max_tokens": 14}
LIMITS = Limits(16, 256, 64)


def _run(params: list[SamplingParams], g: int, model: str = "llama") -> Run:
    """All parameters on one prompt in one batch; ample budget, so that whole runs are accepted."""
    engine = make_engine(model, fixed(g, ample("verify")), LIMITS)
    for index, each in enumerate(params):
        engine.add_request(str(index), PROMPT, each)
    return drive(engine)


def _free(model: str = "llama") -> list[int]:
    """The output without stops."""
    engine = make_engine(model, limits=LIMITS)
    engine.add_request("0", PROMPT, SamplingParams(**BASE, ignore_eos=True))
    return drive(engine).outputs["0"].outputs[0].token_ids


def _spell(tokens: list[int]) -> str:
    return "".join(LETTERS[token % len(LETTERS)] for token in tokens)


@pytest.mark.parametrize("g", [1, 3, 4, 6])
def test_a_stop_token_at_every_place_of_an_accepted_run(g: int) -> None:
    free = _free()
    params = [SamplingParams(**BASE, ignore_eos=True, stop_token_ids=(token,)) for token in free]
    run = _run(params, g)
    for index, token in enumerate(free):
        output = run.outputs[str(index)].outputs[0]
        first = free.index(token)
        assert output.token_ids == free[: first + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", token)
        assert output.text == _spell(free[:first])  # the stop token itself is not text


@pytest.mark.parametrize("g", [1, 3, 4, 6])
def test_max_tokens_at_every_place(g: int) -> None:
    free = _free()
    params = [SamplingParams(**{**BASE, "max_tokens": count}, ignore_eos=True) for count in range(1, len(free) + 1)]
    run = _run(params, g)
    for index in range(len(free)):
        output = run.outputs[str(index)].outputs[0]
        assert output.token_ids == free[: index + 1] and output.finish_reason == "length"
        assert output.stop_reason is None and output.text == _spell(free[: index + 1])


@pytest.mark.parametrize("g", [1, 4])
@pytest.mark.parametrize("keep", [False, True])
def test_stop_strings_at_every_place_and_across_tokens(g: int, keep: bool) -> None:
    free = _free()
    text = _spell(free)
    stops = sorted({text[at : at + size] for at in range(len(text)) for size in (1, 2, 4) if at + size <= len(text)})
    settings = {"ignore_eos": True, "include_stop_str_in_output": keep}
    for begin in range(0, len(stops), 16):
        some = stops[begin : begin + 16]
        run = _run([SamplingParams(**BASE, **settings, stop=(stop,)) for stop in some], g)
        for index, stop in enumerate(some):
            output = run.outputs[str(index)].outputs[0]
            count = next(n for n in range(1, len(free) + 1) if stop in _spell(free[:n]))
            at = text.index(stop)
            assert output.token_ids == free[:count], stop
            assert output.text == text[: at + len(stop) if keep else at]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_the_earliest_of_several_stop_strings_wins() -> None:
    text = _spell(_free())
    stops = (text[6:9], text[4:6], text[8:10])
    output = _run([SamplingParams(**BASE, ignore_eos=True, stop=stops)], 4).outputs["0"].outputs[0]
    assert output.text == text[: min(text.index(stop) for stop in stops)]


@pytest.mark.parametrize("g", [1, 4])
def test_end_of_text_and_ignore_eos(g: int) -> None:
    eos = CONFIGS["dice"].eos_token_ids[0]
    seeds = range(16)
    settings = {"temperature": 1.0, "max_tokens": 14}
    prompt = [token % 12 for token in PROMPT]
    runs = []
    for ignore in (True, False):
        engine = make_engine("dice", fixed(g, ample("verify")), LIMITS)
        for seed in seeds:
            engine.add_request(str(seed), prompt, SamplingParams(**settings, seed=seed, ignore_eos=ignore))
        runs.append(drive(engine))
    ended = 0
    for seed in seeds:
        free, output = (run.outputs[str(seed)].outputs[0] for run in runs)
        assert len(free.token_ids) == 14
        if eos in free.token_ids:
            ended += 1
            assert output.token_ids == free.token_ids[: free.token_ids.index(eos) + 1]
            assert (output.finish_reason, output.stop_reason) == ("stop", eos)
        else:
            assert output.token_ids == free.token_ids and output.finish_reason == "length"
    assert ended > 3


@pytest.mark.parametrize("g", [1, 4])
def test_min_tokens_bans_stops_until_then_and_no_longer(g: int) -> None:
    stops = tuple(sorted(set(_free())))[:6]
    expected = {}
    for policy_g in (0, g):
        engine = make_engine("llama", fixed(policy_g, ample("verify")) if policy_g else None, LIMITS)
        for count in range(14):
            params = SamplingParams(**BASE, ignore_eos=True, stop_token_ids=stops, min_tokens=count)
            engine.add_request(str(count), PROMPT, params)
        run = drive(engine)
        outputs = [run.outputs[str(count)].outputs[0].token_ids for count in range(14)]
        for count, tokens in enumerate(outputs):
            assert len(tokens) > count or len(tokens) == BASE["max_tokens"]
            assert not set(tokens[:count]) & set(stops)
        expected[policy_g] = outputs
    assert expected[0] == expected[g]


def test_more_stop_tokens_than_any_buffer_starts_with() -> None:
    free = _free()
    others = tuple(token for token in range(128) if token not in free)[:40]
    output = _run([SamplingParams(**BASE, ignore_eos=True, stop_token_ids=(*others, free[5]))], 4)
    assert output.outputs["0"].outputs[0].token_ids == free[: free.index(free[5]) + 1]
