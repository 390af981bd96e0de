"""An entry of token ids while it is written, in whole units. The next run continues after the last unit."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from fastloop.runtime.files import naming, partial_folder, write
from fastloop.runtime.platform_support import sync

try:
    import fcntl
except ImportError:  # Windows: no process can continue the rows of another
    fcntl = None  # type: ignore[assignment]

UNIT = 2**22
"""Token ids of a unit: 16 MiB on the disk. A killed run loses at most one."""
LOCK = "lock"
"""Name of the file whose lock the writing process has."""
ROWS = 2**16
"""Rows of a unit at most."""
TYPE = "type.json"
"""Name of the file with the type of an entry's ids, if it is not int32."""


class PartialEntry:
    """Rows of token ids in a folder, which becomes an entry of the cache.

    The folder has ``ids.bin`` (int32) and ``lengths.bin`` (int64), and ``state.json``, with the parts of them that are
    written for good. The rest of them is dropped.

    Args:
        folder: The folder. It may have the rows of a process that was killed.
        facts: Facts about the rows so far, which the caller changes while it adds rows. Those of a killed process are
            put in here.

    Attributes:
        rows: Rows that are written for good.
    """

    def __init__(self, folder: Path, facts: dict[str, int]) -> None:
        self.folder = folder
        self.facts = facts
        self.rows = 0
        self.size = 0
        self._ids = array("i")
        self._lengths = array("q")
        self._read_state()
        self._ids_file = self._open("ids.bin", 4 * self.size)
        self._lengths_file = self._open("lengths.bin", 8 * self.rows)

    def add(self, row: Sequence[int]) -> None:
        """Add a row."""
        self._ids.extend(row)
        self._lengths.append(len(row))
        if len(self._ids) >= UNIT or len(self._lengths) >= ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the rows that were added since the last time for good."""
        for file, values in ((self._ids_file, self._ids), (self._lengths_file, self._lengths)):
            values.tofile(file)
            file.flush()
            sync(Path(file.name))
        self.rows += len(self._lengths)
        self.size += len(self._ids)
        del self._ids[:], self._lengths[:]
        state = {"rows": self.rows, "ids": self.size, "facts": self.facts}
        write(self.folder / "state.json", json.dumps(state), hidden=True)

    def finish(self, is_narrow: bool) -> None:
        """Write the last rows, and leave only the files of an entry in the folder, and its lock.

        Args:
            is_narrow: Store ids in 2 bytes if all of them fit.
        """
        self.flush()
        self.close()
        if is_narrow and self.size:
            self._narrow()
        lengths = np.empty(0, np.int64)
        if self.rows:
            lengths = np.memmap(self.folder / "lengths.bin", np.int64, "r")
        np.save(self.folder / "lengths.npy", lengths, allow_pickle=False)
        sync(self.folder / "lengths.npy")
        write(self.folder / "facts.json", json.dumps(self.facts), hidden=True)
        for name in ("lengths.bin", "state.json"):
            (self.folder / name).unlink(missing_ok=True)

    def _narrow(self) -> None:
        """Replace the file of ids by one of 2 bytes for each, if all of them fit. A process that is killed here writes
        all rows again."""
        from fastloop_plugins._mapped import narrow_type, spans

        path = self.folder / "ids.bin"
        ids = np.asarray(np.memmap(path, np.int32, "r"))
        kind = narrow_type(ids)
        if kind is None:
            return
        (self.folder / "state.json").unlink()
        with (self.folder / "ids.narrow").open("wb") as file:
            for span in spans(len(ids)):
                ids[span].astype(kind).tofile(file)
        sync(self.folder / "ids.narrow")
        del ids  # Windows replaces no file that is open
        (self.folder / "ids.narrow").replace(path)
        write(self.folder / TYPE, json.dumps(kind.name), hidden=True)

    def close(self) -> None:
        """Close the files."""
        self._ids_file.close()
        self._lengths_file.close()

    def _read_state(self) -> None:
        """Set ``rows``, ``size`` and ``facts`` from a process that was killed, if its files are as it says."""
        try:
            state = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
            rows = int(state["rows"])
            size = int(state["ids"])
            facts = {str(name): int(value) for name, value in state["facts"].items()}
            is_whole = (self.folder / "ids.bin").stat().st_size >= 4 * size
            is_whole &= (self.folder / "lengths.bin").stat().st_size >= 8 * rows
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return
        if is_whole:
            self.rows = rows
            self.size = size
            self.facts.update(facts)

    def _open(self, name: str, size: int) -> IO[bytes]:
        """Open a file at the end of what is written for good."""
        file = (self.folder / name).open("ab")
        file.truncate(size)
        return file


def read_type(entry: Path) -> np.dtype[Any]:
    """The type of an entry's ids.

    Raises:
        ValueError: The file names no such type.
    """
    from fastloop_plugins._mapped import NARROW

    try:
        name = json.loads((entry / TYPE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return np.dtype(np.int32)
    for kind in NARROW:
        if kind.name == name:
            return kind
    raise ValueError(f"its ids have the type {name!r}")


@contextmanager
def partial_entry(entry: Path, facts: dict[str, int], is_narrow: bool = False) -> Iterator[PartialEntry]:
    """Write an entry: inside the context, the caller adds the rows from ``PartialEntry.rows`` on.

    At the end, the folder becomes the entry. If the process is killed or interrupted, the folder stays, and the next
    process continues there. While another process writes the same entry, this one writes all rows, too.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    folder = partial_folder(entry)
    lock = _lock(folder)
    if lock is None:
        folder = Path(tempfile.mkdtemp(prefix=".", dir=entry.parent))  # readable by this user only
    partial = PartialEntry(folder, facts)
    try:
        with naming(entry.parent):
            yield partial
            partial.finish(is_narrow)
            folder.rename(entry)
            # not before: another process would lock the folder, and empty it while this one renames it
            (entry / LOCK).unlink(missing_ok=True)
            sync(entry.parent)
    except BaseException as error:
        with suppress(OSError):  # a full disk rejects the rest once more
            partial.close()
        is_interrupted = not isinstance(error, Exception)
        if lock is None or not is_interrupted or not partial.rows:
            shutil.rmtree(folder, ignore_errors=True)
        if not (isinstance(error, OSError) and entry.is_dir()):  # else another process has just written the same
            raise
    finally:
        if lock is not None:
            lock.close()


def _lock(folder: Path) -> IO[bytes] | None:
    """Create a folder, and take the lock in it, which ends with the process; None: another process has it."""
    if fcntl is None:
        return None
    path = folder / LOCK
    try:
        folder.mkdir(exist_ok=True, mode=0o700)
        lock = path.open("ab")
    except FileNotFoundError:  # another process has just renamed the folder
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(path.stat(), os.fstat(lock.fileno())):
            return lock
    except OSError:  # another process has it, or has renamed the folder
        pass
    lock.close()
    return None
