"""The texts of a row: one column, two as a pair of the tokenizer, or several joined with its separator token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastloop import Problem
from fastloop.errors import RecipeError
from fastloop.problem import agree, counted_of
from fastloop_plugins.rows.column import Column
from fastloop_plugins.rows.drop import drop_line
from fastloop_plugins.rows.split_rows import BlankTexts
from fastloop_plugins.rows.table import Table, same_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastloop_plugins.text.model import TextModel

Text = str | tuple[str, ...]
"""The texts of a row: a string for one column, else one string for each column."""


def column_names(value: str | list[str], where: str) -> list[str]:
    """The columns that an option names.

    Raises:
        RecipeError: The list is empty, or repeats a name.
    """
    names = [value] if isinstance(value, str) else value
    if not names or len(set(names)) < len(names):
        raise RecipeError(
            code="wrong-type", place=where, found=str(names), expected="a column, or a list of different columns"
        )
    return names


def refuse_empty(role: str, parts: Sequence[Table]) -> RecipeError:
    """The error for a split without rows."""
    where = ", ".join(part.where for part in parts)
    return RecipeError(
        f"the {role} split is empty.",
        code="empty-split",
        place=where,
        expected="at least one row (data.files, data.splits)",
    )


def describe_empty(parts: Sequence[Table]) -> list[Problem]:
    """A warning if some of a split's files have no rows, as after a copy that failed. None if all are empty, which
    ``refuse_empty`` explains."""
    empty = [part.where for part in parts if not len(part)]
    if len(empty) in (0, len(parts)):
        return []
    text = (
        f"{counted_of(len(empty), len(parts), 'files')} {agree(len(empty), 'has', 'have')} no rows. This is the first."
    )
    remedy = "If it should have some, write or copy it again."
    return [Problem(text, code="empty-file", place=empty[0], remedy=remedy)]


def describe_alike(parts: Iterable[Table], keys: Mapping[str, str]) -> list[Problem]:
    """A warning for each column that is read, if a file has another one whose name differs only by case, spaces, or
    characters that cannot be seen.

    Args:
        keys: Column that is read -> the option of ``data`` that names it.
    """
    problems: dict[tuple[str, str], Problem] = {}  # both columns -> the warning for the first file that has them
    for part in parts:
        names = [str(name) for name in part.all_names()]
        for read, key in keys.items():
            for other in names:
                if other in keys or read not in names or same_name(other) != same_name(read):
                    continue
                text = f"there are the columns {read!r} and {other!r}. Only {read!r} is read (data.{key})."
                remedy = "If they are one column, give them one name."
                warning = Problem(text, code="alike-columns", place=part.where, remedy=remedy)
                problems.setdefault((read, other), warning)
    return list(problems.values())


def are_empty(count: int) -> str:
    """The predicate of a sentence about ``count`` texts that ``data.drop`` calls empty."""
    return f"{agree(count, 'is', 'are')} empty or {agree(count, 'has', 'have')} only spaces"


def check_texts(
    blank: Mapping[str, BlankTexts], total: int, parts: Sequence[Table], keys: Mapping[str, str]
) -> list[Problem]:
    """Check the texts of a split. Returns a warning for each column with blank texts.

    Args:
        blank: The blank texts of each column.
        total: Rows of the split.
        keys: Column -> the option of ``data`` that names it.

    Raises:
        RecipeError: All texts of a column are blank.
    """
    where = ", ".join(part.where for part in parts)
    problems = []
    for (name, key), of_column in zip(keys.items(), blank.values(), strict=True):
        if of_column.count == total:
            raise RecipeError(
                f"all {total} texts in column {name!r} are empty or have only spaces (data.{key}).",
                code="empty-column",
                place=where,
            )
        if of_column.count:
            first = f"the first in {name_of_row(parts, of_column.first)}: column {name!r} (data.{key})"
            empty = counted_of(of_column.count, total, "texts")
            verb = are_empty(of_column.count)
            remedy = drop_line(name, "empty: true")
            problems.append(Problem(f"{empty} {verb}, {first}.", code="empty-texts", place=where, remedy=remedy))
    return problems


def name_of_row(parts: Sequence[Table], row: int) -> str:
    """The name of a row in messages, counted from 0 over all parts."""
    for part in parts:
        size = len(part)
        if row < size:
            return part.row(row + 1)
        row -= size
    raise IndexError(row)


def each_text(rows: Iterable[Text]) -> Iterator[str]:
    """Yield the texts of all columns, row by row."""
    for row in rows:
        if isinstance(row, str):
            yield row
        else:
            yield from row


def token_types(names: Sequence[str], model: TextModel) -> dict[str, bool]:
    """The tokenizer's argument for token types, if the rows are pairs and the model has an embedding for the second
    text of a pair.

    Call it after ``TextModel.load_tokenizer``.
    """
    has_separator = model.tokenizer is None or model.tokenizer.sep_token is not None
    types = getattr(model.config, "type_vocab_size", None) or 0
    if len(names) == 2 and has_separator and types > 1:
        return {"return_token_type_ids": True}
    return {}


def return_token_types(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a tokenizer return token types by default, also when it is saved and loaded again.

    A model that was trained with them computes something else without them, and a tokenizer of the general class
    ``PreTrainedTokenizerFast`` leaves them out unless it was saved with this setting.
    """
    names = list(tokenizer.model_input_names)
    if "token_type_ids" not in names:
        tokenizer.model_input_names = [names[0], "token_type_ids", *names[1:]]
        tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names  # which ``save_pretrained`` writes


