"""Text of one request as it streams: detokenised once, cut at stop strings wherever they end."""

from __future__ import annotations

from dataclasses import dataclass

from aspire.sampling_params import SamplingParams
from aspire.tokenizer import Tokenizer


@dataclass(frozen=True)
class StopHit:
    """A stop string was completed by the ``tokens``-th token of the run."""

    tokens: int
    stop: str


class OutputText:
    """Accumulates the text of a request. Stop strings may span tokens and accepted runs."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._stream = tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        self._stops = params.stop
        self._keep_stop = params.include_stop_str_in_output
        self._longest = max((len(stop) for stop in params.stop), default=0)
        self._hit = False
        self._pieces: list[str] = []
        self._min_tokens = params.min_tokens
        self._tokens = 0

    @property
    def text(self) -> str:
        """The text so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, tokens: list[int], *, ends: bool = False) -> StopHit | None:
        """Add a committed run; the first stop string that it completes ends the text there. ``ends``: the run's last
        token is a stop token, whose text is not part of the output."""
        if not self._stops:
            self._pieces.append(self._stream.push(tokens[:-1] if ends else tokens))
            self._tokens += len(tokens)
            return None
        for index, token in enumerate(tokens):
            self._tokens += 1
            if ends and index + 1 == len(tokens):
                return None
            piece = self._stream.push([token])
            self._pieces.append(piece)
            stop = self._find_stop(len(piece)) if piece and self._tokens > self._min_tokens else None
            if stop is not None:
                self._hit = True
                return StopHit(index + 1, stop)
        return None

    def _find_stop(self, added: int) -> str | None:
        """The stop string that ends within the last ``added`` characters and begins first; cuts the text there."""
        text = self.text
        begin = max(0, len(text) - added - self._longest + 1)
        found = [(text.find(stop, begin), stop) for stop in self._stops]
        hits = sorted((at, -len(stop), stop) for at, stop in found if at >= 0)
        if not hits:
            return None
        at, _, stop = hits[0]
        self._pieces = [text[: at + len(stop) if self._keep_stop else at]]
        return stop

    def finish(self) -> None:
        """The request ended: flush what the tokenizer held back."""
        if not self._hit:
            self._pieces.append(self._stream.finish())
