"""Records that commands write as JSON files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from fastloop.errors import UsageError
from fastloop.problem import clause

MALFORMED = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of reading a value from a record of another form. Pydantic's is a ``ValueError``."""
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number of a record: NaN for null, as ``fastloop.runtime.json_text`` writes it."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UsageError: The file cannot be read, or holds another value.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot be read: {clause(error)}.", code="file-unreadable", place=str(path)) from None
    if not isinstance(content, dict):
        raise UsageError(code="wrong-format", place=str(path), expected="one JSON object")
    return content
