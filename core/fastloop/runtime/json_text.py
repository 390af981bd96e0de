"""Values as JSON that every reader accepts: JSON has no NaN and no infinity, and Python writes them nevertheless."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(value: Any, **options: Any) -> str:
    """A value as JSON, with null for NaN and infinity.

    Args:
        options: Those of ``json.dumps``.
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(without_nan(value), allow_nan=False, **options)


def without_nan(value: Any) -> Any:
    """The same value of JSON, with None for each NaN and infinity in it, as JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


def with_nan(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The metrics that ``dumps`` has written: NaN for None."""
    numbers = {}
    for name, value in metrics.items():
        numbers[name] = math.nan if value is None else value
    return numbers
