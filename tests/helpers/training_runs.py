"""Trains a run that a test has built with ``lifecycle.build``, and closes it. ``lifecycle.open_run`` does both."""

from __future__ import annotations

from typing import Any

from fastloop import lifecycle
from fastloop.run import Run


def execute(run: Run) -> dict[str, Any]:
    """Train, test, export and tear down. Returns the summary."""
    with lifecycle.close_after(run):
        return lifecycle.execute(run)
