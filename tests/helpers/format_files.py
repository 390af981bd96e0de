"""Files of every format with the same rows, some of which are hard to read."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
from streaming_helpers import NAMES, write_arrow, write_parquet
from text_helpers import rows

ROWS = 200
CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


def table(count: int = ROWS) -> list[dict[str, Any]]:
    """Rows with line ends, quotes and delimiters in some texts."""
    found = rows(count, NAMES)
    for number, row in enumerate(found):
        row["text"] += ("", "\nindeed", ' "fine", or so', "\tfilm", " é")[number % 5]
    return found


def write(path: str, content: list[dict[str, Any]]) -> str:
    """A file of the format and compression that its name shows. Lines of files of lines have gaps and no last line
    end."""
    inner = path
    codec = next((codec for suffix, codec in CODECS.items() if path.endswith(suffix)), None)
    if codec is not None:
        inner = path.rpartition(".")[0]
    if inner.endswith(".arrow"):
        write_arrow(inner, content, group=20)
    elif inner.endswith(".parquet"):
        write_parquet(inner, content, group=20)
    elif inner.endswith(".json"):
        Path(inner).write_text(json.dumps(content, indent=1))
    elif inner.endswith(".jsonl"):
        Path(inner).write_text("\n\n".join(json.dumps(row) for row in content))
    else:
        with Path(inner).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(
                file, ["label", "text"], delimiter="\t" if inner.endswith(".tsv") else ",", lineterminator="\r\n"
            )
            writer.writeheader()
            for number, row in enumerate(content):
                writer.writerow(row)
                if number % 50 == 49:
                    file.write("\r\n")
    if codec is not None:
        with pyarrow.output_stream(path, compression=codec) as packed:
            packed.write(Path(inner).read_bytes())
    return path
