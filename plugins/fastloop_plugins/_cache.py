"""Files that plugins keep on disk between runs. Users can delete all of them at any time; later runs create them again.

Each entry of token ids is a folder named by a hash of everything that determines the ids, so an entry is either correct
or absent. A process writes an entry elsewhere and renames it into place. Readers never see a partial entry, and several
processes can write the same one at once.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import Problem
from fastloop.problem import clause, counted
from fastloop.runtime.files import naming
from fastloop.runtime.platform_support import sync
from fastloop_plugins._partial_entry import partial_entry, read_type

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Flat = tuple[NDArray[np.int32], NDArray[np.int64]]
    """Rows of ids end to end, and the length of each."""

logger = logging.getLogger("fastloop")


@dataclass(frozen=True)
class Entry:
    """Token ids in the cache.

    Attributes:
        rows: Their number of rows.
        size: Bytes on the disk.
    """

    path: Path
    rows: int
    size: int


@dataclass
class TokenFolder:
    """A folder of cached token ids, whether a task asked for it, and the entries that were read from it."""

    path: Path
    is_used: bool = False
    entries: list[Entry] = field(default_factory=list)

    def note(self, entry: Entry) -> None:
        """Note an entry that was read, once."""
        if entry not in self.entries:
            self.entries.append(entry)


TOKENS: ContextVar[TokenFolder | None] = ContextVar("TOKENS", default=None)
"""Folder of cached token ids; None: no cache."""


def user_cache(name: str) -> Path:
    """The folder ``name`` in fastloop's part of the user's cache.

    Raises:
        OSError: The user has no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastloop" / name
    except RuntimeError:
        raise FileNotFoundError(
            errno.ENOENT, "this user has no home folder: set HOME or XDG_CACHE_HOME", name
        ) from None


def _is_private(facts: os.stat_result) -> bool:
    """Whether only this user may write to a folder, which is not a link."""
    return not hasattr(os, "getuid") or (
        stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022
    )


