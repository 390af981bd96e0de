"""Small data files that stand for gigabytes, or that claim to: each function writes one and returns its path."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from fastloop_plugins.rows.parquet import ThriftReader

MIB = 2**20
GIB = 2**30

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, 6),
    ".bz2": bz2.compress,
    ".zst": lambda data: pyarrow.Codec("zstd").compress(data, asbytes=True),
}
"""Suffix -> compresses a part of a file. Parts may follow each other."""


def packed(path: str, head: bytes, part: bytes, size: int, tail: bytes = b"") -> str:
    """A compressed file of ``head``, then ``size`` bytes of ``part``, repeated, then ``tail``."""
    pack = PACKERS[Path(path).suffix]
    block = part * (MIB // len(part))
    Path(path).write_bytes(pack(head) + pack(block) * (size // len(block)) + pack(tail))
    return path


def hole(path: str, head: bytes, size: int) -> str:
    """A file that begins with ``head``; zeros follow, for which the disk needs no room."""
    with Path(path).open("wb") as file:
        file.write(head)
        file.truncate(size)
    return path


# -- Parquet -----------------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """A number as in Thrift's compact protocol."""
    value = value * 2
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def write_parquet(path: str, texts: Any, labels: Any, **options: Any) -> str:
    """A Parquet file of one row group. The column of texts is its last."""
    options = {
        "compression": "zstd",
        "row_group_size": 10**9,
        "write_page_checksum": False,
        "data_page_size": GIB,
    } | options
    parquet.write_table(pyarrow.table({"label": labels, "text": texts}), path, **options)
    return path


def edit_parquet(path: str, page: int | None = None, chunk: int | None = None, rows: int | None = None) -> str:
    """Change what a file claims: the size of the first page of texts, that of the whole column, or the number of
    rows."""
    with parquet.ParquetFile(path) as file:
        group = file.metadata.row_group(0)
        text = group.column(1)
        first = text.dictionary_page_offset or text.data_page_offset
        unpacked = text.total_uncompressed_size
        stored = text.total_compressed_size
        count = group.num_rows
        size = group.total_byte_size
    data = Path(path).read_bytes()
    length = struct.unpack("<I", data[-8:-4])[0]
    body = data[: -8 - length]
    footer = data[-8 - length : -8]
    if page is not None:
        start = body.index(b"\x15", first + 1) + 1
        end = body.index(b"\x15", start)
        body = body[:start] + varint(page) + body[end:]
        new = stored + len(varint(page)) - (end - start)
    else:
        new = stored
    sizes = b"\x16" + varint(unpacked) + b"\x16"
    total = b"\x16" + varint(size) + b"\x16"
    assert footer.count(sizes + varint(stored)) == footer.count(total + varint(count)) == 1
    footer = footer.replace(
        sizes + varint(stored), b"\x16" + varint(unpacked if chunk is None else chunk) + b"\x16" + varint(new)
    )
    footer = footer.replace(total + varint(count), total + varint(count if rows is None else rows))
    if rows is not None:
        assert footer.count(b"\x16" + varint(count) + b"\x19") == 1  # of the whole file, before the list of row groups
        footer = footer.replace(b"\x16" + varint(count) + b"\x19", b"\x16" + varint(rows) + b"\x19")
    Path(path).write_bytes(body + footer + struct.pack("<I", len(footer)) + b"PAR1")
    return path


def list_header(count: int) -> bytes:
    """The header of a list of structs. ``count`` is even: ``varint`` writes numbers with a sign, which is twice it."""
    assert count % 2 == 0
    return b"\xfc" + varint(count // 2)


def empty_columns(path: str, groups: int, columns: int) -> str:
    """Write a Parquet file whose footer has row groups of empty columns, of 3 bytes each."""
    write_parquet(path, ["a"], ["b"])
    data = Path(path).read_bytes()
    length = struct.unpack("<I", data[-8:-4])[0]
    footer = ThriftReader(data[-8 - length : -8])
    for number, kind in footer.fields():
        if number == 4:  # the list of row groups
            break
        footer.skip(kind)
    column = b"\x26\x00\x00"
    group = b"\x19" + list_header(columns) + column * columns + b"\x16\x00\x16\x00\x00"
    made = footer.data[: footer.at] + list_header(groups) + group * groups + b"\x00"
    Path(path).write_bytes(data[: -8 - length] + made + struct.pack("<I", len(made)) + b"PAR1")
    return path


# -- images ------------------------------------------------------------------------------------------------------------


def png(
    path: Path,
    width: int,
    height: int,
    bits: int = 1,
    more: Sequence[tuple[bytes, bytes]] = (),
    written: int | None = None,
) -> Path:
    """A black PNG. ``written``: rows in the file, if they are not all."""
    line = b"\0" * (1 + -(-width * bits // 8))
    rows = height if written is None else written
    packer = zlib.compressobj(9)
    pixels = io.BytesIO()
    for _ in range(rows):
        pixels.write(packer.compress(line))
    pixels.write(packer.flush())
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)),
        *more,
        (b"IDAT", pixels.getvalue()),
        (b"IEND", b""),
    ]
    found = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks:
        found += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    path.write_bytes(found)
    return path


# -- tensors -----------------------------------------------------------------------------------------------------------


def safetensors(path: Path, header: Any, data: bytes = b"", size: int | None = None) -> Path:
    """A safetensors file with any header, which may claim any size for itself."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)
    return path
