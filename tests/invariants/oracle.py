"""What must come out: the engine's own autoregressive decoding, and a dense forward that shares no code with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from aspire.engine.live import seed_of
from aspire.models import DenseAttend
from aspire.sampling_params import SamplingParams
from aspire_kernels import SamplingRows, get_backend
from tests.invariants.models import tiny_model


def edited(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stops: set[int]
) -> Tensor:
    """Penalties and the ban of stops by min_tokens, token by token, as vLLM defines them; ``logits`` [vocab]."""
    changed = logits.clone()
    if params.repetition_penalty != 1.0:
        for token in {*prompt, *output}:
            value = float(changed[token])
            factor = params.repetition_penalty
            changed[token] = value / factor if value > 0 else value * factor
    for token, times in Counter(output).items():
        changed[token] -= params.frequency_penalty * times + params.presence_penalty
    if len(output) < params.min_tokens:
        changed[sorted(stops)] = float("-inf")
    return changed


def stop_tokens(model: str, params: SamplingParams) -> set[int]:
    """Tokens that end a request."""
    own = () if params.ignore_eos else tiny_model(model).config.eos_token_ids
    return {*own, *params.stop_token_ids}


def sample_one(logits: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The token of ``logits`` [vocab] at ``position``, by the reference sampler."""
    rows = SamplingRows(
        seed=torch.tensor([seed]),
        position=torch.tensor([position], dtype=torch.int32),
        temperature=torch.tensor([params.temperature]),
        top_k=torch.tensor([params.top_k], dtype=torch.int32),
        top_p=torch.tensor([params.top_p]),
        min_p=torch.tensor([params.min_p]),
    )
    return int(get_backend("reference").sample(logits[None], rows).token[0])


def seed_for(params: SamplingParams, request_id: str, engine_seed: int) -> int:
    """The seed that a request draws with."""
    return seed_of(engine_seed, request_id) if params.seed is None else params.seed


class DenseOracle:
    """Decodes one request with plain causal attention and the reference sampler, one token at a time."""

    def __init__(
        self, model: str, prompt: Sequence[int], params: SamplingParams, seed: int, max_model_len: int
    ) -> None:
        self._model = tiny_model(model).model
        self._attend = DenseAttend(self._model.config, max_model_len + 1)
        self._prompt, self._params, self._seed = list(prompt), params, seed
        self._stops = stop_tokens(model, params)
        self._limit = min(params.max_tokens, max_model_len - len(prompt))
        self._computed = 0

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        """Edited logits [vocab] of what follows prompt and output ``tokens``; each call extends the one before."""
        known = [*self._prompt, *tokens]
        new = torch.tensor(known[self._computed :])
        positions = torch.arange(self._computed, len(known))
        self._computed = len(known)
        logits = self._model.logits(self._model.forward(new, positions, self._attend)[-1:])[0]
        return edited(logits, self._params, self._prompt, tokens, self._stops)

    def run(self) -> list[int]:
        """Output tokens, ended by stop tokens and lengths (stop strings are the engine's own business)."""
        output: list[int] = []
        while len(output) < self._limit:
            logits = self.logits_after(output)
            token = sample_one(logits, self._params, self._seed, len(self._prompt) + len(output))
            output.append(token)
            if token in self._stops and len(output) > self._params.min_tokens:
                break
        return output

    def is_tie(self, output: Sequence[int], tokens: set[int], spread: float) -> bool:
        """Whether the token after ``output`` is each of ``tokens`` at times when logits move by about ``spread``."""
        logits = self.logits_after(output)
        position = len(self._prompt) + len(output)
        generator = torch.Generator().manual_seed(0)
        moved = (logits + spread * torch.randn(logits.shape, generator=generator) for _ in range(200))
        return tokens <= {sample_one(each, self._params, self._seed, position) for each in moved}
