"""Texts to predict, read in chunks: a file may be larger than memory. Every row counts, so that predictions keep their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop.errors import RecipeError
from fastloop_plugins._cache import flat
from fastloop_plugins.tasks._text_batches import Sequences
from fastloop_plugins.tasks._text_files import explain_reading, format_of, make_part, missing_column, open_text, parse_json, read_file, show
from fastloop_plugins.tasks._text_paths import find_files
from fastloop_plugins.tasks._text_tokens import encode

if TYPE_CHECKING:
    from fastloop_plugins.tasks._text_data import TextData


def text_chunks(data: TextData, source: Path | Iterable[str], start: int, size: int) -> Iterator[list[str]]:
    """The texts of a file, ``size`` at a time, from row ``start``; or the given texts.

    Raises:
        RecipeError: The file does not exist, its format is unknown, or it has no column ``data.text``.
    """
    texts = iter(source) if not isinstance(source, Path) else read_texts(find_files(data.recipe, str(source), "predict", "FILE")[0], data)
    texts = islice(texts, start, None)
    while chunk := list(islice(texts, size)):
        yield chunk


def token_chunks(
    data: TextData, tokenizer: Any, source: Path | Iterable[str], start: int, size: int, arguments: Mapping[str, Any]
) -> Iterator[Sequences]:
    """``text_chunks`` as token ids. The label of each is 0, for collators that expect one.

    Args:
        arguments: Arguments of the tokenizer.
    """
    import numpy as np

    for texts in text_chunks(data, source, start, size):
        ids, lengths = flat(encode(tokenizer, texts, [], dict(arguments)))
        yield Sequences(ids, lengths, np.zeros(len(texts), dtype=np.int64))


def read_texts(path: Path, data: TextData) -> Iterator[str]:
    """Yield the column ``data.text`` of a file. In a .txt file, each line is a text."""
    with explain_reading(path, data.how):
        for number, value in enumerate(_values(path, data), 1):
            if not isinstance(value, str | None):
                column = f"column {data.options.text!r} (data.text)"
                raise RecipeError(f"{path}, row {number}: {column} holds {show(value)}, expected text.")
            yield value or ""


def _values(path: Path, data: TextData) -> Iterator[Any]:
    suffix, text, how = format_of(path)[0], data.options.text, data.how
    if suffix in (".csv", ".tsv"):
        from fastloop_plugins.tasks._text_csv import stream_delimited

        yield from stream_delimited(path, how, text)
    elif suffix == ".parquet":
        from pyarrow import parquet  # type: ignore[import-untyped]

        with parquet.ParquetFile(path) as file:
            if text not in file.schema_arrow.names:
                raise missing_column(str(path), "text", text, file.schema_arrow.names)
            for batch in file.iter_batches(columns=[text]):
                yield from batch.column(0).to_pylist()
    elif suffix == ".json":  # one document, or one a line
        yield from read_file(path, how, text).column("text", text)
    else:
        with open_text(path, how) as stream:
            for number, line in enumerate(stream, 1):
                if suffix == ".txt":
                    yield line.rstrip("\r\n")
                elif line.strip():
                    part = make_part(f"{path}, line {number}", [parse_json(path, number, line)])
                    if number == 1 and text not in part.columns:
                        raise missing_column(str(path), "text", text, part.columns)
                    yield part.columns.get(text, [None])[0]
