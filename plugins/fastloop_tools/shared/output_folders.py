"""The folder that a command writes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastloop.errors import UsageError
from fastloop.problem import clause
from fastloop.runtime.files import refuse_full_disk


@contextmanager
def explain_output_errors(folder: Path, option: str = "--output") -> Iterator[None]:
    """Explain an error of the block, which creates the folder.

    Args:
        option: The option, or the key of the recipe, that names the folder.

    Raises:
        UsageError: The folder cannot be created.
        SaveError: The disk is full.
    """
    try:
        yield
    except OSError as error:
        refuse_full_disk(error, folder)
        raise UsageError(
            f"cannot be created: {clause(error)}.", code="folder-not-writable", place=f"{option} {folder}"
        ) from None
