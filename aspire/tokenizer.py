"""Text to tokens and back: a thin wrapper of transformers' tokenizers, with streaming of text at linear cost.

transformers and tokenizers are imported when a tokenizer is loaded, not before.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from aspire.errors import InputError, ModelError

_REPLACEMENT = "\ufffd"  # what an incomplete character decodes to
_MAX_HELD_TOKENS = 32
_MAX_CHARACTER_TOKENS = 8  # more than the 4 bytes of the longest character


class TextStream(Protocol):
    """Turns the tokens of one request into text, piece by piece."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that becomes certain with these tokens: never half a character; may be empty."""
        ...

    def finish(self) -> str:
        """What was held back: the end of a text that stops inside a character, as replacement characters."""
        ...


class Tokenizer:
    """Encode, decode, stream, and the chat template of one model."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._token_bytes: list[bytes] | None = None
        self._special = frozenset(inner.all_special_ids) | _special_added(inner)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's vocabulary may be padded to more."""
        return len(self._inner)

    @property
    def eos_token_id(self) -> int | None:
        return self._inner.eos_token_id

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that stand for no text; decoding leaves them out unless asked for."""
        return self._special

    @property
    def chat_template(self) -> str | None:
        return self._inner.chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; with the beginning-of-sequence token where the model's tokenizer adds one."""
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens; bytes that form no character become U+FFFD."""
        return str(
            self._inner.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, tokenize: bool = False, add_generation_prompt: bool = True
    ) -> Any:
        """Prompt text (or token ids with ``tokenize``) of a conversation of {"role", "content"} messages.

        Raises `ModelError` if the model has no template, `InputError` if the template refuses the conversation.
        """
        if not self.chat_template:
            raise ModelError("this model's tokenizer has no chat template; give the prompt as text")
        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # templates are programs: jinja errors of many types
            raise InputError(f"the chat template refuses this conversation: {error}") from error
        return self.encode(text, add_special_tokens=False) if tokenize else str(text)

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A new `TextStream`. All its pieces joined equal `decode` of all its tokens.

        For vocabularies that spell unknown characters byte by byte (SentencePiece) that holds as long as the bytes form
        characters: their decoders turn a whole run of bytes into U+FFFD when its last character is broken.
        """
        if self._token_bytes is None:
            self._token_bytes = _token_bytes(self._inner)
        if self._token_bytes:
            return _ByteStream(self._token_bytes, self._special if skip_special_tokens else frozenset())
        return _WindowStream(self, skip_special_tokens)


class _ByteStream:
    """For byte-level vocabularies: each token is a string of bytes, and UTF-8 is decoded incrementally."""

    def __init__(self, token_bytes: list[bytes], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        table, skipped = self._token_bytes, self._skipped
        return self._decoder.decode(
            b"".join([table[token] for token in token_ids if token not in skipped and token < len(table)])
        )

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """For any vocabulary: decodes a short window of tokens and emits what it has more than before.

    The window begins at a token where the text was complete, one such place before the last: decoders that treat
    the first token specially (SentencePiece strips a space) then treat the same one each time.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._tokens: list[int] = []  # from the window's begin
        self._complete = 0  # tokens of the window up to the last place where the text was complete
        self._emitted = 0  # characters of the window's text that were emitted

    def push(self, token_ids: Iterable[int]) -> str:
        self._tokens.extend(token_ids)
        text = self._text()
        certain = text.rstrip(_REPLACEMENT)
        if certain == text:
            piece = text[self._emitted :]
            self._begin_window_at(self._complete)
        elif len(self._tokens) - self._complete <= _MAX_HELD_TOKENS:
            piece = certain[self._emitted :]
            self._emitted = max(self._emitted, len(certain))
        else:  # a run of bytes that form no characters: let go of all but the end, so that the cost stays linear
            piece = text[self._emitted : -1]
            self._begin_window_at(len(self._tokens) - _MAX_CHARACTER_TOKENS)
        return piece

    def _begin_window_at(self, index: int) -> None:
        self._tokens = self._tokens[index:]
        self._complete = len(self._tokens)
        self._emitted = len(self._text().removesuffix(_REPLACEMENT))

    def finish(self) -> str:
        piece = self._text()[self._emitted :]
        self._tokens, self._complete, self._emitted = [], 0, 0
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=self._skip)


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Tokenizer of a Hugging Face folder, a .gguf file, a hub id, or the alias of the embedded model.

    `LoadedModel.tokenizer_source` is such a source. Raises `ModelError`.
    """
    from aspire.models import embedded
    from aspire.models.gguf_tokenizer import gguf_tokenizer
    from aspire.models.loader import download

    path = Path(source).expanduser()
    if str(source) == embedded.NAME:
        path = embedded.fetch()
    elif not path.exists():
        path = download(str(source), config_only=True)
    if path.suffix == ".gguf":
        return Tokenizer(gguf_tokenizer(path))

    from transformers import AutoTokenizer

    try:
        return Tokenizer(AutoTokenizer.from_pretrained(str(path), local_files_only=True))
    except Exception as error:  # transformers raises many unrelated types for files that are absent or broken
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"no usable tokenizer in {path} ({reason}); the folder needs tokenizer.json or tokenizer.model"
        ) from error


def _special_added(inner: Any) -> frozenset[int]:
    """Ids of added tokens that are marked special; transformers' own list holds only those with a named role."""
    return frozenset(index for index, token in inner.added_tokens_decoder.items() if token.special)


def _token_bytes(inner: Any) -> list[bytes]:
    """Bytes of every token of a byte-level vocabulary; an empty list when the vocabulary is of another kind."""
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None or type(backend.decoder).__name__ != "ByteLevel":
        return []
    to_byte = _byte_of_character()
    table = [b""] * len(inner)
    for token, index in backend.get_vocab(with_added_tokens=True).items():
        known = all(character in to_byte for character in token)
        table[index] = bytes(to_byte[character] for character in token) if known else token.encode()
    return table


def _byte_of_character() -> dict[str, int]:
    """The reversible map of byte-level BPE: printable Latin-1 bytes stand for themselves, others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
