"""The folder of an export: complete or absent."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from fastloop.errors import SaveError, UsageError
from fastloop.problem import clause
from fastloop.runtime.files import naming, partial_folder, refuse_full_disk, replace_folder


def check(folder: Path, overwrite: bool, source: Path) -> None:
    """Check that an export may be written.

    Args:
        source: The folder that the export is made from.

    Raises:
        UsageError: The folder is a file, or holds files without ``overwrite``, or the current folder or the source is
            in it.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(code="not-a-folder", place=f"--out {folder}", found="a file", expected="a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise UsageError(
            "holds files.",
            code="folder-not-empty",
            place=f"--out {folder}",
            expected="a new or empty folder, or the option --overwrite",
        )
    for inside in (Path.cwd(), source.resolve()):
        if inside.is_relative_to(folder.resolve()):
            raise UsageError(
                f"contains {inside}, so it cannot be replaced.",
                code="folder-not-empty",
                place=f"--out {folder}",
                expected="another folder",
            )


@contextmanager
def written(folder: Path) -> Iterator[Path]:
    """A new folder for the files. After the block, it replaces ``folder``. If the block raises, it is removed, and
    ``folder`` stays.

    Raises:
        SaveError: The files cannot be written.
    """
    aside = partial_folder(folder)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        with naming(folder):
            yield aside
        replace_folder(aside, folder)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        refuse_full_disk(error, folder)
        if isinstance(error, OSError | SafetensorError):
            raise SaveError(f"{folder} was not written: {clause(error)}.", code="save-failed") from error
        raise
