"""Messages on the console: the log of ``fastloop``, and an error of another package's metadata."""

from __future__ import annotations

import importlib.metadata
import logging

from fastloop.distributed import ranks
from fastloop.recipe import secrets


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
