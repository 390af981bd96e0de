"""WebDataset shards of text: tar archives in which the files of a sample follow each other.

Their names are equal up to the first dot.

A column is such an ending (``txt``, ``cls``), or a key of the object in the file that ends with ``json``.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from fastloop.errors import RecipeError
from fastloop_plugins.rows.files import Read, missing_column
from fastloop_plugins.rows.formats import LINES, BadRow, Row, Scanned, json_object, open_file
from fastloop_plugins.rows.limits import check_row


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
        return [*self.files, *(self._object() if "json" in self.files else ())]

    def values(self, columns: Sequence[str]) -> Row:
        """The columns: text, or a value of the object; None for one that is not there."""
        found = self._object() if any(name not in self.files for name in columns) and "json" in self.files else {}
        return tuple(self._text(name) if name in self.files else found.get(name) for name in columns)

    def _text(self, name: str) -> str:
        file = self.archive.extractfile(self.files[name])
        return "" if file is None else file.read().decode()

    def _object(self) -> Mapping[str, Any]:
        try:
            return json_object(self._text("json"))
        except ValueError as error:
            raise BadRow(f"{self.files['json'].name}: {error}") from None


@dataclass(frozen=True)
class Tar:
    """Samples of a tar archive. The key of a row group is the offset of its first sample."""

    how: Read
    shares_file = False

    def open(self, path: str) -> Any:
        """See ``Format``."""
        return open_file(path)

    def scan(self, path: str, columns: Mapping[str, str], label: str | None, facts: list[str]) -> Scanned:
        """See ``Format``. Reads the headers of the archive, and the labels."""
        with self.open(path) as file:
            checksum, count, samples = 0, 0, samples_of(path, file, 0, self.how)
            while group := list(islice(self._labelled(path, samples, columns if not count else {}, label), LINES)):
                for sample, _ in group:
                    for part in sample.files.values():
                        checksum = zlib.crc32(f"{part.name} {part.size} {part.mtime}".encode(), checksum)
                count += len(group)
                yield group[0][0].offset, len(group), [value for _, value in group] if label is not None else []
            facts.append(f"{count} {checksum}")

    def _labelled(
        self, path: str, samples: Iterator[Sample], columns: Mapping[str, str], label: str | None
    ) -> Iterator[tuple[Sample, Any]]:
        """Samples and their labels. The first must have ``columns``."""
        for sample in samples:
            for name, key in columns.items():
                if name not in sample.names():
                    raise missing_column(path, key, name, sample.names())
            columns = {}
            yield sample, None if label is None else sample.values([label])[0]

    def read(
        self, file: Callable[[], Any], path: str, key: int, rows: int, skip: int, columns: Sequence[str]
    ) -> Iterator[Row]:
        """See ``Format``. Lanes may share the file: a position is set before each access."""
        for sample in islice(samples_of(path, file(), key, self.how), skip, rows):
            yield sample.values(columns)


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
