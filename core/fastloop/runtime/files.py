"""Write files atomically and durably, read again after an error, and create and rename folders."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

from fastloop.distributed import ranks
from fastloop.recipe import secrets
from fastloop.runtime.platform_support import sync

RETRY_SECONDS = (0.1, 0.5, 2.0)
"""Seconds between attempts to read a file: a server of a network file system may need a moment to find a file that was replaced."""


def write(path: Path, text: str, durable: bool = True, hidden: bool = False) -> None:
    """Write a file atomically, with secrets hidden in its text. If several processes write the same file, the last one wins.

    Args:
        hidden: Whether the text was made from values without secrets. JSON and YAML always are: a secret may be equal to a key.
        durable: Whether to flush the file to disk first. Otherwise a loss of power may leave an empty file.

    Raises:
        OSError: The file cannot be written; an existing file is unchanged.
    """
    aside = path.with_name(f".{path.name}.{ranks.rank()}.partial")
    aside.write_text(text if hidden else secrets.hide(text), encoding="utf-8")
    if durable:
        sync(aside)
    aside.replace(path)
    if durable:
        sync(path.parent)


def read_again(read: Callable[[], Any]) -> Any:
    """The result of ``read``, which is called again after an error, such as a stale handle of a network file system.

    Raises:
        OSError: The last attempt failed, too. A RuntimeError becomes one: torch raises it for a file that it cannot open.
    """
    for seconds in RETRY_SECONDS:
        with suppress(OSError, RuntimeError):
            return read()
        sleep(seconds)
    try:
        return read()
    except RuntimeError as error:
        raise OSError(error) from None


def sync_folder(folder: Path) -> None:
    """Flush a folder and everything in it to disk, but not its own name.

    Raises:
        OSError: It cannot be written.
    """
    for path in (*folder.rglob("*"), folder):
        sync(path)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents durably.

    Raises:
        OSError: It cannot be created.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def move_aside(folder: Path) -> Path:
    """Rename a folder to the first free ``NAME.NUMBER``, and return the new path.

    Raises:
        OSError: The folder cannot be renamed.
    """
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(target)
