"""Encodes texts: the token ids of each, cut at ``max_length``.

A huge text is read only as far as truncation can keep it. The backend of a tokenizer encodes many texts at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastloop_plugins.text.columns import Text, encode_pairs, kept_part
from fastloop_plugins.text.encoding_processes import portions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS = 50
"""Characters to read for each token that truncation keeps. Without this limit, tokenizing one huge text takes a
minute."""


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    arguments: dict[str, Any],
    facts: dict[str, int] | None = None,
) -> Iterator[list[int]]:
    """Yield the ids of each text. Reads only the part of a huge text that truncation can keep.

    Args:
        texts: Texts, or pairs: see ``text.columns.encode_pairs``.
        facts: The number of texts that truncation shortens is added to ``cut``, before each is yielded.
    """
    if facts is None:
        facts = {}
    facts.setdefault("cut", 0)
    for ids, is_cut in encode_marked(tokenizer, texts, arguments):
        if is_cut:
            facts["cut"] += 1
        yield ids


def encode_marked(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], arguments: dict[str, Any]
) -> Iterator[tuple[list[int], bool]]:
    """Yield the ids of each text, and whether truncation shortened it. See ``encode``."""
    most: int = arguments["max_length"] if arguments.get("truncation") else 0
    rows: Any = texts
    if texts and isinstance(texts[0], tuple):
        yield from encode_pairs(tokenizer, rows, most, CHARACTERS * most, arguments)
        return
    for full in portions(rows):
        has_long = most > 0 and max(map(len, full)) > CHARACTERS * most
        read = full
        if has_long:
            side = getattr(tokenizer, "truncation_side", "right")
            read = [kept_part(text, CHARACTERS * most, side) for text in full]
        rows_of_ids, encodings = encode_batch(tokenizer, read, arguments)
        cuts = shortened(tokenizer, [read], rows_of_ids, encodings, most, arguments)
        if not has_long:
            yield from zip(rows_of_ids, cuts, strict=True)
            continue
        for text, part, ids, cut in zip(full, read, rows_of_ids, cuts, strict=True):
            if len(part) == len(text):
                yield ids, cut
            elif len(ids) < most:  # the part was too short
                whole, encodings_of_whole = encode_batch(tokenizer, [text], arguments)
                yield whole[0], shortened(tokenizer, [[text]], whole, encodings_of_whole, most, arguments)[0]
            else:
                yield ids, True


def encode_batch(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], arguments: dict[str, Any]
) -> tuple[list[list[int]], Any]:
    """The ids of texts, and their encodings in the tokenizer's backend; None: it has none.

    A call makes a dictionary for each text in one thread, which takes longer than the backend takes in all threads. So
    only the first text is given to the tokenizer, which sets its backend up, unless its class encodes in its own way.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    own = type(tokenizer)
    is_known = arguments.keys() <= {"truncation", "max_length", "add_special_tokens", "verbose"}
    is_plain = own.__call__ is PreTrainedTokenizerBase.__call__ and is_known
    if is_plain and own._encode_plus is PreTrainedTokenizerFast._encode_plus:
        tokenizer(texts[:1], return_attention_mask=False, **arguments)
        special = arguments.get("add_special_tokens", True)
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        return [encoding.ids for encoding in encodings], encodings
    encoded = tokenizer(texts, return_attention_mask=False, **arguments)
    return encoded["input_ids"], encoded.encodings


def shortened(
    tokenizer: PreTrainedTokenizerBase,
    columns: list[list[str]],
    ids: list[list[int]],
    encodings: Any,
    most: int,
    arguments: dict[str, Any],
) -> list[bool]:
    """Whether truncation shortened each row.

    Args:
        columns: The texts of the rows: one list, or two for pairs.
        ids: Their ids.
        encodings: See ``encode_batch``.
        most: Tokens that truncation keeps; 0: all.
    """
    full = [row for row, row_ids in enumerate(ids) if len(row_ids) == most]
    if not full:
        return [False] * len(ids)
    if encodings is not None:
        cut = {row for row in full if encodings[row].overflowing}
    else:  # a tokenizer in Python does not report it: read these rows again, with room for one more token
        texts = [[column[row] for row in full] for column in columns]
        longer = tokenizer(*texts, return_attention_mask=False, **{**arguments, "max_length": most + 1})["input_ids"]
        cut = {row for row, tokens in zip(full, longer, strict=True) if len(tokens) > most}
    return [row in cut for row in range(len(ids))]
