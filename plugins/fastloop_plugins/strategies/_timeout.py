"""The option ``timeout`` of the strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastloop import option
from fastloop_plugins._time import parse_time

if TYPE_CHECKING:
    from fastloop import AcceleratorDraft

Timeout = Annotated[
    float | str | None,
    option("Time to wait for another process, in seconds or such as 10m; null: torch's default, 10 or 30 minutes."),
]


def set_timeout(plugin: Any, draft: AcceleratorDraft) -> None:
    """Set the timeout of the process group, if the strategy has the option."""
    if plugin.config.timeout is not None:
        draft.timeout = parse_time(str(plugin.config.timeout), f"{plugin.where}.timeout:")