def own_part(folder: Path) -> Path:
    """Create a folder. Returns it, or this user's folder in it if others may write to it: they could change what is
    read from there.

    Raises:
        OSError: It cannot be written, or this user's folder belongs to another one.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_private(folder.stat()):
        folder /= f"user-{os.getuid()}"
        folder.mkdir(exist_ok=True, mode=0o700)
        if not _is_private(folder.lstat()):
            raise PermissionError(errno.EACCES, "others may write to it", str(folder))
    tempfile.TemporaryFile(dir=folder).close()
    return folder


def private_cache(name: str) -> Path:
    """Create the folder ``name`` in fastloop's part of the user's cache, for files that are executed, and return it. If
    other users can write to it, returns a new empty folder."""
    try:
        folder = user_cache(name)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_private(folder.stat()):
            return folder
        logger.warning(
            Problem(
                f"others may write to {folder}: nothing in it is used.",
                code="unsafe-folder",
                remedy="Remove their permission:",
                command=f"chmod go-w {folder}",
            )
        )
    except OSError as error:
        logger.warning(Problem(f"{name} is not kept for later runs: {clause(error)}.", code="not-cached"))
    return Path(tempfile.mkdtemp(prefix=f"fastloop-{name}-"))


@contextmanager
def tokens_kept_in(path: Path) -> Iterator[TokenFolder]:
    """Keep token ids in a folder inside this context."""
    folder = TokenFolder(path)
    before = TOKENS.set(folder)
    try:
        yield folder
    finally:
        TOKENS.reset(before)


def use_token_folder() -> Path | None:
    """The folder for token ids that the caller reads or writes; None: no cache."""
    folder = TOKENS.get()
    if folder is None:
        return None
    folder.is_used = True
    return folder.path


def digest(facts: Iterable[str | bytes]) -> str:
    """A hash of these values, in this order."""
    hashed = hashlib.blake2b(digest_size=20)
    for fact in facts:
        data = fact if isinstance(fact, bytes) else fact.encode("utf-8", "surrogatepass")
        hashed.update(len(data).to_bytes(8, "little"))
        hashed.update(data)
    return hashed.hexdigest()


def read_or_write(
    folder: Path,
    key: str,
    rows: Callable[[int], Iterable[Sequence[int]]],
    facts: dict[str, int] | None = None,
    write_more: Callable[[Path], None] | None = None,
    is_narrow: bool = False,
) -> Flat:
    """Rows of ids from the cache, mapped from disk. If they are not there, read ``rows`` and write them first.

    Args:
        rows: Returns the rows from a number on. It is not 0 if a process that was killed has written the rows before.
        facts: Written beside the rows, after reading them. If the rows are there, it gets the facts that were written.
        write_more: Writes more files into the entry. Not called if a process that was killed has written some rows.
        is_narrow: Store ids in 2 bytes if all of them fit. The result is then a ``NarrowIds``.
    """
    entry = folder / key
    content = read(entry, facts)
    if content is None:
        with partial_entry(entry, facts if facts is not None else {}, is_narrow) as partial:
            before = partial.rows
            if before:
                logger.info("tokens: %d texts were written by a process that was ended, in %s", before, folder)
            for row in rows(before):
                partial.add(row)
            if write_more is not None and not before:
                write_more(partial.folder)
        content = read(entry)
    else:
        logger.info("tokens: %s from %s", counted(len(content[1]), "text"), entry)
    if content is None:
        raise OSError(f"{entry}: written and cannot be read")
    return content


def read(entry: Path, facts: dict[str, int] | None = None) -> Flat | None:
    """Rows of ids that ``read_or_write`` wrote, mapped from disk; None if they are missing or incomplete. ``facts``
    gets those beside them."""
    flat = read_arrays(entry, facts)
    folder = TOKENS.get()
    if folder is not None and flat is not None:
        folder.note(Entry(entry, len(flat[1]), sum(file.stat().st_size for file in entry.iterdir())))
    return flat


def read_arrays(entry: Path, facts: dict[str, int] | None = None) -> Flat | None:
    """``read`` without a note that the entry is used."""
    import numpy as np

    from fastloop_plugins._mapped import NarrowIds

    if not entry.is_dir():
        return None
    try:
        lengths = np.asarray(np.load(entry / "lengths.npy", mmap_mode="r", allow_pickle=False))
        kind = read_type(entry)
        size = (entry / "ids.bin").stat().st_size
        if size != kind.itemsize * lengths.sum():
            raise ValueError(f"{size} bytes of ids, expected {kind.itemsize * lengths.sum()}")
        if facts is not None:
            saved = json.loads((entry / "facts.json").read_text(encoding="utf-8"))
            facts.update((name, int(value)) for name, value in saved.items())
    except (OSError, ValueError, EOFError, AttributeError, TypeError, RecursionError) as error:
        remove_damaged(entry, error, "its texts are tokenised again", "tokens")
        return None
    if not size:
        return np.empty(0, np.int32), lengths
    ids: Any = np.asarray(np.memmap(entry / "ids.bin", kind, "r"))  # a plain array: slices of a memmap cost more
    if kind != np.int32:
        ids = NarrowIds(ids)
    return ids, lengths


def remove_damaged(entry: Path, error: BaseException, effect: str, place: str) -> None:
    """Log that an entry cannot be read, and remove it.

    Args:
        effect: How the caller continues, for the message.
        place: The part of the data that the entry holds.
    """
    logger.warning(Problem(f"{entry} is damaged ({clause(error)}): {effect}.", code="damaged-cache", place=place))
    shutil.rmtree(entry, ignore_errors=True)


@contextmanager
def written(entry: Path) -> Iterator[Path]:
    """Create a folder for an entry's files. On exit, flush them to disk and rename the folder to ``entry``."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".", dir=entry.parent))  # readable by this user only
    try:
        with naming(entry.parent):
            yield made
            for file in made.iterdir():
                sync(file)
        made.rename(entry)
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        if not (isinstance(error, OSError) and entry.is_dir()):  # else another process has just written the same
            raise
