"""Options of ``data`` that texts and images share: ``read``, ``splits`` and ``limit``."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Literal

from fastloop import option


@dataclass(kw_only=True)
class Read:
    """``data.read``: options for reading files whose names and first bytes do not determine them."""

    delimiter: str | None = option("Character between cells of .csv and .tsv files; tab for a tab.", default=None)
    columns: list[str] | None = option(
        "Names of the columns of .csv and .tsv files without a header line.", default=None
    )
    encoding: str | None = option("Encoding of text files without a byte-order mark; null: utf-8.", default=None)
    quoting: Literal["double", "none"] | None = option(
        "double: quoted cells may span lines, with doubled quotes; none: quotes are text; null: double, an error "
        "if in doubt.",
        default=None,
    )
    compression: Literal["gzip", "bz2", "zstd", "none"] | None = option(
        "null: by suffix and first bytes.", default=None
    )
    blank_lines: bool = option("Read each .txt file as one text, with its blank lines and line ends.", default=False)
    max_row_mib: int = option(
        "MiB of a row at most: a line, the lines of a quoted cell, an element of a list, or a paragraph.",
        default=16,
        ge=1,
    )
    max_expansion: int = option(
        "Times its size that a compressed or Parquet file may expand to; one row of max_row_mib always may.",
        default=50,
        ge=1,
    )

    def __post_init__(self) -> None:
        if self.delimiter in ("tab", "\\t"):
            self.delimiter = "\t"
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ValueError(f"delimiter: found {self.delimiter!r}, expected one character, such as ; or tab.")
        if self.columns is not None and (not self.columns or len(set(self.columns)) < len(self.columns)):
            raise ValueError(f"columns: found {self.columns}, expected a name for each column, each name once.")
        try:
            io.TextIOWrapper(io.BytesIO(), encoding=self.encoding)
        except (LookupError, ValueError):
            raise ValueError(
                f"encoding: found {self.encoding!r}, expected a text encoding of Python, such as cp1252."
            ) from None


@dataclass(kw_only=True)
class Splits:
    """``data.splits``: the names of the splits in the source. ``fastloop.splits`` has those in a run."""

    train: str = option("the source's name of the split to train on", default="train")
    validation: str | None = option("the source's name of the split to evaluate on", default="validation")
    test: str | None = option("the source's name of the split to test on", default="test")


@dataclass(kw_only=True)
class Limit:
    """``data.limit``: split -> samples to keep, drawn at random."""

    train: int | None = option("samples", default=None, ge=1)
    validation: int | None = option("samples", default=None, ge=1)
    test: int | None = option("samples", default=None, ge=1)
