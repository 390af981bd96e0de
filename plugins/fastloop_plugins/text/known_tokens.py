"""Token ids of rows that earlier runs have tokenized in the same way, for other splits of the same data.

Another share of held-out rows, another limit, or a file with more rows gives splits with other rows, so they are other
entries of the cache. Their ids are copied from the entries that are there, and only new rows are tokenized.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastloop.runtime.platform_support import sync
from fastloop_plugins import _cache
from fastloop_plugins._mapped import AT_ONCE, GrowingArray, concatenate, cumsum, spans, zeros

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins.rows.split_rows import Hashes

HASHES = "hashes.npy"
"""File of an entry: the hash of each row."""
CUT = "cut.npy"
"""File of an entry: the rows that truncation has shortened."""


class KnownTokens:
    """The rows of some entries of the cache.

    Args:
        entries: The entries. Those without the files of this module are left out.
    """

    def __init__(self, entries: Sequence[Path]) -> None:
        hashes = []
        lengths = []
        self._ids = []
        cut = GrowingArray(np.int64)
        self._firsts = [0]  # the first row of each entry, over all of them
        for entry in entries:
            try:
                of_entry = np.asarray(np.load(entry / HASHES, mmap_mode="r", allow_pickle=False))
                cut_of_entry = np.load(entry / CUT, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError):
                continue
            flat = _cache.read_arrays(entry)
            if flat is None or of_entry.shape != (len(flat[1]), 2):
                continue
            hashes.append(of_entry)
            for span in spans(len(cut_of_entry)):
                cut.extend(self._firsts[-1] + cut_of_entry[span])
            self._ids.append(flat[0])
            lengths.append(flat[1])
            self._firsts.append(self._firsts[-1] + len(flat[1]))
        self.hashes: Hashes = concatenate(hashes) if hashes else np.empty((0, 2), np.uint64)
        self._lengths = lengths
        self._ends = [cumsum(counts) for counts in lengths]
        self.is_cut = zeros(len(self.hashes), np.bool_)
        self.is_cut[cut.finish()] = True

    def find(self, hashes: Hashes) -> NDArray[np.int64]:
        """(rows,) a row of the entries with the same hash, for each row; -1: there is none."""
        places = zeros(len(hashes), np.int64)
        for span in spans(len(places)):
            places[span] = -1
        parts = -(-len(self.hashes) // AT_ONCE)
        for part in range(parts):  # of all hashes, so that sorting needs little memory
            known_rows = _rows_of_part(self.hashes, part, parts)
            known_rows = known_rows[np.argsort(self.hashes[known_rows, 0])]
            known = self.hashes[known_rows]
            wanted_rows = _rows_of_part(hashes, part, parts)
            if not len(known_rows) or not len(wanted_rows):
                continue
            wanted = hashes[wanted_rows]
            nearest = np.minimum(np.searchsorted(known[:, 0], wanted[:, 0]), len(known) - 1)
            is_known = (known[nearest] == wanted).all(1)
            places[wanted_rows[is_known]] = known_rows[nearest[is_known]]
        return places

    def ids(self, row: int) -> array[int]:
        """The token ids of a row of the entries."""
        # with entries of 3 and 2 rows, _firsts is [0, 3, 5]: row 4 is number 1 of entry 1
        entry = int(np.searchsorted(self._firsts, row, side="right")) - 1
        index = row - self._firsts[entry]
        end = self._ends[entry][index]
        return array("i", self._ids[entry][end - self._lengths[entry][index] : end].tobytes())


def _rows_of_part(hashes: Hashes, part: int, parts: int) -> NDArray[np.int64]:
    """The rows whose hash is in a part of all hashes."""
    rows = GrowingArray(np.int64)
    for span in spans(len(hashes)):
        rows.extend(span.start + np.flatnonzero(hashes[span, 1] % np.uint64(parts) == part))
    return rows.finish()


def find_known(family: str, folder: Path, hashes: Hashes) -> tuple[KnownTokens, NDArray[np.int64]] | None:
    """The rows that entries of a family have: see ``KnownTokens.find``. None: they have none of them.

    Args:
        family: The beginning of the names of entries whose ids were made in the same way.
        folder: The folder of the cache.
        hashes: (rows, 2) the hash of each row.
    """
    known = KnownTokens(sorted(folder.glob(f"{family}*")))
    places = known.find(hashes)
    is_any = any((places[span] >= 0).any() for span in spans(len(places)))
    return (known, places) if is_any else None


def merge(
    encoded: Iterator[tuple[Sequence[int], bool]], known: KnownTokens, places: NDArray[np.int64]
) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield the ids of each row, and whether it was shortened: of known rows from the cache, and else from ``encoded``,
    which yields those of the other rows."""
    for span in spans(len(places)):
        for place in places[span].tolist():
            if place < 0:
                yield next(encoded)
            else:
                yield known.ids(place), bool(known.is_cut[place])


def write_hashes(entry: Path, hashes: Hashes, cut: NDArray[np.int64]) -> None:
    """Write the files of this module into an entry.

    Args:
        cut: The rows that truncation has shortened.
    """
    for name, values in ((HASHES, hashes), (CUT, cut)):
        np.save(entry / name, values, allow_pickle=False)
        sync(entry / name)
