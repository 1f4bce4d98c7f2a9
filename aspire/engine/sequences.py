"""Tokens and sampling parameters of the running requests on the host: one row per slot, numpy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import InputError
from aspire.sampling_params import SamplingParams

_STOP_WIDTH = 8

SAMPLING_COLUMNS: dict[str, Any] = {
    "seed": np.int64,
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
}


def prompt_array(request_id: str, ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """The prompt ``ids`` as an array [n]. Raises `InputError` where one of them is no token of the vocabulary."""
    try:
        tokens = np.asarray(array("i", ids))  # as fast as numpy alone, and refuses what is no whole number
    except (OverflowError, TypeError):
        tokens = None
    if tokens is not None and (not len(tokens) or 0 <= tokens.min() <= tokens.max() < vocab_size):
        return tokens
    bad = next(token for token in ids if not (isinstance(token, Integral) and 0 <= token < vocab_size))
    raise InputError(f"request '{request_id}' has token id {bad!r}; the model's vocabulary is 0..{vocab_size - 1}")


class Sequences:
    """``tokens`` int32 [slots, max_model_len + margin]: what a slot's request knows, then its drafts."""

    def __init__(self, max_slots: int, max_model_len: int, d_max: int) -> None:
        self.tokens = np.zeros((max_slots, max_model_len + d_max + 2), dtype=np.int32)
        self.known = np.zeros(max_slots, dtype=np.int64)
        self.prompt_tokens = np.zeros(max_slots, dtype=np.int64)
        self.min_known = np.zeros(max_slots, dtype=np.int64)  # stops are banned below this length
        self.stops = np.full((max_slots, _STOP_WIDTH), -1, dtype=np.int32)
        self.stoppable = np.zeros(max_slots, dtype=bool)  # some stop is set
        self.sampling = {name: np.zeros(max_slots, dtype=kind) for name, kind in SAMPLING_COLUMNS.items()}
        self.params: list[SamplingParams | None] = [None] * max_slots
        self.edits = np.zeros(max_slots, dtype=bool)  # penalties or min_tokens
        self.logprobs = np.full(max_slots, -1, dtype=np.int64)
        self.owner = np.full(max_slots, -1, dtype=np.int64)  # number of the request whose tokens these are
        self.watched = np.zeros(max_slots, dtype=bool)  # stop strings: the text must be looked at in every step
        self.cumulative_logprob = np.zeros(max_slots)
        self.changed: list[int] = []  # slots whose sampling parameters the device has not seen

    def occupy(
        self,
        slot: int,
        tokens: Sequence[int] | NDArray[np.int32],
        prompt: int,
        params: SamplingParams,
        seed: int,
        stops: tuple[int, ...],
        owner: int,
    ) -> None:
        """Put a request into ``slot``: all its known ``tokens``, of which ``prompt`` are the prompt."""
        if len(stops) > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, len(stops) - self.stops.shape[1])), constant_values=-1)
        self.tokens[slot, : len(tokens)] = tokens
        self.known[slot] = len(tokens)
        self.prompt_tokens[slot] = prompt
        self.min_known[slot] = prompt + params.min_tokens
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops
        row = (seed, params.temperature, params.top_k, params.top_p, params.min_p)
        for column, value in zip(self.sampling.values(), row, strict=True):
            column[slot] = value
        self.params[slot] = params
        self.owner[slot] = owner
        self.stoppable[slot] = bool(stops)
        self.edits[slot] = params.edits_logits
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.changed.append(slot)

    def vacate(self, slot: int) -> None:
        """Nothing of the request in ``slot`` may be read from now on."""
        self.params[slot] = None
        self.owner[slot] = -1
        self.edits[slot] = self.watched[slot] = self.stoppable[slot] = False
        self.logprobs[slot] = -1

    def cut_at_stops(
        self, slots: NDArray[np.int64], committed: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """``(count, stopped)`` [rows]: tokens of ``committed`` [rows, width] (-1 = none) up to the first stop."""
        given = committed >= 0
        taken = given.sum(axis=1)
        if not np.count_nonzero(self.stoppable):
            return taken, np.zeros(len(slots), dtype=bool)
        is_stop = (committed[:, :, None] == self.stops[slots][:, None, :]).any(axis=2) & given
        if not np.count_nonzero(is_stop):
            return taken, is_stop[:, 0]
        # a token at index i makes the request known + i + 1 tokens long; min_tokens counts the stop's predecessors
        is_stop &= self.known[slots][:, None] + np.arange(committed.shape[1]) >= self.min_known[slots][:, None]
        stopped = is_stop.any(axis=1)
        return np.where(stopped, is_stop.argmax(axis=1) + 1, taken), stopped

    def append(self, slots: NDArray[np.int64], committed: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
        """Add the first ``counts`` tokens, one at least, of each row of ``committed`` to what the slots know."""
        known = self.known[slots]
        if committed.shape[1] == 1:
            self.tokens[slots, known] = committed[:, 0]
        else:
            row, column = (np.arange(committed.shape[1]) < counts[:, None]).nonzero()
            self.tokens[slots[row], known[row] + column] = committed[row, column]
        self.known[slots] = known + counts
