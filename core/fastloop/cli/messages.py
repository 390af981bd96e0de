"""Messages on the console: the log of ``fastloop``, and the error that ends a command."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import sys
import time
import traceback
from typing import NoReturn

from fastloop.distributed import ranks, signals
from fastloop.errors import DataError, FastloopError, PluginCrash, ProcessLost, UsageError, UserCodeError
from fastloop.plugins.packages import DISTRIBUTION
from fastloop.recipe import secrets

SUBJECT = re.compile(
    r"\b(?:(data|model|train)(?:\.(?!(?:csv|tsv|jsonl?|parquet|tar|txt|yaml|py)\b)\w|:)|(plugins?|slot|optimizer|Trainer)\b)"
)
"""The part of a recipe, or of fastloop, that an error is about. Names of files do not count."""
PAGES = {
    "data": "checks/data.md",
    "model": "checks/tasks.md",
    "train": "recipe.md",
    "plugins": "checks/plugins.md",
    "plugin": "checks/plugins.md",
    "slot": "checks/plugins.md",
    "optimizer": "checks/parameters.md",
    "Trainer": "checks/python.md",
}
"""Subject -> the page of docs/ that explains what is checked."""


ERROR_DELAY = 5.0
"""Seconds to wait before reporting an error that another process probably reports first."""


def documentation(message: str) -> str | None:
    """The address of the page on the first subject of an error message; None: there is no page on it.

    It is below the documentation's address in the package's metadata, or else in docs/ of the repository.
    """
    if (subject := SUBJECT.search(message)) is None:
        return None
    urls = importlib.metadata.metadata(DISTRIBUTION).get_all("Project-URL") or ()
    start = next((url.partition(", ")[2] for url in urls if url.startswith("Documentation, ")), "docs/index.md")
    return start.removesuffix("index.md") + PAGES[subject[1] or subject[2]]


class Messages(logging.Handler):
    """Prints to rich's console, above a live display."""

    def format(self, record: logging.LogRecord) -> str:
        """The message and its traceback, without secrets."""
        return secrets.hide(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message. Warnings have a prefix."""
        import rich

        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        rich.get_console().print(
            prefix + self.format(record), markup=False, emoji=False, highlight=False, soft_wrap=True
        )


def show_messages() -> None:
    """Show log messages from now on. With several processes, only the main process shows them. Repeated calls have no
    effect."""
    logger = logging.getLogger("fastloop")
    if ranks.rank():
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
        return
    if not any(isinstance(handler, Messages) for handler in logger.handlers):
        logger.addHandler(Messages())
    logger.setLevel(logging.INFO)
    logger.propagate = False


def unreadable_package() -> str | None:
    """The message for an installed package whose metadata Python cannot read, or None. Python, torch and transformers
    fail on it."""
    for distribution in importlib.metadata.distributions():
        try:
            _ = distribution.metadata, distribution.entry_points
        except (TypeError, ValueError) as error:
            folder = getattr(distribution, "_path", "?")
            return (
                f"{folder}: the metadata of this package cannot be read: {error}. Install the package again, or "
                "remove this folder."
            )
    return None


def exit_with(error: BaseException) -> NoReturn:
    """Report an error that ended a command, and exit with its code. Raises an error that is a bug."""
    if isinstance(error, FastloopError):
        if isinstance(error, ProcessLost) or (ranks.rank() and isinstance(error, UsageError)):
            # another process failed first or reports the same error, and its exit ends this process
            time.sleep(ERROR_DELAY)
        if isinstance(error, PluginCrash | UserCodeError | DataError) and error.__cause__ is not None:
            print(secrets.hide("".join(traceback.format_exception(error.__cause__))), end="", file=sys.stderr)
        hint = " Its output has the reason. Continue with --resume." if isinstance(error, ProcessLost) else ""
        print(f"error: {secrets.hide(str(error))}{hint}", file=sys.stderr)
        if sys.stderr.isatty() and (page := documentation(str(error))):
            print(f"docs: {page}", file=sys.stderr)
        sys.exit(error.exit_code)
    if isinstance(error, OSError) and error.filename is not None:
        # not of a plugin: those are explained
        print(f"error: {secrets.hide(str(error.filename))}: {error.strerror}.", file=sys.stderr)
        sys.exit(1)
    if isinstance(error, TypeError | ValueError) and (problem := unreadable_package()) is not None:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    if isinstance(error, KeyboardInterrupt | signals.Stopped) and ranks.rank() == 0:
        print(f"stopped by {error}" if isinstance(error, signals.Stopped) else "interrupted", file=sys.stderr)
    if isinstance(error, KeyboardInterrupt):
        sys.exit(signals.EXIT_INTERRUPTED)
    raise error
