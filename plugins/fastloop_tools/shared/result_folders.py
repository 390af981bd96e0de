"""The folder that a command such as ``fastloop bench`` writes its results to. The run folder of a training is in
``fastloop.checkpoint.run_folder``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from fastloop.errors import UsageError
from fastloop.problem import clause
from fastloop.runtime.files import refuse_full_disk


@contextmanager
def explain_output_errors(folder: Path, option: str = "--output") -> Iterator[None]:
    """Explain an error of the block, which changes the folder.

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


def make_output_folder(folder: Path, option: str = "--output") -> None:
    """Create a folder, or check that files can be created in an existing one. Permission bits are not enough: a file
    system may be read-only.

    Args:
        option: The option, or the key of the recipe, that names the folder.

    Raises:
        UsageError: The folder cannot be created or written.
        SaveError: The disk is full.
    """
    with explain_output_errors(folder, option):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def refuse_output_override(overrides: Iterable[str]) -> None:
    """Refuse the override ``output=FOLDER`` in a command that leaves no run folder: its results have ``--output``.

    Raises:
        UsageError: The override is given.
    """
    for override in overrides:
        key, _, folder = override.partition("=")
        if key == "output":
            raise UsageError(
                "this key of a recipe names the run folder, and this command leaves none.",
                code="no-effect",
                place=override,
                remedy=f"For the folder of the results, give --output {quote(folder)} instead.",
            )
