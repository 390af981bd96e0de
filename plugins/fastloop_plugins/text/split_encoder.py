"""Encodes the rows of a split: all, or some of them, with or without a cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fastloop_plugins import _cache
from fastloop_plugins._mapped import flat, flatnonzero, spans, zeros
from fastloop_plugins.rows.column import Rest
from fastloop_plugins.text.encoding_processes import (
    count_processes,
    encode_in_processes,
    encode_parts,
    portions,
)
from fastloop_plugins.text.known_tokens import find_known, merge, write_hashes
from fastloop_plugins.text.needed_rows import LEFT_OUT, NeededRows
from fastloop_plugins.text.sequences import probed_samples

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins._cache import Flat
    from fastloop_plugins.rows.split_rows import Rows
    from fastloop_plugins.text.needed_rows import FirstRows

logger = logging.getLogger("fastloop")
R = TypeVar("R")

PROGRESS = 30.0
"""Seconds between two lines of the log about rows that are tokenized."""


class SplitEncoder:
    """Encodes the rows of a split.

    Args:
        texts: Returns rows as ``encode_rows`` gets them.
        encode_rows: Yields the ids of some rows, and whether truncation shortened each.
        sees_all: See ``read``.
        family: The beginning of the names of entries whose ids were made in the same way.
        folder: The folder of the cache; None: there is none.
        is_narrow: Whether ids in the cache may take 2 bytes.

    Attributes:
        facts: ``cut`` is the number of texts that truncation has shortened so far.
    """

    def __init__(
        self,
        name: str,
        rows: Rows,
        texts: Callable[[Rows], Sequence[Any]],
        encode_rows: Callable[[Any], Iterator[tuple[list[int], bool]]],
        sees_all: bool,
        family: str = "",
        folder: Path | None = None,
        is_narrow: bool = True,
    ) -> None:
        self.name = name
        self.rows = rows
        self.texts = texts
        self.encode_rows = encode_rows
        self.sees_all = sees_all
        self.family = family
        self.folder = folder
        self.is_narrow = is_narrow
        self.facts: dict[str, int] = {}
        self._cut_rows = zeros(len(rows), np.bool_)  # whether truncation shortened each, as far as they are encoded
        self._content = ""
        self._encoded: Flat | None = None

    def encode(self) -> Flat:
        """The ids of all rows, end to end, and the length of each: from the cache, if there is one."""
        if self._encoded is not None:
            return self._encoded
        if self.folder is None:
            return flat(self.encode_from(0))
        return _cache.read_or_write(
            self.folder, self.key(), self.encode_from, self.facts, self.write_hashes, is_narrow=self.is_narrow
        )

    def encode_needed(self, ids: NDArray[np.int64]) -> tuple[Flat, NeededRows]:
        """Encode some rows, in a cache entry of their own, and those that a fingerprint of the samples covers. Returns
        their token ids, and the way to the others."""
        ids = np.union1d(ids, probed_samples(len(self.rows)))
        part = self._keep(self.rows.keep(ids))
        part.facts = self.facts
        whole = self._keep(self.rows)
        return part.encode(), NeededRows(ids, len(self.rows), lambda: whole)

    def begin(self, first_rows: FirstRows) -> SplitEncoder:
        """The first rows of a large split, at least as many as give the samples that the run reads; else itself."""
        wanted = first_rows.samples(self.name)
        if wanted is None:
            return self
        total = len(self.rows)
        size = wanted
        while total - size >= LEFT_OUT:
            part = self._keep(self.rows.keep(np.arange(size)))
            part._encoded = flat(part.encode_from(0))
            if first_rows.count(part._encoded) >= wanted:
                logger.info(
                    "tokens: %s: this check of the recipe reads the first %d of %d rows, and only these are tokenized",
                    self.name, size, total,
                )  # fmt: skip
                return part
            size *= 4
        return self

    def _keep(self, rows: Rows) -> SplitEncoder:
        """An encoder of other rows."""
        return SplitEncoder(
            self.name, rows, self.texts, self.encode_rows, self.sees_all, self.family, self.folder, self.is_narrow
        )

    def encode_some(self, ids: NDArray[np.int64]) -> Flat:
        """The token ids of some rows, which no cache keeps."""
        return flat(row for row, _ in self.encode_rows(self.texts(self.rows.keep(ids))))

    def content(self) -> str:
        """A hash of all rows."""
        if not self._content:
            hashes = self.rows.hashes
            self._content = _cache.digest(hashes[span].tobytes() for span in spans(len(hashes)))
        return self._content

    def key(self) -> str:
        """The name of the entry of all rows."""
        return self.family + self.content()

    def key_of(self, ids: NDArray[np.int64]) -> str:
        """The name of the entry of some rows."""
        return self._keep(self.rows.keep(ids)).key()

    def encode_from(self, start: int) -> Iterator[Sequence[int]]:
        """Yield the ids of the rows from a number on. ``facts`` counts a row before it is yielded."""
        total = len(self.rows)
        self.facts.setdefault("cut", 0)
        encoded = with_progress(self._encode_from(start), f"tokens: {self.name}", start, total)
        for row, (ids, is_cut) in enumerate(encoded, start):
            if is_cut:
                self.facts["cut"] += 1
                self._cut_rows[row] = True
            yield ids

    def _encode_from(self, start: int) -> Iterator[tuple[Sequence[int], bool]]:
        known_rows = None
        if self.folder is not None and not self.sees_all:
            known_rows = find_known(self.family, self.folder, self.rows.hashes)
        if known_rows is None:
            texts = self.texts(self.rows)
            return self._encode(Rest(texts, start) if start else texts, len(self.rows))
        known, places = known_rows
        new = start + flatnonzero(places[start:] < 0)
        logger.info(
            "tokens: %s: %d of %d rows are tokenized, and the others copied from other splits in %s",
            self.name, len(new), len(self.rows) - start, self.folder,
        )  # fmt: skip
        encoded: Iterator[tuple[Sequence[int], bool]] = iter(())
        if len(new):
            encoded = self._encode(self.texts(self.rows.keep(new)), len(new))
        return merge(encoded, known, places[start:])

    def _encode(self, texts: Sequence[Any], count: int) -> Iterator[tuple[Sequence[int], bool]]:
        processes = 1 if self.sees_all else count_processes(count, self.characters())
        if processes > 1:
            return encode_in_processes(partial(encode_parts, self.encode_rows), portions(texts), processes)
        return self.encode_rows(texts)

    def characters(self) -> int:
        """The characters of all rows."""
        return int(self.rows.characters.sum(dtype=np.int64))

    def write_hashes(self, entry: Path) -> None:
        """Write the files by which other splits find these rows."""
        write_hashes(entry, self.rows.hashes, flatnonzero(self._cut_rows))


def with_progress(rows: Iterable[R], name: str, start: int, total: int) -> Iterator[R]:
    """Yield rows. Logs how many there are, their speed and the time left, each ``PROGRESS`` seconds.

    Args:
        name: The beginning of these lines.
        start: Rows before the first one.
        total: Rows at the end.
    """
    begin = time.monotonic()
    next_line = begin + PROGRESS
    for number, row in enumerate(rows, 1):
        yield row
        now = time.monotonic()
        if now < next_line:
            continue
        next_line = now + PROGRESS
        speed = number / (now - begin)
        left = (total - start - number) / speed
        minutes, seconds = divmod(round(left), 60)
        logger.info(
            "%s: %d of %d rows, %.0f rows/s, %d:%02d min left", name, start + number, total, speed, minutes, seconds
        )
