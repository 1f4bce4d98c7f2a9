"""Sampling: kernel = reference on all filters and paths; the noise is Philox and Gumbel; samples follow the exact
law."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from aspire_kernels import SamplingRows, get_backend, gumbel_reference
from aspire_kernels.noise import philox_at_reference, philox_reference
from aspire_kernels.sample import filter_reference
from tests.kernels.cases import DEVICES

REFERENCE = get_backend("reference")
SETTINGS = [
    # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 50, 0.9, 0.0),
    (0.7, 0, 0.95, 0.0),
    (1.3, 0, 1.0, 0.1),
    (0.6, 5, 0.5, 0.05),
    (3.0, 400, 1.0, 0.0),
    (3.0, 400, 0.8, 0.01),
    (5.0, 0, 0.99, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.9, 0, 0.5, 0.3),
    (1.0, 10**6, 1.0, 1e-4),
]


def params(settings: list[tuple[float, int, float, float]], device: str, seed: int = 0) -> SamplingRows:
    rows = len(settings)
    t, k, p, m = zip(*settings, strict=True)
    rng = torch.Generator().manual_seed(seed)
    return SamplingRows(
        seed=torch.randint(-(2**62), 2**62, (rows,), generator=rng).to(device),
        position=torch.randint(0, 10**6, (rows,), dtype=torch.int32, generator=rng).to(device),
        temperature=torch.tensor(t, device=device),
        top_k=torch.tensor(k, dtype=torch.int32, device=device),
        top_p=torch.tensor(p, device=device),
        min_p=torch.tensor(m, device=device),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("spread", "vocab"), [(1.0, 1500), (4.0, 1500), (8.0, 301)])
def test_equals_reference(spread: float, vocab: int, device: str) -> None:
    vocab = vocab * 40 if device == "cuda" else vocab
    logits = torch.randn(len(SETTINGS), vocab, generator=torch.Generator().manual_seed(vocab)).to(device) * spread
    logits[:, 7] = float("-inf")  # a banned token
    rows = params(SETTINGS, device, seed=vocab)
    got, expected = get_backend("triton", device).sample(logits, rows), REFERENCE.sample(logits, rows)
    assert got.token.tolist() == expected.token.tolist()
    single = torch.isinf(expected.margin)
    assert torch.equal(torch.isinf(got.margin), single)
    assert torch.allclose(got.margin[~single], expected.margin[~single], atol=2e-4)
    assert torch.allclose(got.logprob, expected.logprob, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("spread", "step"), [(3.0, 0.25), (3.0, 1.0), (9.0, 4.0)])
def test_tokens_that_tie_at_a_limit_stay_together(spread: float, step: float, device: str) -> None:
    """Logits in steps tie where top-k and top-p cut."""
    drawn = torch.randn(len(SETTINGS), 700, generator=torch.Generator().manual_seed(5)) * spread
    logits = ((drawn / step).round() * step).to(device)
    rows = params(SETTINGS, device)
    got, expected = get_backend("triton", device).sample(logits, rows), REFERENCE.sample(logits, rows)
    decided = (rows.temperature > 0) & (expected.margin > 1e-3)
    assert torch.equal(got.token[decided], expected.token[decided])
    assert torch.equal(torch.isinf(got.margin), torch.isinf(expected.margin))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("vocab", [49152, 151936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_vocabulary_on_gpu(dtype: torch.dtype, vocab: int) -> None:
    settings = SETTINGS * 4
    logits = (torch.randn(len(settings), vocab) * 3).to("cuda", dtype)
    rows = params(settings, "cuda", seed=3)
    got, expected = get_backend("triton").sample(logits, rows), REFERENCE.sample(logits, rows)
    # bfloat16 logits tie often; where the reference is undecided any of the tied tokens is right
    decided = expected.margin > 1e-3
    assert int(decided.sum()) > len(settings) // 2
    assert torch.equal(got.token[decided], expected.token[decided])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_independent(device: str) -> None:
    """A row's sample is the same alone and among others, in any order."""
    backend = get_backend("triton", device)
    logits, rows = torch.randn(6, 700, device=device) * 3, params(SETTINGS[:6], device)
    together = backend.sample(logits, rows).token
    order = torch.tensor([3, 0, 5, 1, 4, 2], device=device)
    assert torch.equal(backend.sample(logits[order], rows.at(order)).token, together[order])
    alone = backend.sample(logits[2:3], rows.at(slice(2, 3))).token
    assert int(alone[0]) == int(together[2])


