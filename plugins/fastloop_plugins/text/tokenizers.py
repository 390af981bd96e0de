"""Make a tokenizer from the training texts, and check that transformers reads a saved one in the same way."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastloop import RecipeError, option
from fastloop.problem import clause, join_names
from fastloop.runtime.files import refuse_full_disk
from fastloop_plugins._mapped import OTHER_TEMPORARY_FOLDER
from fastloop_plugins.models.hub import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECKED = 20
"""Training texts that the check of a saved tokenizer encodes. The first word decides in the known case."""
JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
"""Files of a saved tokenizer that hold a JSON object."""
OTHER_FILES = ("merges.txt", "vocab.txt", "spiece.model", "tokenizer.model")
"""Further files of a saved tokenizer."""
REPAIR = "Write it again with save_pretrained of transformers, or name another tokenizer: model.tokenizer=FOLDER."
"""Advice for a damaged tokenizer."""
UNKNOWN_WORD = "\u16a0"
"""A rune, which few vocabularies have. Normalizers keep it, because it is a letter."""
CHARACTERS = 10_000
"""Characters of each of these texts at most."""


@dataclass(kw_only=True)
class TrainedTokenizer:
    """``model.tokenizer`` as a mapping: options of a tokenizer to train."""

    kind: Literal["word", "bpe", "char", "byte"] = option(
        "lower-cased words; byte pairs, which encode any text; the characters of the training texts; or the 256 "
        "bytes, which encode any text",
        default="bpe",
    )
    vocab_size: int = option("tokens at most, for word and bpe", default=8000, ge=8)


class BackendState:
    """How the backend of a tokenizer cuts and pads texts. Each call of the tokenizer changes it, and
    ``save_pretrained`` writes it: a program that reads ``tokenizer.json`` would cut all texts there."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.truncation = None if backend is None else backend.truncation
        self.padding = None if backend is None else backend.padding

    def restore(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Give the backend the settings from before."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:  # a tokenizer in Python
            return
        backend.no_truncation()
        backend.no_padding()
        if self.truncation is not None:
            backend.enable_truncation(**self.truncation)
        if self.padding is not None:
            backend.enable_padding(**self.padding)


def train_tokenizer(options: TrainedTokenizer, texts: Sequence[str], classify: bool, types: bool = False) -> Any:
    """Make a tokenizer from texts. The same texts give the same tokenizer. With ``types``, it returns token types by
    default."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if classify:
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        special = {
            "eos_token": "<|endoftext|>",
            "bos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<|unknown|>",
        }
    tokens = list(dict.fromkeys(special.values()))
    common: dict[str, Any] = {"vocab_size": options.vocab_size, "special_tokens": tokens, "show_progress": False}
    if options.kind == "word":
        tokenizer = Tokenizer(models.WordLevel(unk_token=special["unk_token"]))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer: Any = trainers.WordLevelTrainer(**common)
    elif options.kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **common)
    else:  # byte pairs without a pair: each character is a token, and nothing is trained
        is_byte = options.kind == "byte"
        units = pre_tokenizers.ByteLevel.alphabet() if is_byte else set(chain.from_iterable(texts))
        vocabulary = {token: index for index, token in enumerate([*tokens, *sorted(units)])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=special["unk_token"]))
        if is_byte:
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel() if is_byte else decoders.Fuse()
        tokenizer.add_special_tokens(tokens)
        trainer = None
    if trainer is not None:
        tokenizer.train_from_iterator(iter(texts), trainer, length=len(texts))
    if classify:
        ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
        )
    returned = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if types else {}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, **special, **returned
    )


def save_sentencepiece(tokenizer: Any, folder: Path) -> None:
    """Copy the SentencePiece file of a pretrained tokenizer, such as ``tokenizer.model``, if there is one.

    transformers reads ``tokenizer.json`` alone. The converter of llama.cpp needs the file for architectures such as
    Gemma. A tokenizer with added tokens gets no copy: the file lacks them, and the converter would take their ids for
    unused ones.
    """
    file = Path(getattr(tokenizer, "vocab_file", None) or "")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if file.suffix != ".model" or not file.is_file() or backend is None:
        return
    if len(tokenizer) == backend.get_vocab_size(with_added_tokens=False):
        shutil.copyfile(file, folder / file.name)


def refuse_damaged_tokenizer(folder: Path, cause: BaseException | None, place: str) -> None:
    """Raise an error that names the files of a tokenizer which cannot be loaded. Does nothing if there are none.

    Args:
        cause: The error of the library.
        place: The recipe and the key, for messages.
    """
    names = [name for name in (*JSON_FILES, *OTHER_FILES) if (folder / name).is_file()]
    if cause is None or not names:
        return
    for name in names:
        reason = find_damage(folder / name)
        if reason:
            raise RecipeError(
                f"{folder / name} cannot be read: {reason}.", code="file-unreadable", place=place, remedy=REPAIR
            )
    raise RecipeError(
        f"{folder}: no tokenizer can be made of {join_names(names)}: {clause(cause)}.",
        code="file-unreadable",
        place=place,
        remedy=REPAIR,
    )


def find_damage(file: Path) -> str:
    """Why a file of a tokenizer cannot be read; empty: it can, or it is no JSON."""
    from tokenizers import Tokenizer

    if file.name not in JSON_FILES:
        return ""
    try:
        content = json.loads(file.read_bytes())
        if not isinstance(content, dict):
            return f"found a {type(content).__name__}, expected a JSON object"
        if file.name == "tokenizer.json":
            Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no class of its own
        return clause(error)
    return ""


def check_longest(tokenizer: Any, folder: Path, place: str) -> None:
    """Check that ``model_max_length`` of a tokenizer is a number: transformers keeps any value.

    Raises:
        RecipeError: It is not.
    """
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float):
        raise RecipeError(
            code="wrong-type",
            place=f"{place}: {folder / 'tokenizer_config.json'}: model_max_length",
            found=repr(longest),
            expected="a number of tokens",
            remedy="Correct it in the file, or remove it.",
        )


def check_unknown_word(tokenizer: Any, folder: Path, place: str) -> None:
    """Check that a tokenizer can encode a word that is not in its vocabulary.

    Raises:
        RecipeError: Its token for unknown words is not in its vocabulary.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    token = None if backend is None else getattr(backend.model, "unk_token", None)
    if backend is None or token is None:
        return
    try:
        backend.encode(UNKNOWN_WORD, add_special_tokens=False)
    except Exception as error:  # tokenizers raises no class of its own
        file = folder / "tokenizer.json"
        raise RecipeError(
            f"{file if file.is_file() else folder} cannot encode an unknown word, because its unk_token {token!r} is "
            f"not in the vocabulary of its model: {clause(error)}.",
            code="file-unreadable",
            place=place,
            remedy="Add the token to that vocabulary, or name another tokenizer: model.tokenizer=FOLDER.",
        ) from None


def check_saved_tokenizer(tokenizer: PreTrainedTokenizerBase, config: Any, texts: Sequence[str], where: str) -> None:
    """Check that AutoTokenizer reads a saved tokenizer as it is. For models such as Qwen2, transformers ignores the
    saved class.

    Raises:
        RecipeError: It cannot be saved; or the saved one gives other ids, so the exported model would get other tokens
            than in training.
    """
    from transformers import AutoTokenizer

    try:
        with tempfile.TemporaryDirectory() as folder, quiet():
            tokenizer.save_pretrained(folder)
            config.save_pretrained(folder)
            saved: Any = AutoTokenizer.from_pretrained(Path(folder))
    except OSError as error:
        refuse_full_disk(error, Path(tempfile.gettempdir()), OTHER_TEMPORARY_FOLDER)
        raise RecipeError(
            f"cannot be saved in {tempfile.gettempdir()}: {error}", code="file-not-writable", place=f"{where}.tokenizer"
        ) from None
    for whole in texts[:CHECKED]:
        text = whole[:CHARACTERS]
        expected = tokenizer(text, verbose=False)["input_ids"]
        actual = saved(text, verbose=False)["input_ids"]
        if expected != actual:
            raise RecipeError(
                f"transformers reads a saved tokenizer of {config.model_type} as {type(saved).__name__}, which "
                f"encodes {text[:30]!r} as {len(actual)} tokens. Training would use other ones ({len(expected)}), so "
                "the exported model would be useless.",
                code="unsupported-tokenizer",
                place=f"{where}.tokenizer",
                remedy="Use a tokenizer of that class (model.tokenizer=FOLDER), or another model_type.",
            )
