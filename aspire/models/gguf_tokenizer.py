"""Tokenizers from GGUF metadata, as transformers objects.

Byte-level BPE is built here from the stored vocabulary and merges, with the text splitting that ``tokenizer.ggml.pre``
names: transformers' own conversion takes one splitting for all models, which changes e.g. spaces before digits. Other
kinds go through transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from aspire.errors import ModelError
from aspire.models.gguf_file import metadata, open_gguf

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

# Splitting patterns that the models' own tokenizer.json files state; numbers differ in how many digits stay together
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {"llama-bpe": _WORDS.replace("{digits}", "{1,3}"), "qwen2": _WORDS.replace("{digits}", "")}
_CONTROL = 3  # tokenizer.ggml.token_type of special tokens
_USER_DEFINED = 4


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file as a transformers tokenizer. Raises `ModelError` when the file has none."""
    reader = open_gguf(path)
    kind = metadata(reader, "tokenizer.ggml.model")
    if kind is None:
        raise ModelError(f"{path} holds no tokenizer; give a GGUF file with tokenizer.ggml metadata")
    splitter = _splitter(metadata(reader, "tokenizer.ggml.pre", "default"))
    if kind != "gpt2" or splitter is None:
        return _through_transformers(path)

    from transformers import PreTrainedTokenizerFast

    tokens = metadata(reader, "tokenizer.ggml.tokens")
    named = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata(reader, f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            named[f"{role}_token"] = tokens[token_id]
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(reader, tokens, splitter),
        chat_template=metadata(reader, "tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _byte_level_bpe(reader: GGUFReader, tokens: list[str], splitter: PreTokenizer) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    merges = [tuple(merge.split(" ", 1)) for merge in metadata(reader, "tokenizer.ggml.merges", [])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata(reader, "tokenizer.ggml.token_type", [])
    for token, kind in zip(tokens, types, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, normalized=False, special=kind == _CONTROL)
            tokenizer.add_special_tokens([added]) if kind == _CONTROL else tokenizer.add_tokens([added])
    bos_id = metadata(reader, "tokenizer.ggml.bos_token_id")
    if metadata(reader, "tokenizer.ggml.add_bos_token", False) and bos_id is not None:
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def _splitter(name: str) -> PreTokenizer | None:
    """Text splitting by its llama.cpp name; None when it is not known here."""
    from tokenizers import Regex, pre_tokenizers

    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[name]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return None


def _through_transformers(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    except Exception as error:  # transformers raises many unrelated types here
        raise ModelError(
            f"the tokenizer in {path} cannot be used ({type(error).__name__}); give a Hugging Face folder of the model"
        ) from error
