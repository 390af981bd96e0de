"""Texts to predict, read in chunks: a file may be larger than memory.

Every row counts, so that predictions keep their place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastloop import Problem
from fastloop.errors import RecipeError
from fastloop.problem import counted_of
from fastloop_plugins._mapped import flat
from fastloop_plugins.rows.paths import find_files
from fastloop_plugins.rows.table import Bad
from fastloop_plugins.text.columns import Text, are_empty, each_text, join_columns, token_types
from fastloop_plugins.text.encoding import encode
from fastloop_plugins.text.sequences import Sequences, describe_cut

if TYPE_CHECKING:
    from fastloop_plugins.text.data import TextData
    from fastloop_plugins.text.model import TextModel

logger = logging.getLogger("fastloop")
T = TypeVar("T")


def read_chunks(
    data: TextData, source: Path | Iterable[str], start: int, size: int
) -> Iterator[tuple[list[Sequence[Any]], Bad]]:
    """The rows of a file, ``size`` at a time, from row ``start``, and a function that refuses one of them; or the given
    texts, as rows of one column.

    Raises:
        RecipeError: The file does not exist, its format is unknown, or it lacks a column.
    """
    if isinstance(source, Path):
        path = find_files(data.recipe, str(source), "predict", "FILE", data.formats)[0]
        rows = data.layout(predicts=True).rows(str(path))
    else:
        rows = ((f"text {number}", (text,)) for number, text in enumerate(source, 1))
    return chunks_of(rows, start, size)


def chunks_of(rows: Iterable[tuple[str, T]], start: int, size: int) -> Iterator[tuple[list[T], Bad]]:
    """Rows, ``size`` at a time, from row ``start``, and a function that refuses one of them.

    Args:
        rows: The name of each row in messages, and the row.
    """
    rest = islice(rows, start, None)
    chunk = list(islice(rest, size))
    while chunk:
        places = [place for place, _ in chunk]
        yield [row for _, row in chunk], partial(_refuse, places)
        chunk = list(islice(rest, size))


def _refuse(places: Sequence[str], index: int, problem: str) -> None:
    raise RecipeError(problem, code="invalid-row", place=places[index])


class EmptyTexts:
    """Counts the texts to predict that are empty. Each one gets a prediction, which means nothing."""

    def __init__(self) -> None:
        self.total = 0
        self.empty = 0

    def add(self, row: Text) -> None:
        """Count a row: a text, or the texts of several columns."""
        self.total += 1
        if not any(text.strip() for text in each_text([row])):
            self.empty += 1

    def warn(self, texts: str) -> None:
        """Log how many there are.

        Args:
            texts: Their name in the message.
        """
        if self.empty:
            empty = counted_of(self.empty, self.total, texts)
            verb = are_empty(self.empty)
            logger.warning(
                Problem(
                    f"{empty} {verb}. The prediction of an empty text means nothing.",
                    code="empty-texts",
                    place="data: predict",
                    remedy="Leave such texts out of the input.",
                )
            )


def text_chunks(
    data: TextData, source: Path | Iterable[str], start: int, size: int
) -> Iterator[tuple[list[Text], Bad]]:
    """``read_chunks`` as texts. At the end, logs how many are empty."""
    if not isinstance(source, Path) and len(data.columns) > 1:
        raise RecipeError(
            f"found {data.columns}, and a text given by itself has one column. Predict a file with these.",
            code="missing-column",
            place=f"{data.where}.text",
        )
    empty = EmptyTexts()
    for rows, bad in read_chunks(data, source, start, size):
        columns = list(zip(*rows, strict=True))
        count = len(data.columns)
        by_name = {}
        for name, values in zip(data.columns, columns[:count], strict=True):
            by_name[name] = data.read_column(values, name, bad)
        optional = {}
        if len(columns) > count:  # texts by themselves have no optional columns
            optional = dict(zip(data.optional_text_columns(), columns[count:], strict=True))
        data.add_optional_texts(by_name, optional, bad)
        texts_by_column = list(by_name.values())
        if len(texts_by_column) == 1:
            texts = list[Text](texts_by_column[0])
        else:
            texts = list[Text](zip(*texts_by_column, strict=True))
        for text in texts:
            empty.add(text)
        yield texts, bad
    empty.warn("texts")


def token_chunks(
    data: TextData,
    model: TextModel,
    source: Path | Iterable[str],
    start: int,
    size: int,
    arguments: Mapping[str, Any],
    begin: Callable[[list[int]], list[int]] | None = None,
) -> Iterator[Sequences]:
    """``text_chunks`` as token ids.

    Args:
        model: With its tokenizer loaded.
        arguments: Arguments of the tokenizer.
        begin: Adds special tokens to the ids of a text, such as ``SpecialTokens.begin``.
    """
    types = token_types(data.columns, model)
    facts: dict[str, int] = {}
    has_warned = False
    for texts, _ in text_chunks(data, source, start, size):
        encoded = encode(model.tokenizer, join_columns(texts, model), {**arguments, **types}, facts)
        ids, lengths = flat(encoded if begin is None else map(begin, encoded))
        if facts["cut"] and not has_warned:
            logger.warning(
                describe_cut("predict, first rows", facts["cut"], len(texts), "texts", data.options.max_length)
            )
            has_warned = True
        yield Sequences(ids, lengths, typed=bool(types))