def join_columns(texts: Sequence[Text], model: TextModel) -> Sequence[Text]:
    """Rows of one text or of a pair: more columns become one text, with the separator token between them.

    A tokenizer without a separator token gets its end token between texts, also between two.

    Raises:
        RecipeError: The tokenizer has neither.
    """
    if not texts or isinstance(texts[0], str):
        return texts
    is_pair = len(texts[0]) == 2 and model.tokenizer.sep_token is not None
    if is_pair:
        return texts
    separator = model.tokenizer.sep_token or model.tokenizer.eos_token
    if separator is None:
        raise RecipeError(
            "it has no separator or end token to put between the columns of data.text.",
            code="no-separator",
            place=f"{model.where}.tokenizer",
            remedy="Use another.",
        )
    return Column(f" {separator} ".join(row) for row in texts)


def kept_part(text: str, size: int, side: str) -> str:
    """The words at one end of a text, up to ``size`` characters. A text that is shorter, or has no space in this part,
    is returned whole.

    Args:
        side: The side on which the tokenizer truncates. ``right``: the first words are kept; ``left``: the last words,
            with the space before them.
    """
    if len(text) <= size:
        return text
    if side == "left":
        starts = [text.find(" ", len(text) - size), text.find("\n", len(text) - size)]
        start = min((start for start in starts if start >= 0), default=0)
        return text[start:]
    end = max(text.rfind(" ", 0, size), text.rfind("\n", 0, size))
    return text[:end] if end > 0 else text


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase,
    pairs: Iterable[tuple[str, str]],
    most: int,
    size: int,
    arguments: dict[str, Any],
) -> Iterator[tuple[list[int], bool]]:
    """Yield the ids of each pair, and whether truncation shortened it. With token types, the type of each token follows
    the ids.

    The longer text of a pair is truncated first.

    Args:
        most: Tokens that truncation keeps; 0: all.
        size: Characters of a text to read, if these have ``most`` tokens.
    """
    from fastloop_plugins.text.encoding import shortened
    from fastloop_plugins.text.encoding_processes import portions

    def start(text: str) -> str:
        if not most:
            return text
        part = kept_part(text, size, tokenizer.truncation_side)
        if len(part) == len(text):
            return text
        tokens = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        return part if len(tokens) >= most else text

    for portion in portions(pairs):
        first_texts = [start(first) for first, _ in portion]
        second_texts = [start(second) for _, second in portion]
        encoded = tokenizer(first_texts, second_texts, return_attention_mask=False, **arguments)
        rows = encoded["input_ids"]
        types: list[list[int]] = [[]] * len(rows)
        if "return_token_type_ids" in arguments:
            types = encoded["token_type_ids"]
        cuts = shortened(tokenizer, [first_texts, second_texts], rows, encoded.encodings, most, arguments)
        for ids, kinds, cut in zip(rows, types, cuts, strict=True):
            yield ids + kinds, cut
