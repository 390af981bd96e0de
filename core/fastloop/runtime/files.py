"""Write files atomically, and rename existing folders."""

from __future__ import annotations

from pathlib import Path

from fastloop.distributed import ranks
from fastloop.recipe import secrets


def write(path: Path, text: str) -> None:
    """Write a file atomically, with secrets hidden. If several processes write the same file, the last one wins.

    Raises:
        OSError: The file cannot be written; an existing file is unchanged.
    """
    aside = path.with_name(f".{path.name}.{ranks.rank()}.partial")
    aside.write_text(secrets.hide(text), encoding="utf-8")
    aside.replace(path)


def move_aside(folder: Path) -> Path:
    """Rename a folder to the first free ``NAME.NUMBER``, and return the new path.

    Raises:
        OSError: The folder cannot be renamed.
    """
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(target)