def test_philox_known_answers() -> None:
    """Vectors of the Random123 distribution (philox4x32, 10 rounds) that this counter layout can reach."""
    zero = philox_reference(torch.tensor([0]), torch.tensor([0]), 4)[0].tolist()
    assert [hex(x) for x in zero] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    some = philox_at_reference(torch.tensor([9]), torch.tensor([5]), torch.tensor([[11, 2, 3, 9]]))
    assert torch.equal(some[0], philox_reference(torch.tensor([9]), torch.tensor([5]), 12)[0, [11, 2, 3, 9]])


def test_noise_is_gumbel_and_depends_on_everything() -> None:
    seed, position = torch.tensor([1, 2, 1, 1 + 2**40]), torch.tensor([5, 5, 6, 5])
    noise = gumbel_reference(seed, position, 40_000)
    assert stats.kstest(noise[0].double().numpy(), "gumbel_r").pvalue > 1e-3
    for other in noise[1:]:
        assert abs(float(torch.corrcoef(torch.stack((noise[0], other)))[0, 1])) < 0.03
    assert torch.isfinite(noise).all()


def test_words_cover_the_extremes() -> None:
    from aspire_kernels.noise import gumbel_of_words

    ends = gumbel_of_words(torch.tensor([0, 2**32 - 1]))
    assert math.isclose(float(ends[0]), -math.log(33 * math.log(2)), rel_tol=1e-6)
    assert math.isclose(float(ends[1]), 33 * math.log(2), rel_tol=1e-6)


@pytest.mark.parametrize("setting", [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.2, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2)])
def test_samples_follow_the_exact_law(setting: tuple[float, int, float, float]) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(8)) * 2
    draws = 4000
    rows = params([setting] * draws, "cpu")
    tokens = REFERENCE.sample(logits.expand(draws, -1), rows).token
    filtered = filter_reference(logits / setting[0], *(x[:1] for x in (rows.top_k, rows.top_p, rows.min_p)))
    law = torch.softmax(filtered, dim=1)[0].double()
    counts = torch.bincount(tokens, minlength=12).double()
    kept = law > 0
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept].numpy(), (law[kept] / law[kept].sum() * draws).numpy()).pvalue > 1e-3


def test_filters_equal_hugging_face() -> None:
    hf = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(4, 200) * 3
    ours = filter_reference(logits, torch.full((4,), 40), torch.full((4,), 0.8), torch.full((4,), 0.05))
    theirs = hf.TopKLogitsWarper(40)(None, logits.clone())
    theirs = hf.MinPLogitsWarper(0.05)(None, hf.TopPLogitsWarper(0.8)(None, theirs))
    assert torch.equal(torch.isinf(ours), torch.isinf(theirs))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_samples_follow_the_exact_law_on_gpu() -> None:
    logits = torch.randn(1, 64) * 2
    draws = 20_000
    rows = params([(0.9, 20, 0.95, 0.0)] * draws, "cuda")
    tokens = get_backend("triton").sample(logits.cuda().expand(draws, -1).contiguous(), rows).token.cpu()
    filtered = filter_reference(logits / 0.9, torch.tensor([20]), torch.tensor([0.95]), torch.tensor([0.0]))
    law = torch.softmax(filtered, dim=1)[0].double()
    counts = torch.bincount(tokens, minlength=64).double()
    kept = law > 0
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept].numpy(), (law[kept] / law[kept].sum() * draws).numpy()).pvalue > 1e-3
