"""WebDataset shards of text: tar archives in which the files of a sample follow each other.

Their names are equal up to the first dot.

A column is such an ending (``txt``, ``cls``), or a key of the object in the file that ends with ``json``.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from fastloop.errors import RecipeError
from fastloop_plugins.rows.file import BLOCK, BadRow, Block, File
from fastloop_plugins.rows.json import parse_json
from fastloop_plugins.rows.limits import check_row
from fastloop_plugins.rows.lines import open_binary
from fastloop_plugins.rows.options import Read
from fastloop_plugins.rows.table import show


class Headers:
    """An archive's file. ``tarfile`` reads names and attributes of files at once, whatever size they claim."""

    def __init__(self, file: Any, how: Read) -> None:
        self.file, self.most, self.seek, self.tell = (
            file,
            how.max_row_mib * 2**20 + tarfile.BLOCKSIZE,
            file.seek,
            file.tell,
        )

    def read(self, size: int) -> Any:
        if not 0 <= size <= self.most:
            raise OSError(f"a header claims {size} bytes")
        return self.file.read(size)


class Sample:
    """The files of a sample.

    Attributes:
        offset: Where the first of them begins in the archive, in bytes.
        files: Ending of the name -> file.
    """

    def __init__(self, archive: tarfile.TarFile, offset: int) -> None:
        self.archive, self.offset = archive, offset
        self.files: dict[str, tarfile.TarInfo] = {}

    def names(self) -> list[str]:
        """The columns of the sample."""
        return [*self.files, *self.json]

    def values(self, columns: Sequence[str]) -> tuple[Any, ...]:
        """The columns: text, or a value of the object; None for one that is not there."""
        return tuple(self._text(name) if name in self.files else self.json.get(name) for name in columns)

    def _text(self, name: str) -> str:
        file = self.archive.extractfile(self.files[name])
        try:
            return "" if file is None else file.read().decode()
        except UnicodeDecodeError as error:
            raise BadRow(f"not UTF-8 ({error.reason}).", self.files[name].name) from None

    @cached_property
    def json(self) -> Mapping[str, Any]:
        """The object in the file that ends with ``json``; empty without one."""
        if "json" not in self.files:
            return {}
        place = self.files["json"].name
        found = parse_json(self._text("json"), place)
        if not isinstance(found, Mapping):
            raise BadRow(f"found {show(found)}, expected an object with a key for each column.", place)
        return found


class Tar(File):
    """Samples of a tar archive. A position is the offset of a sample."""

    row = "files whose names are equal up to the first dot"
    group = "1,024 rows"
    lists = True  # in its JSON files
    untyped = True

    def __init__(self, path: str, how: Read, columns: Mapping[str, str], skip_unreadable: bool = False) -> None:
        super().__init__(path, how, columns, skip_unreadable)
        self.source, self.count, self.checksum = open_binary(path), 0, 0

    def facts(self) -> list[str]:
        return [f"{self.count} {self.checksum}"]

    def close(self) -> None:
        self.source.close()

    def blocks(self, columns: Sequence[str], start: int = 0, size: int = BLOCK, skip: int = 0) -> Iterator[Block]:
        """See ``File``. Without columns, only the headers of the archive are read. Other iterators may move the file's
        position in between."""
        samples = samples_of(self.path, self.source, start, self.how)
        if not start and not skip:
            samples, self.count, self.checksum = self._counted(samples), 0, 0

        def read(sample: Sample) -> tuple[Any, ...]:
            if columns or not self.names:
                self.names |= dict.fromkeys(sample.names())
            return sample.values(columns)

        def make(place: int, rows: list[tuple[Any, ...]]) -> Block:
            table = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True)) if columns else {}
            return Block(place, len(rows), {name: values for name, values in table.items() if name in self.names})

        return self.in_blocks(((sample.offset, sample) for sample in samples), read, make, size, skip)

    def _counted(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        for sample in samples:
            self.count += 1
            for part in sample.files.values():
                self.checksum = zlib.crc32(f"{part.name} {part.size} {part.mtime}".encode(), self.checksum)
            yield sample


def samples_of(path: str, file: Any, offset: int, how: Read) -> Iterator[Sample]:
    """The samples of an archive from an offset on.

    Raises:
        OSError: The archive is damaged.
        RecipeError: A file is too large, or has holes: a few bytes may claim any size.
    """
    file.seek(offset)
    sample, newest = None, ""
    try:
        with cast("Any", tarfile).open(fileobj=Headers(file, how), mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # else they stay in memory
                if member.size < 0:  # tarfile would return it forever
                    raise OSError(f"{member.name} claims {member.size} bytes")
                if not member.isfile():
                    continue
                check_row(where := f"{path}, {member.name}", member.size, how)
                if member.issparse():
                    raise RecipeError(
                        f"{where}: stored with holes, expected its whole content. Write the archive without --sparse."
                    )
                folder, _, base = member.name.rpartition("/")
                name, _, ending = base.partition(".")
                if sample is None or f"{folder}/{name}" != newest:
                    if sample is not None:
                        yield sample
                    sample, newest = Sample(archive, member.offset), f"{folder}/{name}"
                sample.files[ending.lower()] = member
            if sample is not None:
                yield sample
    except tarfile.TarError as error:
        raise OSError(str(error)) from None
