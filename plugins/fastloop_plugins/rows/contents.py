"""Refuses a file whose first bytes show another format than its name, such as a Parquet file named .csv."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from pathlib import Path

from fastloop.errors import RecipeError
from fastloop_plugins.rows.lines import CHECKED, LineFile, open_binary
from fastloop_plugins.rows.options import Read
from fastloop_plugins.rows.suffixes import COLUMN_FORMATS, CONLL, FORMATS, format_of


@dataclass(frozen=True)
class Content:
    """A kind of file.

    Attributes:
        magic: Matches its first bytes. No text file begins with them.
        name: Its name in messages.
        suffixes: The formats whose files may begin with these bytes. For a codec: those whose files may be compressed
            by it without a suffix of its own. bz2 has none, because a text file may begin with its letters.
        remedy: A sentence that names the next step, with ``{path}`` without the last suffix.
        codec: The compression that it is; empty: none.
    """

    magic: re.Pattern[bytes]
    name: str
    suffixes: tuple[str, ...]
    remedy: str
    codec: str = ""

    def is_expected(self, suffix: str, codec: str | None) -> bool:
        """Whether a file may be of this kind, by its name. Both ``a.csv`` and ``a.csv.gz`` may be compressed by gzip,
        but only ``a.csv.bz2`` by bz2.

        Args:
            suffix: That of its format, such as ``.csv``.
            codec: That of a suffix after it; None: there is none.
        """
        if self.codec and self.codec == codec:
            return True
        return suffix in self.suffixes


TEXT = tuple(suffix for suffix in (*FORMATS, CONLL) if suffix not in COLUMN_FORMATS)
CONTENTS = (
    Content(re.compile(rb"PAR1\x15"), "a Parquet file", (".parquet",), "Rename it to {path}.parquet."),
    Content(re.compile(rb"ARROW1\0\0|\xff\xff\xff\xff"), "an Arrow file", (".arrow",), "Rename it to {path}.arrow."),
    Content(
        re.compile(rb"PK\x03\x04"),
        "a ZIP archive",
        (),
        "Unpack it, and give the files in it. A workbook of Excel is such an archive, too: save it as .csv.",
    ),
    Content(re.compile(rb"SQLite format 3\0"), "an SQLite database", (), "Write its table to a .csv file."),
    Content(
        re.compile(rb"version https://git-lfs\.github\.com/spec/"),
        "a pointer of Git LFS, not the file",
        (),
        "Fetch the file: git lfs pull.",
    ),
    Content(
        re.compile(rb"\s*<(!doctype html|html)[\s>]", re.IGNORECASE),
        "a web page",
        (".txt",),
        "Download the file again: its address may have moved, or need a login.",
    ),
    Content(re.compile(rb"\0{16}"), "a file that begins with zero bytes", (), "Copy or write it again."),
    Content(re.compile(rb"%PDF-"), "a PDF document", (), "Extract its text."),
    Content(re.compile(rb"\{\\rtf"), "an RTF document", (), "Save it as plain text."),
    Content(re.compile(rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"), "an old Office document", (), "Save it as .csv."),
    Content(re.compile(rb"[\s\S]{257}ustar"), "a TAR archive", (), "Unpack it, and give the files in it."),
    Content(re.compile(rb"7z\xbc\xaf\x27\x1c|Rar!\x1a\x07"), "an archive", (), "Unpack it, and give the files in it."),
    Content(re.compile(rb"\xfd7zXZ\0"), "compressed by xz", (), "Decompress it."),
    Content(re.compile(rb"\x1f\x8b"), "compressed by gzip", TEXT, "Decompress it.", "gzip"),
    Content(re.compile(rb"\x28\xb5\x2f\xfd"), "compressed by zstd", TEXT, "Decompress it.", "zstd"),
    Content(
        re.compile(rb"BZh[1-9]1AY&SY"),
        "compressed by bz2",
        (),
        "Decompress it, or, if its content has that format, give data.read.compression=bz2.",
        "bz2",
    ),
)


def check_content(path: str, how: Read) -> None:
    """Raise an error if the first bytes of a file show that its suffix is wrong. Formats of other packages are not
    checked.

    Raises:
        OSError: The file cannot be read.
        RecipeError: It has another format.
    """
    suffix, codec = format_of(Path(path))
    if suffix not in (*FORMATS, CONLL) or how.compression is not None:
        return
    with open_binary(path) as file:
        head: bytes = file.read(CHECKED)
    stem = path[: -len(Path(path).suffix)]
    for content in CONTENTS:
        if not content.magic.match(head):
            continue
        if not content.is_expected(suffix, codec):
            raise RecipeError(
                f"it is {content.name}, by its first bytes, and its name ends with {Path(path).suffix}. "
                f"{content.remedy.format(path=stem)}",
                code="wrong-contents",
                place=str(path),
            )
        if content.codec:
            _check_packed(path, how, suffix)
        return
    if suffix in COLUMN_FORMATS and _is_text(head):
        kind = ".jsonl" if head.lstrip()[:1] in (b"{", b"[") else ".csv"
        raise RecipeError(
            f"it is text, by its first bytes, and its name ends with {suffix}.",
            code="wrong-contents",
            place=str(path),
            remedy=f"Rename it to its format, such as {stem}{kind}.",
        )


def _check_packed(path: str, how: Read, suffix: str) -> None:
    """Raise an error if the decompressed content of a file is no text, such as a file that is compressed twice.

    Raises:
        OSError: It cannot be decompressed.
        RecipeError: It has another format.
    """
    file = LineFile(path, how)
    file.close()
    for content in CONTENTS:
        if not content.magic.match(file.first_bytes):
            continue
        if content.codec:
            remedy = "Decompress it once."  # it is compressed twice
        elif suffix in content.suffixes:
            continue
        else:
            remedy = f"Decompress it. {content.remedy.format(path=path)}"
        raise RecipeError(
            f"its decompressed content is {content.name}, by its first bytes, expected text.",
            code="wrong-contents",
            place=str(path),
            remedy=remedy,
        )


def _is_text(head: bytes) -> bool:
    """Whether bytes are UTF-8 without control characters. The last character may be incomplete."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return bool(text) and all(character.isprintable() or character in "\t\r\n" for character in text)
