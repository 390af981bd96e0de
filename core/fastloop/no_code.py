"""``--no-code``: refuse a recipe that runs code of its own, such as a recipe from a stranger.

Each command that runs a recipe has the option. It sets an environment variable, so that it also applies to the
processes that a command starts: those of ``--nproc``, of a sweep or of a measurement.

Each place that runs code which a recipe names calls ``refuse`` first: imports of files and modules
(``fastloop.recipe.importing``), code that ships with a model, kernels of the hub, and classes in DeepSpeed's JSON file.
Installed packages still run: fastloop, its libraries, and the plugins of other packages that the recipe lists or that
``auto.packages`` permits. ``announce`` logs the name of each such plugin before it is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastloop.errors import RecipeError

OPTION = "--no-code"
"""The option of the commands."""
VARIABLE = "FASTLOOP_NO_CODE"
"""Environment variable of this process and of the processes that it starts: 1 if the option was given."""
LIBRARIES = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "USE_HUB_KERNELS": "NO"}
"""Environment variable of a library -> its value with the option: ``torch.load`` then reads no pickled objects, and
transformers downloads no kernels."""

_announced: set[str] = set()
"""The plugins that ``announce`` has logged."""


def is_forbidden() -> bool:
    """Whether a recipe must not run code of its own."""
    return os.environ.get(VARIABLE) == "1"


@contextmanager
def forbidding() -> Iterator[None]:
    """Refuse code of recipes in this context, and in the processes that are started in it.

    Raises:
        RecipeError: Python imports modules from the current folder.
    """
    variables = {VARIABLE: "1", **LIBRARIES}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        check_import_path(Path())
        yield
    finally:
        _announced.clear()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def check_import_path(folder: Path) -> None:
    """Check that a file in a folder, such as one beside a stranger's recipe, cannot replace an installed module.

    Raises:
        RecipeError: Python imports modules from the folder.
    """
    if folder.resolve() in [Path(entry).resolve() for entry in sys.path]:
        raise RecipeError(
            f"Python imports modules from {folder.resolve()}, so a file beside the recipe can replace installed code.",
            code="code-refused",
            place=OPTION,
            remedy="Start fastloop as `fastloop`, not as `python -m fastloop`, and remove the folder from PYTHONPATH.",
        )


def refuse(where: str, code: str) -> None:
    """Refuse code that a recipe names, if the command was called with ``--no-code``.

    Args:
        where: The recipe and its key.
        code: The code, such as ``file.py:name``, and how it would run: the subject of the message.

    Raises:
        RecipeError: The option was given.
    """
    if is_forbidden():
        raise RecipeError(
            f"{code}, which {OPTION} refuses.",
            code="code-refused",
            place=where,
            remedy=f"Read that code first. If you trust it, leave out {OPTION}.",
        )


def announce(plugin: str, package: str) -> None:
    """With ``--no-code``, log once that a plugin of another package runs.

    Args:
        plugin: Its name.
        package: The name and the version of the package.
    """
    if is_forbidden() and plugin not in _announced:
        import logging  # only here: the list of commands imports this module

        _announced.add(plugin)
        logging.getLogger("fastloop").info(
            "%s: runs the installed plugin %s of the package %s", OPTION, plugin, package
        )


def words() -> list[str]:
    """The option as words of a command line; none if it was not given."""
    return [OPTION] if is_forbidden() else []
