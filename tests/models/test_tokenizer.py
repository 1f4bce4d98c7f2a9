"""Tokenizers: round trips, streaming equal to decoding at once, chat templates, vocabularies of both kinds."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from aspire.errors import InputError, ModelError
from aspire.tokenizer import TextStream, Tokenizer, _WindowStream, load_tokenizer

CORPUS = [
    "It was a bright cold day in April, and the clocks were striking thirteen.",
    "Größe, café, naïve; Привет, мир! 日本語のテキスト 🎉 👩‍👩‍👧 e\u0301",
    "def f(x):\n    return x + 1\n\n\n\tprint(f(41))",
]
TEXTS = [*CORPUS, "", " ", "  two  spaces  ", "\n\n", "tail é", "🎉" * 5, "<|im_end|> is not the end"]
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def train(kind: str) -> PreTrainedTokenizerFast:
    """A small tokenizer trained on `CORPUS`: byte-level BPE, or SentencePiece-like BPE with byte fallback."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if kind == "byte-level":
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    else:
        inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<|endoftext|>", fuse_unk=True))
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        pieces = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special + pieces, show_progress=False)
    inner.train_from_iterator(CORPUS[:1] if kind == "byte-fallback" else CORPUS, trainer)
    if kind == "byte-fallback":  # byte pieces are ordinary tokens there
        inner = tokenizers.Tokenizer.from_str(_only_special(inner.to_str(), special))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>", chat_template=CHAT)


def _only_special(state: str, special: list[str]) -> str:
    data = json.loads(state)
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in special]
    return json.dumps(data)


@lru_cache(maxsize=1)
def byte_level() -> Tokenizer:
    return Tokenizer(train("byte-level"))


@pytest.fixture(scope="module", params=["byte-level", "byte-fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp(request.param)
    train(request.param).save_pretrained(folder)
    return load_tokenizer(folder)


def streamed(stream: TextStream, token_ids: list[int], seed: int = 0) -> str:
    """All text of ``token_ids`` pushed in random small groups."""
    order, begin, text = random.Random(seed), 0, ""
    while begin < len(token_ids):
        size = order.randrange(1, 4)
        text += stream.push(token_ids[begin : begin + size])
        begin += size
    return text + stream.finish()


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_streaming_of_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert all(type(token) is int for token in token_ids)
    if "<|" not in text:  # SentencePiece's kind sets a space after a special token
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    for skip in (True, False):
        expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert streamed(tokenizer.stream(skip_special_tokens=skip), token_ids) == expected
        assert streamed(_WindowStream(tokenizer, skip), token_ids) == expected


@given(token_ids=st.lists(st.integers(0, 339), max_size=70), skip=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_streaming_of_any_bytes_equals_decoding(token_ids: list[int], skip: bool, seed: int) -> None:
    tokenizer = byte_level()
    assert tokenizer.vocab_size == 340
    expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert streamed(tokenizer.stream(skip_special_tokens=skip), token_ids, seed) == expected
    assert streamed(_WindowStream(tokenizer, skip), token_ids, seed) == expected


@given(text=st.text(max_size=40), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_streaming_of_any_text_equals_decoding(tokenizer: Tokenizer, text: str, seed: int) -> None:
    token_ids = tokenizer.encode(text)
    assert streamed(tokenizer.stream(), token_ids, seed) == tokenizer.decode(token_ids)


def test_no_half_characters_while_streaming(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    pieces = [stream.push([token]) for token in tokenizer.encode("日本 🎉 é end")]
    assert "".join(pieces) + stream.finish() == "日本 🎉 é end"
    assert not any("\ufffd" in piece for piece in pieces)
    cut = tokenizer.stream()
    assert cut.push(tokenizer.encode("a🎉", add_special_tokens=False)[:-1]).strip() == "a"
    assert set(cut.finish()) == {"\ufffd"}


def test_the_cost_of_streaming_is_linear() -> None:
    """The window that is decoded stays short, also through a long run of bytes that form no characters."""
    lengths: list[int] = []

    class Counting(Tokenizer):
        def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
            lengths.append(len(token_ids))
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting(train("byte-level"))
    stream = _WindowStream(tokenizer, True)
    broken = tokenizer.encode("🎉")[:1] * 300
    for token in tokenizer.encode(CORPUS[0] * 5) + broken:
        stream.push([token])
    assert max(lengths) < 45


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(messages)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    token_ids = tokenizer.apply_chat_template(messages, tokenize=True)
    assert token_ids[0] in tokenizer.special_token_ids and token_ids == tokenizer.encode(text)
    with pytest.raises(InputError, match="refuses this conversation"):
        bad = train("byte-level")
        bad.chat_template = "{{ raise_exception('roles must alternate') }}"
        Tokenizer(bad).apply_chat_template(messages)
    bare = train("byte-level")
    bare.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        Tokenizer(bare).apply_chat_template(messages)


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no usable tokenizer in") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="neither an existing path nor a hub id"):
        load_tokenizer(tmp_path / "absent")


def test_smollm2_tokenizer(smollm2_gguf: Path) -> None:
    tokenizer = load_tokenizer(smollm2_gguf)
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, len(tokenizer.special_token_ids)) == (49152, 2, 17)
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
        assert streamed(tokenizer.stream(skip_special_tokens=False), token_ids) == text
    digits = [tokenizer.decode([token]) for token in tokenizer.encode("x  1234")]
    assert digits == ["x", "  ", "1", "2", "3", "4"]  # digits alone, and spaces are not split off before them
    question = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(question)
    assert prompt.startswith("<|im_start|>system\n") and prompt.endswith("<|im_start|>assistant\n")
    token_ids = tokenizer.apply_chat_template(question, tokenize=True)
    assert token_ids[0] == 1 and token_ids.count(2) == 2  # <|im_start|>, <|im_end|> are single tokens


def test_smollm2_tokens_equal_transformers_conversion(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where text splitting plays no part, transformers' own conversion of the same file gives the same tokens."""
    import gguf
    from transformers import AutoTokenizer

    from aspire.models.gguf_file import open_gguf

    monkeypatch.setattr(gguf, "GGUFReader", lambda path: open_gguf(Path(path)))  # it parses the file several times
    theirs = AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)
    ours = load_tokenizer(smollm2_gguf)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
