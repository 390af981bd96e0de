"""What the core and plugins say through ``logging.getLogger("fastloop")``, on the console."""

from __future__ import annotations

import logging


def show_messages() -> None:
    """Show what the core and plugins say, above a live display when there is one."""
    import rich

    class Messages(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            prefix = "warning: " if record.levelno >= logging.WARNING else ""
            rich.get_console().print(prefix + self.format(record), markup=False, highlight=False, soft_wrap=True)

    logger = logging.getLogger("fastloop")
    logger.setLevel(logging.INFO)
    logger.addHandler(Messages())
    logger.propagate = False
