"""Files that are whole or as they were, and folders that are moved aside before something takes their place."""

from __future__ import annotations

from pathlib import Path

from fastloop.distributed import launch
from fastloop.recipe import secrets


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all, without secrets. Several processes may write the same one: the last has it.

    Raises:
        OSError: It cannot be written; what was there is as it was.
    """
    aside = path.with_name(f".{path.name}.{launch.rank()}.partial")
    aside.write_text(secrets.hide(text), encoding="utf-8")
    aside.replace(path)


def move_aside(folder: Path) -> Path:
    """Give a folder the first free name with a number behind it, and return that.

    Raises:
        OSError: It cannot be renamed.
    """
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(aside)
