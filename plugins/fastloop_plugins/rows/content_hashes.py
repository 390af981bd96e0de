"""Hashes of the content of data files. A side file keeps them, so an unchanged file is not read again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from fastloop.runtime.files import write

SIDE_FILE = "files.json"
"""Name of the side file in the folder of ``token-cache``."""
SETTLED = 2.0
"""Seconds from the last change of a file until its state identifies its content. File systems count time in steps of up
to two seconds, so a file may be written twice with the same times."""


@dataclass(frozen=True)
class FileState:
    """Facts about a file that change when it is written or replaced."""

    size: int
    modified: int
    changed: int
    inode: int

    def was_written_since(self, earlier: FileState) -> bool:
        """Whether the file was written or replaced after an earlier state.

        A new mode or link changes only ``changed``, and some network file systems number files anew: such a file still
        has its content.
        """
        return (self.size, self.modified) != (earlier.size, earlier.modified)

    def is_settled(self) -> bool:
        """Whether the last change is long enough ago that the next one will change this state."""
        return time.time() - self.changed / 1e9 > SETTLED


def state_of(path: Path) -> FileState:
    """The state of a file."""
    facts = path.stat()
    return FileState(facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)


class ContentHashes:
    """The hashes of files, by path and state.

    A path whose state has changed, as after ``touch``, is hashed again. Its hash, and so all that is named by it, stays
    the same if its content did.

    Args:
        folder: Where the side file is; None: there is none, and every file is hashed.
    """

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / SIDE_FILE
        self.known: dict[str, tuple[FileState, str]] = {}
        if self.path is not None:
            self.known = _read(self.path)

    def of(self, paths: Iterable[Path]) -> list[str]:
        """The hash of each file. New ones are written to the side file.

        Raises:
            OSError: A file cannot be read.
        """
        hashes = []
        has_new = False
        for path in paths:
            name = str(path.resolve())
            state = state_of(path)
            known = self.known.get(name)
            if known is not None and known[0] == state:
                hashes.append(known[1])
                continue
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "blake2b").hexdigest()
            hashes.append(digest)
            if state.is_settled() and state_of(path) == state:
                self.known[name] = state, digest
                has_new = True
        if has_new and self.path is not None:
            _write(self.path, self.known)
        return hashes


def _read(path: Path) -> dict[str, tuple[FileState, str]]:
    """The content of a side file; empty if it is missing or damaged."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {name: (FileState(*state), str(digest)) for name, (state, digest) in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _write(path: Path, known: dict[str, tuple[FileState, str]]) -> None:
    """Write a side file. If several processes write it, the last one wins: the others hash their files again. A user
    may remove its folder at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {name: [astuple(state), digest] for name, (state, digest) in known.items()}
    write(path, json.dumps(entries), durable=False, hidden=True)
