"""Numbers as text, and round numbers for the ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence


def number(value: float) -> str:
    """A number as short text."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    for least, unit, digits, suffix in ((1e9, 1e9, 3, "G"), (1e6, 1e6, 4, "M"), (1e4, 1e3, 4, "k")):
        if size >= least:
            return f"{value / unit:.{digits}g}{suffix}"
    return f"{value:.3g}" if size and size < 1e-3 else f"{value:.4g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers between two values, at least two of them if the values differ."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    found = []
    while first * step <= high + 1e-9 * step:
        found.append(first * step)
        first += 1
    return found if len(found) > 1 else ticks(low, high, count + 1)


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels of evenly spaced values, with the same unit and as many decimals as the distance of two values needs."""
    if len(values) < 2:
        return [number(value) for value in values]
    size, step = max(map(abs, values)), values[1] - values[0]
    unit, suffix = next(
        ((unit, text) for unit, text, least in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4)) if size >= least),
        (1, ""),
    )
    if size < 1e-3:
        power = math.floor(math.log10(size))
        unit, suffix = 10.0**power, f"e{power}"
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return ["0" if abs(value) < step / 1e6 else f"{value / unit:.{decimals}f}{suffix}" for value in values]
