"""Token ids of sentences that are lists of words, and the model section of ``token-classification``.

A row of the cache has two numbers for each token: its id and its *target*. The target of a word's first token is the id
of the word's tag, and that of its other tokens is ``~id``, which is negative.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop import RecipeError
from fastloop_plugins.text.task import AnyModel
from fastloop_plugins.text.tokens import portions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop.recipe import Recipe
    from fastloop_plugins.tasks.tags.data import TagTextData

EXAMPLES = "bert, distilbert, roberta, deberta-v2, modernbert or xlm-roberta"
"""Architectures for messages."""


class TagModel(AnyModel):
    """The ``model`` section, with a tokenizer for words.

    Args:
        data: In inference, its ``classes`` become those of the model.
    """

    head = "ForTokenClassification"
    label_key = "data.tags"

    def __init__(self, recipe: Recipe, data: TagTextData) -> None:
        super().__init__(recipe, "AutoModelForTokenClassification", what="token classifier", examples=EXAMPLES)
        self.data, self.problem_type = data, None

    def load_tokenizer(self, max_length: int) -> None:
        super().load_tokenizer(max_length)
        if self.recipe.inference is not None:
            self.data.classes = self.class_names()
        if self.tokenizer is not None:
            self._separate_words()

    def finish_tokenizer(self, texts: list[Any], max_length: int, types: bool = False) -> None:
        if self.trained is not None:
            super().finish_tokenizer([" ".join(["", *words]) for words, _ in texts], max_length)
            self._separate_words()

    def _separate_words(self) -> None:
        """Make a byte-level tokenizer put a space before each word, as in a text.

        Raises:
            RecipeError: The tokenizer does not map tokens to words.
        """
        from tokenizers.pre_tokenizers import ByteLevel
        from transformers import AutoTokenizer

        if not self.tokenizer.is_fast:
            raise RecipeError(
                f"{self.where}.tokenizer: {type(self.tokenizer).__name__} does not map tokens to words. Use a fast "
                "tokenizer."
            )
        found = self.tokenizer.backend_tokenizer.pre_tokenizer
        if not isinstance(found, ByteLevel) or found.add_prefix_space:
            return
        if self.trained is None:
            source = "tokenizer" if isinstance(self.options.tokenizer, str) else "name"
            self.tokenizer = self._pretrained(AutoTokenizer, source, add_prefix_space=True)
            self._ensure_pad_token()
        found.add_prefix_space = True
        self.tokenizer.backend_tokenizer.pre_tokenizer = found

    def room(self, max_length: int) -> tuple[int, int]:
        """Tokens of a row for words, and its special tokens.

        Raises:
            RecipeError: There is no room.
        """
        special = sum(map(len, self.special))
        if max_length <= special:
            raise RecipeError(
                f"{self.recipe.where}: data.max_length: found {max_length}, and a row has {special} special tokens. "
                "Expected more."
            )
        return max_length - special, special

    @cached_property
    def special(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids of the tokens before and after a sentence. Read it when the tokenizer is complete."""
        found = self.tokenizer(["a"], is_split_into_words=True, return_special_tokens_mask=True)
        ids, is_special = found["input_ids"], found["special_tokens_mask"]
        words = len(self.tokenizer(["a"], is_split_into_words=True, add_special_tokens=False)["input_ids"])
        before = is_special.index(0) if 0 in is_special else len(ids) - words
        return np.array(ids[:before], dtype=np.int32), np.array(ids[before + words :], dtype=np.int32)


def encode_rows(tokenizer: Any, rows: Sequence[Any]) -> Iterator[list[int]]:
    """Yield the ids and targets of each row, in turn: ``[id, target, id, target, ...]``. No special tokens, no
    truncation.

    A word without a token, such as a control character, gets the unknown token. A row without words gets one that
    begins no word.

    Args:
        rows: Words and the ids of their tags.
    """
    stand_in = tokenizer.unk_token_id if tokenizer.unk_token_id is not None else tokenizer.pad_token_id
    for sentences in portions(rows):
        found = tokenizer(
            [words or ["a"] for words, _ in sentences],
            is_split_into_words=True,
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )
        for index, (words, tags) in enumerate(sentences):
            yield pairs(found["input_ids"][index], found.word_ids(index), tags, stand_in) if words else [stand_in, ~0]


def pairs(ids: Sequence[int], word_ids: Sequence[int], tags: Sequence[int], stand_in: int) -> list[int]:
    """Ids and targets of one sentence, in turn.

    Args:
        ids: Ids of the tokens.
        word_ids: The word of each token, from 0, as a fast tokenizer returns it.
        tags: The tag of each word.
        stand_in: The id of a token for a word without one.
    """
    found, newest = list[int](), -1
    for token, word in zip(ids, word_ids, strict=True):
        if word == newest:
            found += (token, ~tags[word])
            continue
        for tag in tags[newest + 1 : word]:
            found += (stand_in, tag)
        found += (token, tags[word])
        newest = word
    for tag in tags[newest + 1 :]:
        found += (stand_in, tag)
    return found
