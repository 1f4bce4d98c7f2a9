"""Penalties and min_tokens: changes to single logits, the same for a draft and for its verification.

Row j of a verification sees the drafts before it, exactly as an autoregressive step at that place would. Definitions as
in vLLM: the repetition penalty counts prompt and output, presence and frequency penalties count output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aspire.engine.sequences import Sequences
from aspire.scheduler import Mode, StepPlan


@dataclass(frozen=True)
class LogitEdits:
    """Edited logits, [edits]: ``logit / divide + add`` if positive, ``logit * divide + add`` otherwise."""

    row: Tensor | None
    token: Tensor | None
    divide: Tensor | None
    add: Tensor | None

    @classmethod
    def none(cls) -> LogitEdits:
        """No edits."""
        return cls(None, None, None, None)

    @property
    def empty(self) -> bool:
        """Whether nothing is edited."""
        return self.row is None

    def apply(self, logits: Tensor) -> None:
        """Edit ``logits`` [samples, vocab] in place."""
        if self.row is None or self.token is None or self.divide is None or self.add is None:
            return
        value = logits[self.row, self.token]
        value = torch.where(value > 0, value / self.divide, value * self.divide) + self.add
        logits[self.row, self.token] = value

    @classmethod
    def of(cls, plan: StepPlan, sequences: Sequences, device: torch.device) -> LogitEdits:
        """The edits of a step's sampled rows, from what each request knows and has drafted."""
        rows, tokens, divides, adds = [], [], [], []
        sample = 0
        for index in range(plan.num_rows):
            slot, mode = int(plan.slots[index]), int(plan.modes[index])
            count = int(plan.query_tokens[index]) if mode == Mode.VERIFY else int(plan.samples[index])
            params = sequences.params[slot]
            if params is not None and sequences.edits[slot]:
                end = int(plan.start[index] + plan.query_tokens[index])
                for within in range(count):
                    token, divide, add = _edits_at(sequences, slot, end - count + within + 1)
                    rows.append(np.full(len(token), sample + within))
                    tokens.append(token)
                    divides.append(divide)
                    adds.append(add)
            sample += count
        if not rows or not sum(len(part) for part in rows):
            return cls.none()
        to = {"device": device}
        return cls(
            torch.as_tensor(np.concatenate(rows), dtype=torch.int64, **to),
            torch.as_tensor(np.concatenate(tokens), dtype=torch.int64, **to),
            torch.as_tensor(np.concatenate(divides), dtype=torch.float32, **to),
            torch.as_tensor(np.concatenate(adds), dtype=torch.float32, **to),
        )


def _edits_at(sequences: Sequences, slot: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edits for the token at position ``length`` of ``slot``: (tokens, divide, add), each token once."""
    params, prompt = sequences.params[slot], int(sequences.prompt_tokens[slot])
    if params is None:
        raise KeyError(f"slot {slot} holds no request")
    seen = sequences.tokens[slot, :length]
    token = np.unique(seen) if params.repetition_penalty != 1.0 else np.unique(seen[prompt:])
    output, counts = np.unique(seen[prompt:], return_counts=True)
    times = np.zeros(len(token))
    times[np.searchsorted(token, output)] = counts
    add = -(params.frequency_penalty * times + params.presence_penalty * (times > 0))
    divide = np.full(len(token), params.repetition_penalty)
    if length < sequences.min_known[slot]:
        stops = sequences.stops[slot][sequences.stops[slot] >= 0]
        keep = ~np.isin(token, stops)
        token = np.concatenate([token[keep], stops])
        divide = np.concatenate([divide[keep], np.ones(len(stops))])
        add = np.concatenate([add[keep], np.full(len(stops), -np.inf)])
    return token, divide, add
