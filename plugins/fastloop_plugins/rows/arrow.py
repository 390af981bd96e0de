"""Reads Arrow files, as ``datasets`` saves them: the IPC stream format, and the IPC file format (Feather)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import pyarrow
from pyarrow import ipc

from fastloop.errors import RecipeError
from fastloop_plugins.rows.file import BLOCK, Block, File
from fastloop_plugins.rows.limits import check_total, size_of
from fastloop_plugins.rows.lines import open_binary
from fastloop_plugins.rows.options import Read
from fastloop_plugins.rows.table import check_names

MAGIC = b"ARROW1\0\0"
"""First bytes of the file format. A stream follows them."""
FILE_END = MAGIC[:6]
"""Last bytes of the file format, after an index of its batches."""
ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"""Bytes that a writer puts after the last record batch: since Arrow 0.15, and before."""


class Arrow(File):
    """Rows of an Arrow file. A position is the offset of a record batch; its rows may be several blocks."""

    row = "a row of the table"
    group = "a record batch of the file"
    lists = True
    has_groups = True

    def __init__(self, path: str, how: Read, columns: Mapping[str, str], skip_unreadable: bool = False) -> None:
        super().__init__(path, how, columns, skip_unreadable)
        source = open_binary(path)
        self.source = source if isinstance(source, pyarrow.NativeFile) else pyarrow.PythonFile(source, mode="r")
        self.size = size_of(self.source)
        self.count = 0
        self.checksum = 0
        self.is_stream = self.source.read(len(MAGIC)) != MAGIC
        if self.is_stream:
            self.source.seek(0)
        self.schema = ipc.read_schema(self.source)
        self.first = self.source.tell()
        check_names(path, self.schema.names)
        self.names = dict.fromkeys(self.schema.names)
        dictionaries = [field.name for field in self.schema if pyarrow.types.is_dictionary(field.type)]
        if dictionaries:
            raise RecipeError(
                f"the column {dictionaries[0]!r} has a dictionary, expected plain values.",
                code="wrong-type",
                place=str(path),
                remedy="Convert the file to Parquet.",
            )

    def facts(self) -> list[str]:
        return [f"{self.count} {self.checksum}"]

    def first_names(self) -> list[str]:
        return list(self.names)

    def close(self) -> None:
        self.source.close()

    def blocks(self, columns: Sequence[str], start: int = 0, size: int = BLOCK, skip: int = 0) -> Iterator[Block]:
        """See ``File``. Other iterators may move the file's position in between."""
        wanted = [name for name in columns if name in self.names]
        if not start:
            self.count = 0
            self.checksum = 0
        place = start or self.first
        total = 0
        while True:
            read = self._batch(place, counts=not start)
            if read is None:
                return
            batch, end = read
            total += batch.nbytes
            check_total(self.path, self.size, total, self.how)
            step = size
            if not wanted:  # only the number of rows counts
                step = max(batch.num_rows, 1)
            for row in range(skip, batch.num_rows, step):
                part = batch.slice(row, step)
                yield Block(place, part.num_rows, {name: part.column(name) for name in wanted})
            skip = max(skip - batch.num_rows, 0)
            place = end

    def _batch(self, offset: int, counts: bool) -> tuple[pyarrow.RecordBatch, int] | None:
        """The record batch at an offset, and the offset after it; None at the end.

        Args:
            counts: Whether to add the batch to ``facts``.
        """
        self.source.seek(offset)
        try:
            message = ipc.read_message(self.source)
        except EOFError:
            self._check_end(offset)
            return None
        end = self.source.tell()
        batch = ipc.read_record_batch(message, self.schema)
        batch.validate(full=True)  # offsets of a damaged file may lie outside its buffers
        if counts:
            self.count += batch.num_rows
            self.checksum = zlib.crc32(message.body, self.checksum)
        return batch, end

    def _check_end(self, offset: int) -> None:
        """Check that the record batches end at an offset because their writer was closed there.

        A file that was cut off between two batches, or two streams that were joined, would lose rows without an error.

        Raises:
            OSError: The mark of the end is missing, or more data follows it.
        """
        self.source.seek(offset)
        after = self.source.read(len(ENDS[0]))
        mark = next((mark for mark in ENDS if after.startswith(mark)), None)
        if mark is None:
            raise OSError("it ends without its end mark: it was cut off, or its writer was not closed")
        if self.is_stream:
            more = self.size - offset - len(mark)
            if more:
                raise OSError(f"{more} bytes follow its end, as where files were joined")
            return
        self.source.seek(self.size - len(FILE_END))
        if self.source.read(len(FILE_END)) != FILE_END:
            raise OSError("its last bytes are missing: it was cut off, or its writer was not closed")
