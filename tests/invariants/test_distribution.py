"""Speculation samples from the exact distribution: chi-square on a model of twelve tokens, all three-token outputs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from aspire.models import DenseAttend
from aspire.sampling_params import SamplingParams
from aspire.scheduler import Mode, SelectorSpec
from tests.invariants.cases import fixed
from tests.invariants.harness import Limits, drive, make_engine
from tests.invariants.models import CONFIGS, tiny_model

VOCAB = CONFIGS["dice"].vocab_size
PROMPT = [(7 * place * place + 3 * place) % VOCAB for place in range(24)]
SAMPLES = 1536
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.2},
    {"temperature": 2.0, "top_k": 7, "top_p": 0.85, "min_p": 0.05},
]


@cache
def _logits(after: tuple[int, ...]) -> NDArray[np.float64]:
    """Logits [vocab] of what follows PROMPT and ``after``, by a dense forward."""
    tokens = torch.tensor([*PROMPT, *after])
    decoder = tiny_model("dice").model
    attend = DenseAttend(CONFIGS["dice"], len(tokens))
    hidden = decoder.forward(tokens, torch.arange(len(tokens)), attend)
    return decoder.logits(hidden[-1:])[0].double().numpy()


def _probabilities(after: tuple[int, ...], params: SamplingParams) -> NDArray[np.float64]:
    """The exact law [vocab] of the next token: temperature, then top-k, then top-p, then min-p."""
    scaled = _logits(after) / params.temperature
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p)
    if params.top_k > 0:
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    if params.top_p < 1.0:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0.0
    p[p < params.min_p * p.max()] = 0.0
    return np.asarray(p / p.sum())


def _exact(params: SamplingParams) -> NDArray[np.float64]:
    """[vocab, vocab, vocab]: law of the first three output tokens."""
    law = np.zeros((VOCAB, VOCAB, VOCAB))
    for a, p_a in enumerate(_probabilities((), params)):
        for b, p_b in enumerate(_probabilities((a,), params) if p_a else ()):
            if p_b:
                law[a, b] = p_a * p_b * _probabilities((a, b), params)
    return law


def _drawn(params: dict[str, float], g: int) -> tuple[NDArray[np.int64], int, int]:
    """Counts [vocab, vocab, vocab] of SAMPLES outputs; drafts verified and accepted."""
    # the newest page alone: 8 to 11 of 24 and more tokens
    selector = SelectorSpec(kind="window", budget_ratio=0.0, min_pages=1, sinks=0, recent=1)
    policy = fixed(g, selector) if g else None
    engine = make_engine("dice", policy, Limits(128, 4096, 64), engine_seed=17)
    for index in range(SAMPLES):
        engine.add_request(str(index), PROMPT, SamplingParams(**params, max_tokens=5, ignore_eos=True))
    run = drive(engine, check=False)
    counts = np.zeros((VOCAB, VOCAB, VOCAB), dtype=np.int64)
    for output in run.outputs.values():
        counts[tuple(output.outputs[0].token_ids[:3])] += 1
    verify = engine.log.column("mode") == Mode.VERIFY
    return counts, int(engine.log.column("drafted")[verify].sum()), int(engine.log.column("accepted")[verify].sum())


def _p_value(counts: NDArray[np.int64], law: NDArray[np.float64]) -> float:
    """Chi-square of ``counts`` against ``law``; cells that expect fewer than 5 are one cell."""
    expected = law.ravel() * counts.sum()
    rare = expected < 5
    observed = np.append(counts.ravel()[~rare], counts.ravel()[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    kept = wanted > 1e-9
    return float(stats.chisquare(observed[kept], wanted[kept] * observed[kept].sum() / wanted[kept].sum()).pvalue)


@pytest.mark.parametrize("params", SETTINGS, ids=lambda params: ",".join(f"{k}={v}" for k, v in params.items()))
def test_speculation_samples_the_exact_distribution(params: dict[str, float]) -> None:
    law = _exact(SamplingParams(**params))
    counts, drafted, accepted = _drawn(params, g=2)
    assert 0.2 * drafted < accepted < 0.98 * drafted, "some drafts must be right, some wrong"
    assert (counts[law == 0.0] == 0).all(), "a filtered token was sampled"
    assert _p_value(counts, law) > 1e-3


def test_the_chi_square_sees_a_wrong_temperature() -> None:
    counts, _, _ = _drawn({"temperature": 1.0}, g=2)
    assert _p_value(counts, _exact(SamplingParams(temperature=1.15))) < 1e-3
