"""Write files atomically and durably, read again after an error, and create and rename folders."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from time import sleep
from typing import Any

from fastloop.errors import SaveError, UsageError, causes
from fastloop.problem import Problem
from fastloop.recipe import secrets
from fastloop.runtime.platform_support import sync

RETRY_SECONDS = (0.1, 0.5, 2.0)
"""Seconds between attempts to read a file: a server of a network file system may need a moment to find a file that was
replaced."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors that writing gives on a full disk, over a quota, and over a limit of file sizes."""
FULL_TEXT = re.compile(rf"{'|'.join(os.strerror(number) for number in FULL)}|\d+ requested and \d+ written")
"""Messages of libraries about such an error. The last one is numpy's."""
FREE_SPACE = "Free disk space or raise the limit, then repeat the command."
"""The remedy for a full disk."""
TOO_MANY_FILES = Problem(
    "a process has reached its limit of open files, which workers and connections between processes take, too.",
    code="too-many-files",
    remedy="Raise the limit with `ulimit -n 4096`, or use fewer workers, then repeat the command.",
)
"""The problem of a process that reached its limit of open files outside of user code and plugins."""
TOO_MANY_FILES_TEXT = re.compile(rf"{os.strerror(errno.EMFILE)}(?! in system)")
"""Messages of torch and of workers about such an error. "Too many open files in system" is another limit."""
CLOSE_FILES = "Close files after use, or raise the limit with `ulimit -n 4096`, then repeat the command."
"""The remedy for user code or a plugin that reached the limit of open files."""


