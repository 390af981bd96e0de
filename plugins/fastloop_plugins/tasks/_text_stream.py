"""Texts to predict, read in chunks: a file may be larger than memory.

Every row counts, so that predictions keep their place."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop.errors import RecipeError
from fastloop_plugins._cache import flat
from fastloop_plugins.tasks._streaming_formats import batch_rows
from fastloop_plugins.tasks._text_batches import Sequences, describe_cut
from fastloop_plugins.tasks._text_columns import Text, join_columns, token_types
from fastloop_plugins.tasks._text_files import (
    explain_reading,
    format_of,
    make_part,
    missing_column,
    open_text,
    parse_json,
    read_file,
    show,
)
from fastloop_plugins.tasks._text_paths import find_files
from fastloop_plugins.tasks._text_tokens import encode

if TYPE_CHECKING:
    from fastloop_plugins.tasks._text_data import TextData
    from fastloop_plugins.tasks._text_files import Read
    from fastloop_plugins.tasks._text_model import TextModel

logger = logging.getLogger("fastloop")

FIRST = 2**20
"""Characters of a file in which its first row must end for ``first_columns``."""


def text_chunks(data: TextData, source: Path | Iterable[str], start: int, size: int) -> Iterator[list[Text]]:
    """The texts of a file, ``size`` at a time, from row ``start``; or the given texts.

    Raises:
        RecipeError: The file does not exist, its format is unknown, or it has no column ``data.text``.
    """
    if isinstance(source, Path):
        texts: Iterator[Text] = read_texts(find_files(data.recipe, str(source), "predict", "FILE")[0], data)
    elif len(data.columns) > 1:
        raise RecipeError(
            f"{data.where}.text: found {data.columns}, and a text given by itself has one column. Predict a file "
            "with these."
        )
    else:
        texts = iter(source)
    texts = islice(texts, start, None)
    while chunk := list(islice(texts, size)):
        yield chunk


def token_chunks(
    data: TextData,
    model: TextModel,
    source: Path | Iterable[str],
    start: int,
    size: int,
    arguments: Mapping[str, Any],
    label: Sequence[float] = (),
) -> Iterator[Sequences]:
    """``text_chunks`` as token ids. The label of each is 0, for collators that expect one, or ``label``.

    Args:
        model: With its tokenizer loaded.
        arguments: Arguments of the tokenizer.
    """
    import numpy as np

    types, facts, has_warned = token_types(data.columns, model), dict[str, int](), False
    for texts in text_chunks(data, source, start, size):
        ids, lengths = flat(encode(model.tokenizer, join_columns(texts, model), [], {**arguments, **types}, facts))
        if facts["cut"] and not has_warned:
            logger.warning(
                "%s", describe_cut("predict, first rows", facts["cut"], len(texts), "texts", data.options.max_length)
            )
            has_warned = True
        labels = np.array([label] * len(texts), dtype=np.float32) if label else np.zeros(len(texts), dtype=np.int64)
        yield Sequences(ids, lengths, labels, typed=bool(types))


def read_texts(path: Path, data: TextData) -> Iterator[Text]:
    """Yield the columns ``data.text`` of a file. In a .txt file, each line is a text, or all of it with
    ``data.read.blank_lines``."""
    with explain_reading(path, data.how):
        for number, values in enumerate(read_values(path, data), 1):
            for name, value in zip(data.columns, values, strict=True):
                if not isinstance(value, str | None):
                    raise RecipeError(
                        f"{path}, row {number}: column {name!r} (data.{data.text_key}) holds {show(value)}, "
                        "expected text."
                    )
            texts = tuple(value or "" for value in values)
            yield texts if len(texts) > 1 else texts[0]


def read_values(path: Path, data: TextData, optional: Sequence[str] = ()) -> Iterator[Sequence[Any]]:
    """Yield the cells of the columns of texts, row by row, with values of any type; then those of ``optional``, None if
    not there."""
    suffix, columns, how = format_of(path)[0], data.columns, data.how
    keys, names, absent = dict.fromkeys(columns, data.text_key), [*columns, *optional], [None] * len(optional)
    if suffix in (".csv", ".tsv"):
        from fastloop_plugins.tasks._text_csv import stream_delimited

        yield from ([*cells, *absent] for cells in stream_delimited(path, how, keys))
    elif suffix == ".parquet":
        import pyarrow  # type: ignore[import-untyped]

        from fastloop_plugins.tasks._parquet_bounds import BoundedParquet

        with BoundedParquet(pyarrow.OSFile(str(path)), str(path), how) as file:
            _check_columns(path, data, file.names)
            for batch in file.batches(names):
                yield from batch_rows(batch, names)
    elif suffix == ".json" or (suffix == ".txt" and how.blank_lines):  # one document, or one a line
        part = read_file(path, how, keys)
        cells = [part.column(data.text_key, name) for name in columns]
        yield from zip(*cells, *(part.columns.get(name, [None] * len(cells[0])) for name in optional), strict=True)
    else:
        with open_text(path, how) as stream:
            for number, line in enumerate(stream, 1):
                if suffix == ".txt":
                    if len(columns) > 1:
                        raise RecipeError(
                            f"{path}: has one column, expected {columns} (data.text). Use another format."
                        )
                    yield [line.rstrip("\r\n"), *absent]
                elif line.strip():
                    part = make_part(f"{path}, line {number}", [parse_json(path, number, line)])
                    if number == 1:
                        _check_columns(path, data, part.columns)
                    yield [part.columns.get(name, [None])[0] for name in names]


def first_columns(path: Path, how: Read) -> list[str]:
    """The columns of a .parquet file, or those of the first row of a .jsonl or .json file. Empty if they cannot be
    read."""
    import pyarrow
    from pyarrow import parquet

    try:
        if format_of(path)[0] == ".parquet":
            return list(parquet.read_schema(path).names)
        if format_of(path)[0] in (".json", ".jsonl"):
            with open_text(path, how) as stream:
                row = json.JSONDecoder().raw_decode(stream.read(FIRST).lstrip("[ \t\r\n"))[0]
            return list(row) if isinstance(row, dict) else []
    except (OSError, ValueError, RecursionError, RecipeError, pyarrow.ArrowException):
        pass  # reading the file reports it
    return []


def _check_columns(path: Path, data: TextData, there: Iterable[str]) -> None:
    names = list(there)
    for name in data.columns:
        if name not in names:
            raise missing_column(str(path), data.text_key, name, names)
