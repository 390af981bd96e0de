"""Small tokenizers of the kinds that pretrained models have, trained on a few lines."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "Anna left the old harbor in 1996 . Carl , Berg ( the 42nd ) did n't see her",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9 ! ? - %",
    "Über naïve Zoë left 中文 and 東京 in the harbor , did n't she ?",
]
SPECIAL = ["<pad>", "<unk>", "<eos>"]
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


def _byte_pairs(pre_tokenizer: Any, normalizer: Any = None, **post: Any) -> Tokenizer:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        LINES,
        trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    if post:
        tokenizer.post_processor = processors.ByteLevel(**post)
    return tokenizer


def _split_byte_level(pattern: str, **post: Any) -> Tokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return _byte_pairs(pre_tokenizers.Sequence([split, byte_level]), normalizers.NFC(), **post)


def _unigram(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(
        LINES, trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    )
    return tokenizer


def _whole_texts(normalizer: Any, pre_tokenizer: Any = None) -> Tokenizer:
    """BPE that divides no text into words before it merges, trained on words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def _word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        LINES, trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    )
    return tokenizer


def _whole_words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(LINES, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))
    return tokenizer


def _ends_of_words() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        LINES,
        trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False),
    )
    return tokenizer


def _single_bytes() -> Tokenizer:
    units = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={unit: index for index, unit in enumerate(units)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    return tokenizer


def _characters() -> Tokenizer:
    units = [*SPECIAL, *sorted(set("".join(LINES)))]
    return Tokenizer(models.BPE(vocab={unit: index for index, unit in enumerate(units)}, merges=[], unk_token="<unk>"))


def _several_words() -> Tokenizer:
    """BPE whose tokens go beyond words, such as "harbor▁in"."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.train_from_iterator(
        ["the old harbor in the old harbor"] * 9,
        trainers.BpeTrainer(vocab_size=80, special_tokens=SPECIAL, show_progress=False),
    )
    return tokenizer


def _metaspace(scheme: str, split: bool = True) -> Any:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)


KINDS = {
    "word pieces": _word_pieces,
    "whole words": _whole_words,
    "characters": _characters,
    "ends of words": _ends_of_words,
    "bytes": lambda: _byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes, trimmed": lambda: _byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=False), trim_offsets=True),
    "bytes, prefix space": lambda: _byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=True), trim_offsets=True),
    "single bytes": _single_bytes,
    "qwen": lambda: _split_byte_level(QWEN, trim_offsets=False),
    "llama 3": lambda: _split_byte_level(LLAMA_3, trim_offsets=True),
    "digits and bytes": lambda: _byte_pairs(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "unigram, always": lambda: _unigram(_metaspace("always")),
    "unigram, first": lambda: _unigram(_metaspace("first")),
    "unigram, never": lambda: _unigram(_metaspace("never")),
    "unigram, xlm-r": lambda: _unigram(
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), _metaspace("always")]), normalizers.NFKC()
    ),
    "llama 2": lambda: _whole_texts(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "mistral": lambda: _whole_texts(None, _metaspace("first", split=False)),
    "gemma": lambda: _whole_texts(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")),
    "several words": _several_words,
}
"""Name -> a function that trains a tokenizer of this kind."""


@cache
def tokenizer_of_kind(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer for transformers."""
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=KINDS[kind](), pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )
