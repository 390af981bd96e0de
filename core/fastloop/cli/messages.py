"""What the core and plugins say through ``logging.getLogger("fastloop")``, on the console."""

from __future__ import annotations

import logging

from fastloop.distributed import launch
from fastloop.recipe import secrets


class Messages(logging.Handler):
    """Prints through rich's console, so that a live display stays below."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message; warnings say that they are."""
        import rich

        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        rich.get_console().print(prefix + self.format(record), markup=False, highlight=False, soft_wrap=True)


def show_messages() -> None:
    """Show what the core and plugins say from here on; once is enough. Of several processes, the main one shows it."""
    logger = logging.getLogger("fastloop")
    if launch.rank():
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
        return
    if not any(isinstance(handler, Messages) for handler in logger.handlers):
        handler = Messages()
        handler.setFormatter(secrets.Formatter())
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
