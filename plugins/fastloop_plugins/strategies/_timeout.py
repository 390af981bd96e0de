"""The option ``timeout`` of the strategies."""

from __future__ import annotations

from typing import Any

from fastloop_plugins._time import parse_time

TIMEOUT = "Longest wait for another process, in seconds or such as 10m; null: torch's 10 or 30 minutes."


def read_timeout(plugin: Any) -> dict[str, Any]:
    """The setting of the process group's timeout, if the strategy has the option."""
    if plugin.config.timeout is None:
        return {}
    return {"process_timeout": parse_time(str(plugin.config.timeout), f"{plugin.where}.timeout:")}
