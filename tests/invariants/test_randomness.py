"""A request's randomness is its own: not its neighbours', not the batch order's, not the schedule's."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire.sampling_params import SamplingParams
from tests.invariants.cases import fixed, prompt_of, small
from tests.invariants.harness import Limits, drive, make_engine

LIMITS = Limits(4, 128, 128)
PROMPT = prompt_of(50, seed=2)


def _one(
    others: list[tuple[int, float]],
    place: int,
    params: SamplingParams,
    *,
    g: int,
    engine_seed: int = 0,
    name: str = "the one",
) -> list[int]:
    """Output of PROMPT as request ``name``, submitted in ``place`` among others of (prompt length, temperature)."""
    engine = make_engine("llama", fixed(g, small("refresh")) if g else None, LIMITS, engine_seed=engine_seed)
    for index in range(len(others) + 1):
        if index == place:
            engine.add_request(name, PROMPT, params)
        if index < len(others):
            length, temperature = others[index]
            neighbour = SamplingParams(temperature=temperature, max_tokens=3 + length % 20, top_p=0.8)
            engine.add_request(f"other-{index}", prompt_of(length, seed=index), neighbour)
    return drive(engine).outputs[name].outputs[0].token_ids


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from((0.0, 1.0))), max_size=6),
    st.integers(0, 6),
    st.sampled_from((None, 5)),
    st.sampled_from((0, 1, 4)),
)
def test_neighbours_and_batch_order_change_nothing(
    others: list[tuple[int, float]], place: int, seed: int | None, g: int
) -> None:
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, seed=seed, max_tokens=16, ignore_eos=True)
    alone = _one([], 0, params, g=0)
    assert _one(others, min(place, len(others)), params, g=g) == alone


def test_unseeded_requests_draw_by_their_id_and_the_engines_seed() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    first = _one([], 0, params, g=3)
    assert _one([], 0, params, g=0) == first
    assert _one([], 0, params, g=3, name="another") != first
    assert _one([], 0, params, g=3, engine_seed=1) != first


def test_seeded_requests_draw_by_their_seed_alone() -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=16, ignore_eos=True)
    first = _one([], 0, params, g=3)
    assert _one([], 0, params, g=2, name="another", engine_seed=1) == first
    other = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True)
    assert _one([], 0, other, g=3) != first


def test_large_seeds_do_not_collide() -> None:
    outputs = []
    for seed in (1, 1 + 2**32, 2**63 - 1, -1):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=16, ignore_eos=True)
        outputs.append(tuple(_one([], 0, params, g=2)))
    assert len(set(outputs)) == 4


def test_the_noise_of_neighbouring_positions_and_requests_is_uncorrelated() -> None:
    import torch

    from aspire_kernels import gumbel_reference

    seeds = torch.arange(40).repeat_interleave(5)
    noise = gumbel_reference(seeds, torch.arange(5).repeat(40), 200).numpy()
    correlation = np.corrcoef(noise)
    assert np.abs(correlation - np.eye(len(correlation))).max() < 0.4  # 4.6 sigma of 20,000 pairs is 0.33