def write(path: Path, text: str, durable: bool = True, hidden: bool = False) -> None:
    """Write a file atomically, with secrets hidden in its text. If several processes write the same file, the last one
    wins. A path in the text whose name is not UTF-8 is written as the console shows it, such as ``caf\\udce9``.

    Args:
        hidden: Whether the text was made from values without secrets. JSON and YAML always are: a secret may be equal
            to a key.
        durable: Whether to flush the file to disk first. Otherwise a loss of power may leave an empty file.

    Raises:
        OSError: The file cannot be written, or is a folder, device or pipe; an existing file is unchanged.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "expected a file, found a folder, device or pipe", str(path))
    aside = path.with_name(f".{token_hex(8)}.partial")  # a name that nobody can guess and put a link at
    try:
        with aside.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text if hidden else secrets.hide(text))
        if durable:
            sync(aside)
        aside.replace(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        error.filename = str(path)  # not the temporary name
        raise
    finally:
        _discard(aside)


def _discard(aside: Path) -> None:
    """Remove an unfinished file, if it was made. On a read-only file system this fails for any name, and the error of
    the write is the one to show."""
    with suppress(OSError):
        aside.unlink()


def full_disk(error: BaseException, place: Path | None = None, remedy: str = FREE_SPACE) -> SaveError | None:
    """The error of a full disk, a quota or a limit of file sizes; None: ``error`` has another reason.

    Libraries raise it as errors of their own: safetensors, ``shutil.copytree`` and torch's exporter only mention it.

    Args:
        place: The file or folder that is written, if the error names none.
        remedy: That of the error.
    """
    filename: Any = place
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.filename is not None:
            filename = cause.filename
        number = getattr(cause, "errno", None)
        if number in FULL or FULL_TEXT.search(str(cause)):
            reason = os.strerror(number if number in FULL else errno.ENOSPC)
            return SaveError(
                f"{reason}.",
                code="disk-full",
                place="a file" if filename is None else str(filename),
                remedy=remedy,
            )
    return None


def reached_open_files(error: BaseException) -> bool:
    """Whether the limit of open files of a process caused an error."""
    for cause in causes(error, implicit=True):
        if TOO_MANY_FILES_TEXT.search(str(cause)) or getattr(cause, "errno", None) == errno.EMFILE:
            return True
    return False


def refuse_full_disk(error: BaseException, place: Path | None = None, remedy: str = FREE_SPACE) -> None:
    """Raise the error of a full disk, if ``error`` is one.

    Call it before an error is raised that calls a path or an option wrong: on a full disk they are right, and the same
    command works later.

    Raises:
        SaveError: See ``full_disk``.
    """
    full = full_disk(error, place, remedy)
    if full is not None:
        raise full from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a file or folder in errors of the block about a full disk: those of ``write``, ``flush`` and ``close`` name
    none.

    Raises:
        OSError: The error of the block, with a ``filename``.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or full_disk(error) is None:
            raise
        if error.errno is None:  # numpy and shutil.copytree raise one with a text only
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        error.filename = str(path)
        raise


def list_entries(folder: Path, most: int = 3) -> str:
    """The entries of a folder, for a message: ``bench.json, bench.md and 4 more``. Hidden ones come last."""
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: (name.startswith("."), name))
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def free_name(folder: Path, kind: str) -> Path:
    """A path beside a folder that does not exist: ``runs/a-sweep``, or ``runs/a-sweep2`` if that is there. For the
    current folder, it is in it."""
    name = folder.name if folder.name not in ("", "..") else folder.resolve().name
    proposal = folder.parent / f"{name}-{kind}"
    number = 2
    while os.path.lexists(proposal):
        proposal = folder.parent / f"{name}-{kind}{number}"
        number += 1
    return proposal


def no_follow(path: str, flags: int) -> int:
    """For ``open(..., opener=no_follow)``: opens a file that grows, such as a log, but not through a link.

    Raises:
        UsageError: The path is a link.
    """
    if Path(path).is_symlink():
        raise UsageError(
            f"{path} is a link, which may lead out of its folder.", code="unsafe-link", remedy="Remove it."
        )
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)  # the link may appear now


def check_links(folder: Path) -> None:
    """Check that no link in a folder, which may come from others, leads out of it. The folder may be missing, or a link
    itself.

    Raises:
        UsageError: Names such a link, or a device, pipe or socket.
    """
    inside = os.path.realpath(folder)
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            with suppress(FileNotFoundError):  # a run that still trains removes files
                _check_link(Path(place, name), folder, inside)


def _check_link(path: Path, folder: Path, inside: str) -> None:
    """Check that a path in ``folder`` is a file, a folder, or a link that stays inside.

    Args:
        inside: The folder without links.
    """
    kind = stat.S_IFMT(path.lstat().st_mode)
    if kind == stat.S_IFLNK:
        target = os.path.realpath(path)
        if not Path(target).is_relative_to(inside):
            raise UsageError(
                f"{path} is a link that leads out of {folder}, to {target}.", code="unsafe-link", remedy="Remove it."
            )
    elif kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise UsageError(
            f"{path} is a device, pipe or socket.",
            code="not-a-file",
            expected="files and folders",
            remedy="Remove it.",
        )


def read_again(read: Callable[[], Any]) -> Any:
    """The result of ``read``, which is called again after an error, such as a stale handle of a network file system.

    Raises:
        OSError: The last attempt failed, too. A RuntimeError becomes one: torch raises it for a file that it cannot
            open.
    """
    for seconds in RETRY_SECONDS:
        with suppress(OSError, RuntimeError):
            return read()
        sleep(seconds)
    try:
        return read()
    except RuntimeError as error:
        raise OSError(error) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file cannot be read, or holds another value.

    For files of which a command only shows or suggests something. Whoever needs the file reports why it is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def sync_folder(folder: Path) -> None:
    """Flush a folder and everything in it to disk, but not its own name.

    Raises:
        OSError: It cannot be written.
    """
    for path in (*folder.rglob("*"), folder):
        sync(path)


def apply_umask(folder: Path) -> None:
    """Give the safetensors files in a folder the mode of a new file there.

    The library writes a temporary file, which only its owner may read, and renames it. The usual mode comes from a new
    file: to read the umask, ``os.umask`` would change it for other threads, and some folders have modes of their own.

    Raises:
        OSError: The folder cannot be written.
    """
    probe = folder / f".{token_hex(8)}.partial"
    try:
        with probe.open("x") as file:
            usual = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    finally:
        _discard(probe)
    for path in folder.rglob("*.safetensors"):
        if path.is_file() and not path.is_symlink():
            path.chmod(usual)


def partial_folder(folder: Path) -> Path:
    """The hidden folder beside ``folder`` in which its files are written, before ``replace_folder`` renames it."""
    return folder.with_name(f".{folder.name}.partial")


def replace_folder(aside: Path, folder: Path) -> None:
    """Give a new folder the name ``folder``, and remove an old one of that name: after a loss of power, one of both is
    complete. While the old one is replaced, its name is ``.NAME.old.partial``.

    Raises:
        OSError: It cannot be written. An old folder keeps its name.
    """
    apply_umask(aside)
    sync_folder(aside)
    old = folder.with_name(f".{folder.name}.old.partial")
    try:
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        aside.rename(folder)
    except BaseException:  # a signal may raise between the two renames
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)  # after the sync: a loss of power must not undo the renames alone


def missing_folders(folder: Path) -> list[Path]:
    """A folder and its parents, as far as they do not exist, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, up to the first one that holds something."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents durably.

    Raises:
        OSError: It cannot be created.
    """
    missing = missing_folders(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def move_aside(folder: Path) -> Path:
    """Rename a folder to the first free ``NAME.NUMBER``, and return the new path.

    Raises:
        OSError: The folder cannot be renamed.
    """
    number = 1
    while folder.with_name(f"{folder.name}.{number}").exists():
        number += 1
    return folder.rename(folder.with_name(f"{folder.name}.{number}"))
