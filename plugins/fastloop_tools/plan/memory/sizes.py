"""Sizes in bytes: read from an option, and written in one unit."""

from __future__ import annotations

import re

from fastloop.errors import UsageError

PREFIXES = {"": 1.0} | {prefix: 1000.0**power for power, prefix in enumerate("kMGT", 1)}
PREFIXES |= {f"{prefix.upper()}i": 1024.0**power for power, prefix in enumerate("kMGT", 1)}


def parse_bytes(text: str, option: str) -> float:
    """``80GiB``, ``50GB``, ``400Gbit`` or ``80e9`` in bytes.

    Args:
        option: The option that takes it, for the message.

    Raises:
        UsageError: It is not a size above 0.
    """
    match = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?) ?([kKMGT]i?)?(B|bit)?", text.strip())
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    prefix = (match[2] or "") if match else ""
    prefix = {"K": "k", "ki": "Ki"}.get(prefix, prefix)
    if match is None or not number > 0:
        raise UsageError(
            code="wrong-format", place=f"{option} {text}", expected="a size above 0, such as 80GiB, 50GB or 400Gbit"
        )
    return number * PREFIXES[prefix] / (8 if match[3] == "bit" else 1)


def unit_for(largest: float) -> tuple[str, float]:
    """A unit in which the largest size of a table has up to four digits before the point, and its bytes."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if largest >= size:
            return unit, float(size)
    return "KiB", 1024.0


def format_size(value: float) -> str:
    """A number of four characters, or of five above 9,999."""
    if value == 0:
        return "0"
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"
