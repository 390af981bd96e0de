"""Token ids of sentences of tagged words.

A row of the cache has two numbers for each token: its id and its *target*. The target of a word's first token is the id
of the word's tag. That of its other tokens is ``~id``, which is negative, and so is that of a space before the word, if
the space is a token of its own. A sentence without words has one token, with the target ``~0``.

Words are read as the text that joins them by single spaces, so a tokenizer gives the ids of that text. Tokenized one by
one, words would lose the space before them, which many tokenizers read as a part of the word: "left" and " left" are
two tokens of Llama and Qwen.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastloop_plugins.rows.table import RowError
from fastloop_plugins.text.encoding_processes import portions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKS = ("▁", "Ġ")
"""Tokens of a space alone."""


def encode_rows(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any]) -> Iterator[list[int]]:
    """Yield the ids and targets of each row, in turn: ``[id, target, id, target, ...]``. No special tokens, no
    truncation.

    The ids are those of the text that joins the words by single spaces. A word without a token, such as a control
    character, gets the unknown token. A row without words gets one that begins no word.

    Args:
        rows: Words and the ids of their tags.

    Raises:
        RowError: A token of the next row covers two words.
    """
    stand_in = tokenizer.unk_token_id if tokenizer.unk_token_id is not None else tokenizer.pad_token_id
    spaces_begin = puts_spaces_into_words(tokenizer)
    for sentences in portions(rows):
        encoded = tokenizer(
            [" ".join(words) or "a" for words, _ in sentences],
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )
        for (words, tags), encoding in zip(sentences, encoded.encodings, strict=True):
            if not words:
                yield [stand_in, ~0]
                continue
            offsets = encoding.offsets
            if not spaces_begin:
                offsets = without_marks(" ".join(words), encoding.tokens, offsets)
            try:
                word_ids = find_words(words, offsets, encoding.word_ids, spaces_begin)
            except CoveredWords as error:
                token = encoding.tokens[error.token]
                first = words[error.word]
                second = words[error.word + 1]
                raise RowError(
                    f"the tokenizer {type(tokenizer).__name__} reads parts of two words as one token, {token!r}: of "
                    f"{first!r} and {second!r}. A token can have only one tag. Use another tokenizer."
                ) from None
            yield pairs(encoding.ids, word_ids, tags, stand_in)


def puts_spaces_into_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a space is always a part of the word after it: true for most tokenizers with a mark of spaces, such as
    those of XLM-R ("▁5") and GPT-2 ("Ġ5"). Others read the space before a number alone ("Ġ", "5" of Qwen), or divide
    no text at spaces (Gemma)."""
    pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    if pre_tokenizer is None:
        return False
    parts = [part for part, _ in pre_tokenizer.pre_tokenize_str("x 5")]
    return len(parts) == 2 and parts[1] != "5"


def without_marks(text: str, tokens: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The characters of each token, and none for the mark of a space. A tokenizer that puts a space before a text, such
    as Llama 2's, counts the first character to both: "7" has the tokens "▁" and "7", both at (0, 1)."""
    spans = list[tuple[int, int]]()
    for token, (start, end) in zip(tokens, offsets, strict=True):
        is_mark = token in MARKS and text[start:end] != token
        spans.append((start, start) if is_mark else (start, end))
    return spans


class CoveredWords(Exception):
    """A token covers characters of two words: ``word`` and the next one."""

    def __init__(self, token: int, word: int) -> None:
        super().__init__(token, word)
        self.token = token
        self.word = word


def find_words(
    words: Sequence[str], offsets: Sequence[tuple[int, int]], parts: Sequence[int | None], spaces_begin: bool
) -> list[int]:
    """The word of each token of the text that joins ``words`` by single spaces; ``~word`` for a token of the space
    before a word, which shows nothing of it. Only here does ``~`` mark spaces: ``pairs`` makes targets of the words.

    The text of ["in", "1996"] has the tokens "in", " ", "19" and "96" at [(0, 2), (2, 3), (3, 5), (5, 7)]. Their words
    are [0, ~1, 1, 1], or [0, 1, 1, 1] if ``spaces_begin`` and the space and "19" are of one part.

    Args:
        offsets: The characters of each token: the first one, and the one after the last.
        parts: The number of each token's part of the text, as the pre-tokenizer divides it. A token that was added to
            the tokenizer, such as "<name>", is a part of its own.
        spaces_begin: Whether the token of a space is the first one of its word, if it is of the same part. A model that
            reads to the left, such as Llama, knows nothing of the word there.

    Raises:
        CoveredWords: A token covers characters of two words.
    """
    text = " ".join(words)
    ends = list[int]()  # of ["in", "1996"]: [2, 7]
    start_of_next = 0
    for word in words:
        ends.append(start_of_next + len(word))
        start_of_next = ends[-1] + 1
    word_ids = list[int]()
    for token, (start, end) in enumerate(offsets):
        shown = text[start:end]
        if not shown.strip():
            next_word = min(bisect_right(ends, start), len(words) - 1)
            is_last = token + 1 == len(parts)
            begins = spaces_begin and not is_last and parts[token] == parts[token + 1]
            word_ids.append(next_word if begins else ~next_word)
            continue
        first = bisect_right(ends, start + len(shown) - len(shown.lstrip()))
        last = bisect_left(ends, start + len(shown.rstrip()))
        if first != last:
            raise CoveredWords(token, first)
        word_ids.append(first)
    return word_ids


def pairs(ids: Sequence[int], word_ids: Sequence[int], tags: Sequence[int], stand_in: int) -> list[int]:
    """Ids and targets of one sentence, in turn.

    For the ids [5, 6, 7, 8] of "in", " ", "19" and "96", the words [0, ~1, 1, 1] and the tags [3, 4], the pairs are
    [5, 3, 6, ~4, 7, 4, 8, ~4].

    Args:
        ids: Ids of the tokens.
        word_ids: The word of each token, or ``~word`` for a space, as ``find_words`` returns it.
        tags: The tag of each word.
        stand_in: The id of a token for a word without one.
    """
    numbers = list[int]()
    newest = -1
    for token, word in zip(ids, word_ids, strict=True):
        if word < 0:
            numbers += (token, ~tags[~word])
            continue
        if word == newest:
            numbers += (token, ~tags[word])
            continue
        for tag in tags[newest + 1 : word]:
            numbers += (stand_in, tag)
        numbers += (token, tags[word])
        newest = word
    for tag in tags[newest + 1 :]:
        numbers += (stand_in, tag)
    return numbers
