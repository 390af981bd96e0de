"""Write files atomically and durably, and create and rename folders."""

from __future__ import annotations

from pathlib import Path

from fastloop.distributed import ranks
from fastloop.recipe import secrets
from fastloop.runtime.platform_support import sync


def write(path: Path, text: str, durable: bool = True) -> None:
    """Write a file atomically, with secrets hidden. If several processes write the same file, the last one wins.

    Args:
        durable: Whether to flush the file to disk first. Otherwise a loss of power may leave an empty file.

    Raises:
        OSError: The file cannot be written; an existing file is unchanged.
    """
    aside = path.with_name(f".{path.name}.{ranks.rank()}.partial")
    aside.write_text(secrets.hide(text), encoding="utf-8")
    if durable:
        sync(aside)
    aside.replace(path)
    if durable:
        sync(path.parent)


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
