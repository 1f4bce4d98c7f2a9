"""Acceptance models: rates, common random numbers, fits that recover what was drawn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire.errors import InputError, UsageError
from aspire_simulator.acceptance import (
    LONGBENCH_LIKE,
    AcceptanceModel,
    BetaEffect,
    ByPosition,
    Iid,
    Markov,
    Recorded,
    acceptance_from_dict,
    parse_acceptance,
)
from aspire_simulator.fitting import fit_acceptance
from aspire_simulator.margins import LEVELS, MarginModel
from aspire_simulator.rounds import RecordedTraces, Rounds
from tests.simulator.helpers import real_data

MODELS = [Iid(0.8), ByPosition((0.9, 0.7, 0.5)), Markov(0.95, 0.6), Markov(0.3, 0.9), BetaEffect(8, 2), LONGBENCH_LIKE]


def bits(model: AcceptanceModel, requests: int = 200, length: int = 400) -> np.ndarray:
    return np.array([model.draw(1, i, length).difficulty < model.gain[0] for i in range(requests)])


def draw_rounds(model: AcceptanceModel, requests: int, count: int, g: int, seed: int = 0) -> Rounds:
    """Rounds of g drafts, back to back, as an engine would record them."""
    rows = []
    for request in range(requests):
        out = model.draw(seed, request, count * (g + 1) + 1)
        at = 0
        for _ in range(count):
            gain = model.gain[np.minimum(np.arange(g), len(model.gain) - 1)]
            right = out.difficulty[at : at + g] < gain
            accepted = int(np.cumprod(right).sum())
            margin = np.where(right, out.accepted_margin[at : at + g], out.rejected_margin[at : at + g])
            margin[accepted + 1 :] = out.wrong_margin[at + accepted + 1 : at + g]
            rows.append((request, g, accepted, margin))
            at += accepted + 1
    request, drafted, accepted, margin = zip(*rows, strict=True)
    return Rounds(np.array(request), np.array(drafted), np.array(accepted), np.array(margin, dtype=np.float32))


@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.kind}-{m.gain[0]:.1f}")
def test_outcomes_are_a_function_of_seed_request_and_position(model: AcceptanceModel) -> None:
    long, short = model.draw(3, 5, 300), model.draw(3, 5, 300)
    np.testing.assert_array_equal(long.difficulty, short.difficulty)
    assert not np.array_equal(long.difficulty, model.draw(3, 6, 300).difficulty) or model.kind == "recorded"
    assert not np.array_equal(long.difficulty, model.draw(4, 5, 300).difficulty)


@pytest.mark.parametrize(
    ("model", "rate"),
    [(Iid(0.8), 0.8), (Markov(0.95, 0.6), 0.923), (Markov(0.3, 0.9), 0.5625), (BetaEffect(8, 2), 0.8)],
)
def test_rates(model: AcceptanceModel, rate: float) -> None:
    assert bits(model).mean() == pytest.approx(rate, abs=0.025)


@settings(max_examples=15, deadline=None)
@given(stay=st.floats(0.05, 0.95), back=st.floats(0.05, 0.95))
def test_markov_transitions(stay: float, back: float) -> None:
    seen = bits(Markov(stay, back), 60, 500)
    before, after = seen[:, :-1], seen[:, 1:]
    assert after[before].mean() == pytest.approx(stay, abs=0.03)
    assert after[~before].mean() == pytest.approx(back, abs=0.03 + 1 / np.sqrt((~before).sum() + 1))


def test_longbench_like_has_the_published_spread() -> None:
    rng = np.random.default_rng(0)
    rate = np.array([LONGBENCH_LIKE.rate(rng) for _ in range(20_000)])
    run = rate / (1 - rate)
    assert run.min() == pytest.approx(2.6, abs=0.1) and run.max() == pytest.approx(20, abs=0.1)
    assert run.mean() == pytest.approx(11.5, abs=0.15)


def test_margins_are_quantiles_of_uniform_levels() -> None:
    model, level = MarginModel(), np.random.default_rng(5).random(2000)
    accepted, rejected, wrong = model.draw(np.random.default_rng(5), 1000)
    for drawn, at, table in (
        (accepted, level[:1000], model.accepted),
        (rejected, level[:1000], model.rejected),
        (wrong, level[1000:], model.wrong),
    ):
        assert (drawn == np.interp(at, LEVELS, table).astype(np.float32)).all()


def test_draws_are_those_of_the_philox_of_their_key() -> None:
    drawn = Iid(0.5).draw(3, 17, 100).difficulty
    random = np.random.Generator(np.random.Philox(key=[(3 << 16) ^ 0xA5B1, 17])).random(100)
    assert (drawn == (random - 0.5).astype(np.float32)).all()


def test_margins_foretell_acceptance() -> None:
    fit = fit_acceptance(draw_rounds(Iid(0.85), 30, 40, 10))
    assert 0.85 < fit.margin_auc < 0.98


@pytest.mark.parametrize(
    ("model", "requests", "count"),
    [(ByPosition((0.95, 0.8, 0.6, 0.5)), 40, 80), (Markov(0.97, 0.5), 40, 80), (BetaEffect(4, 1), 60, 60)],
    ids=lambda x: getattr(x, "kind", str(x)),
)
def test_fit_names_the_law_that_was_drawn_and_recovers_it(model: AcceptanceModel, requests: int, count: int) -> None:
    fit = fit_acceptance(draw_rounds(model, requests, count, 8))
    assert fit.best == model.kind
    found = fit.model
    if isinstance(found, Markov):
        assert (found.after_accept, found.after_reject) == pytest.approx((0.97, 0.5), abs=0.05)
    if isinstance(found, BetaEffect):
        assert found.a / (found.a + found.b) == pytest.approx(0.8, abs=0.06)
    if isinstance(found, ByPosition):
        assert found.rates[:3] == pytest.approx((0.95, 0.8, 0.6), abs=0.04)
    json.dumps(fit.to_dict())


def test_fit_needs_rounds() -> None:
    with pytest.raises(InputError, match="too few"):
        fit_acceptance(draw_rounds(Iid(0.9), 2, 3, 4))


@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.kind}-{m.gain[0]:.1f}")
def test_json_round_trip(tmp_path: Path, model: AcceptanceModel) -> None:
    path = tmp_path / "acceptance.json"
    model.save(path)
    again = parse_acceptance(str(path))
    assert again == model
    np.testing.assert_array_equal(again.draw(1, 2, 50).rejected_margin, model.draw(1, 2, 50).rejected_margin)


@pytest.mark.parametrize("text", ["iid:2", "iid", "position:", "markov:0.5,0.5,0.5", "beta:0,1", "iid:x", "idd:0.9"])
def test_bad_specs(text: str) -> None:
    if text == "iid":
        assert parse_acceptance(text) == Iid()
        return
    with pytest.raises(UsageError):
        parse_acceptance(text)


def test_bad_json() -> None:
    with pytest.raises(UsageError, match="alpha"):
        acceptance_from_dict({"kind": "iid", "alhpa": 0.5})
    with pytest.raises(InputError, match="kind"):
        acceptance_from_dict([])


def test_recorded_traces_replay_what_was_recorded() -> None:
    rounds = draw_rounds(Markov(0.95, 0.5), 3, 30, 8)
    traces = RecordedTraces.of(rounds)
    model = Recorded(traces=traces)
    draws = rounds.draws()
    assert (traces.accepted == draws.accepted).all() and len(traces) == 3
    length = int(traces.first[1])
    once = model.draw(0, 0, length).difficulty < 0
    assert once.sum() == traces.accepted[:length].sum()  # a full turn shows every recorded outcome once
    accepted, rejected, wrong = rounds.margins_by_fate()
    assert set(traces.wrong_margin.tolist()) <= set(wrong.tolist())


def test_recorded_rounds_of_the_real_model() -> None:
    path = real_data("smollm2_rounds.npz")
    fit = fit_acceptance(path, "doc4k_0.7")
    assert fit.rounds == 1600 and fit.requests == 32 and 0.88 < fit.margin_auc < 0.98
    model = parse_acceptance(f"recorded:{path}:doc4k_0.7")
    rate = bits(model, 64, 600).mean()
    assert rate == pytest.approx(Rounds.load(path, "doc4k_0.7").draws().accepted.mean(), abs=0.01)
    with pytest.raises(InputError, match="choose one of"):
        Rounds.load(path)
    with pytest.raises(UsageError, match="doc4k"):
        Rounds.load(path, "doc4k_0.8")
