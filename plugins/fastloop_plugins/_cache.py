"""What plugins keep on disk between runs. All of it can be deleted at any time: it is made again.

Token ids lie in folders named by a hash of everything they follow from, so that an entry is right or not there. One is written elsewhere
and renamed into place: no reader sees half of it, and processes that write the same one at once do not disturb each other.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from fastloop.runtime.platform_support import sync

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Flat = tuple[NDArray[np.int32], NDArray[np.int64]]
    """Rows of ids end to end, and the length of each."""

logger = logging.getLogger("fastloop")

TOKENS: ContextVar[Path | None] = ContextVar("TOKENS", default=None)
"""Where token ids are kept; None: nowhere."""


def user_cache(name: str) -> Path:
    """fastloop's folder of this name in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastloop" / name


def private_cache(name: str) -> Path:
    """As ``user_cache``, made, for what is run when it is read: a new empty folder where others may have written to that one."""
    folder = user_cache(name)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = folder.stat()
        if os.name != "posix" or (facts.st_uid == os.getuid() and not facts.st_mode & 0o022):
            return folder
        logger.warning("others may write to %s: nothing in it is used. Take their right away: chmod go-w %s", folder, folder)
    except OSError as error:
        logger.warning("%s is not kept for later runs: %s", name, error)
    return Path(tempfile.mkdtemp(prefix=f"fastloop-{name}-"))


@contextmanager
def tokens_kept_in(folder: Path | None) -> Iterator[None]:
    """While inside, token ids are kept in a folder."""
    before = TOKENS.set(folder)
    try:
        yield
    finally:
        TOKENS.reset(before)


def digest(facts: Iterable[str | bytes]) -> str:
    """A hash of these, in this order."""
    found = hashlib.blake2b(digest_size=20)
    for fact in facts:
        data = fact if isinstance(fact, bytes) else fact.encode("utf-8", "surrogatepass")
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()


def flat(rows: Iterable[Sequence[int]]) -> Flat:
    """Rows of ids in memory."""
    import numpy as np

    ids, lengths = array("i"), array("q")
    for row in rows:
        ids.extend(row)
        lengths.append(len(row))
    return np.array(ids, dtype=np.int32), np.array(lengths, dtype=np.int64)


def kept(folder: Path, key: str, rows: Iterable[Sequence[int]]) -> Flat:
    """Rows of ids as the cache has them, mapped from disk; where it has not, ``rows`` are read and written first."""
    entry = folder / key
    found = read(entry)
    if found is None:
        _write(entry, rows)
        found = read(entry)
    else:
        logger.info("tokens: %d texts from %s", len(found[1]), entry)
    if found is None:
        raise OSError(f"{entry}: written and cannot be read")
    return found


def read(entry: Path) -> Flat | None:
    """Rows of ids that ``kept`` wrote, mapped from disk; None where they are not there, or not whole."""
    import numpy as np

    if not entry.is_dir():
        return None
    try:
        lengths = np.load(entry / "lengths.npy", allow_pickle=False)
        size = (entry / "ids.bin").stat().st_size
        if size != 4 * lengths.sum():
            raise ValueError(f"{size} bytes of ids, expected {4 * lengths.sum()}")
    except (OSError, ValueError, EOFError, AttributeError) as error:
        logger.warning("tokens: %s is damaged (%s): its texts are tokenised again", entry, error)
        shutil.rmtree(entry, ignore_errors=True)
        return None
    # a plain array on the map: slices of a memmap object cost more
    return np.asarray(np.memmap(entry / "ids.bin", dtype=np.int32, mode="r")) if size else np.empty(0, np.int32), lengths


def _write(entry: Path, rows: Iterable[Sequence[int]]) -> None:
    import numpy as np

    with written(entry) as made:
        lengths = array("q")
        with (made / "ids.bin").open("wb") as file:
            for row in rows:
                lengths.append(len(row))
                array("i", row).tofile(file)
        np.save(made / "lengths.npy", np.array(lengths, dtype=np.int64), allow_pickle=False)


@contextmanager
def written(entry: Path) -> Iterator[Path]:
    """A folder to write an entry's files in: it is at its place, on disk, when all of them are."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".", dir=entry.parent))  # for this user's eyes alone
    try:
        yield made
        for file in made.iterdir():
            sync(file)
        made.rename(entry)
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        if not (isinstance(error, OSError) and entry.is_dir()):  # else another process wrote the same meanwhile
            raise
