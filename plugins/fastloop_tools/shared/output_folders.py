"""The folder that a command writes to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastloop.errors import UsageError
from fastloop.problem import clause
from fastloop.runtime.files import refuse_full_disk


@contextmanager
def explain_output_errors(folder: Path, option: str = "--output") -> Iterator[None]:
    """Explain an error of the block, which makes the folder by ``make_writable``.

    Args:
        option: The option, or the key of the recipe, that names the folder.

    Raises:
        UsageError: The folder cannot be written.
        SaveError: The disk is full.
    """
    try:
        yield
    except OSError as error:
        refuse_full_disk(error, folder)
        raise UsageError(
            f"cannot be written: {error.strerror or clause(error)}.",
            code="folder-not-writable",
            place=f"{option} {folder}",
            remedy="Give another folder.",
        ) from None


def make_writable(folder: Path) -> None:
    """Create a folder, or check that files can be created in an existing one. Permission bits are not enough: a file
    system may be read-only.

    Raises:
        OSError: It cannot be created or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
