"""The option ``timeout`` of the strategies."""

from __future__ import annotations

from typing import Any

from fastloop import Strategy, option
from fastloop_plugins._time import parse_time


class TimedStrategy(Strategy):
    """A strategy whose processes wait for each other for a limited time."""

    timeout: float | str | None = option(
        "Longest wait for another process, in seconds or such as 10m; null: torch's 10 or 30 minutes.", default=None
    )

    def timeout_setting(self) -> dict[str, Any]:
        """The setting of the process group's timeout, if the recipe has the option."""
        if self.timeout is None:
            return {}
        return {"process_timeout": parse_time(str(self.timeout), f"{self.where}.timeout:")}
