"""Times in options, such as ``10m``."""

from __future__ import annotations

import re

from fastloop import UsageError


def parse_time(text: str, option: str) -> float:
    """``90s``, ``10m`` or ``1h`` in seconds; a number without a unit counts seconds.

    Args:
        option: The option that takes it, for the message.

    Raises:
        UsageError: It is none of them, or 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or not float(match[1]):
        raise UsageError(code="wrong-format", place=f"{option} {text}", expected="a time such as 90s, 10m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
