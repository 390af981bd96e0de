"""The suffixes of files: their formats, and the compressions of files of lines."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

FORMATS = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".arrow", ".txt")
"""Suffixes of the files that text tasks read. ``formats.READERS`` has a reader for each; this module is apart because
it imports none of them."""
CONLL = ".conll"
"""Suffix of CoNLL files, which token classification reads, too."""
GROUP = "fastloop.formats"
"""Entry-point group of readers of other packages. The name of an entry is a suffix, such as ``.toml``, and its value a
class that extends ``File``."""
COLUMN_FORMATS = (".arrow", ".parquet")
"""Formats whose files are not compressed as a whole, and have no encoding."""
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Suffix after that of the format -> codec, by pyarrow's name."""
ARCHIVES = {".tar": " For archives of WebDataset, which `datasets` reads: data.name=FOLDER, with only them in it."}
"""Suffix of archives -> what to do instead of naming them in ``data.files``."""


@cache
def installed_formats() -> dict[str, EntryPoint]:
    """Suffix -> reader, of the formats that other packages read. They replace none of ``FORMATS``."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in FORMATS}


def format_of(path: Path) -> tuple[str, str | None]:
    """The suffix of the format, such as ``.csv``, and the codec of a suffix after it, if any."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    codec = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    suffix = "".join(suffixes[-1:] if codec is None else suffixes[-2:-1])
    return suffix, codec
