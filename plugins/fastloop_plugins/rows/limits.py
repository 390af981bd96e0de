"""Limits of what a data file may take in memory: ``data.read.max_row_mib`` and ``data.read.max_expansion``.

A few bytes may stand for gigabytes: compressed, as a hole in an archive, or as an entry of a Parquet dictionary.
Readers of data files check sizes here before they read.
"""

from __future__ import annotations

import io
import os
from typing import Any

from fastloop.errors import RecipeError
from fastloop_plugins.rows.options import Read


def check_row(where: str, size: int, how: Read) -> None:
    """Raise an error for a row of more bytes or characters than ``data.read.max_row_mib``.

    Args:
        where: The file, and its line or member.
    """
    if size > how.max_row_mib * 2**20:
        raise RecipeError(
            f"longer than {how.max_row_mib} MiB, expected rows below that (data.read.max_row_mib).",
            code="too-large",
            place=where,
            remedy="Divide the row, or set the option higher.",
        )


def check_total(path: str, size: int, total: int, how: Read) -> None:
    """Raise an error for a file of ``size`` bytes with a content of ``total``, if that is more than its limit."""
    most = limit(size, how)
    if total > most:
        raise RecipeError(
            f"has {size} bytes and expands to more than {most}, expected at most {how.max_expansion} times its size "
            "(data.read.max_expansion).",
            code="too-large",
            place=str(path),
            remedy="If the file is good, set the option higher.",
        )


def limit(size: int, how: Read) -> int:
    """Bytes that the content of a file of ``size`` bytes may have. One row is always allowed."""
    return max(size * how.max_expansion, how.max_row_mib * 2**20)


class Expanded(io.RawIOBase):
    """The content of a compressed file, up to its limit.

    Args:
        stream: Decompresses the file.
        size: Bytes of the file.
    """

    def __init__(self, stream: Any, path: str, size: int, how: Read) -> None:
        self.stream = stream
        self.path = path
        self.size = size
        self.how = how
        self.total = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self.stream.readinto(buffer)
        self.total += count
        check_total(self.path, self.size, self.total, self.how)
        return count

    def close(self) -> None:
        self.stream.close()
        super().close()


def size_of(file: Any) -> int:
    """Bytes of an open file. Its position is then its start."""
    size: int = file.seek(0, os.SEEK_END)
    file.seek(0)
    return size
