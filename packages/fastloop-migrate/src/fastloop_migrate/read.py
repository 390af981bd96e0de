"""Reads the config of another library, and finds its format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastloop import UsageError
from fastloop_tools.toolkit import load_yaml

from fastloop_migrate.keys import FORMATS, MARKS, SCRIPT_MARKS


def read_config(file: Path, format: str) -> tuple[dict[str, Any], str]:
    """The config in a file, and its format.

    Raises:
        UsageError: The file cannot be read, is no plain data or no mapping, or has no key of a known format.
    """
    try:
        text = file.read_text(encoding="utf-8")
        config = json.loads(text) if file.suffix == ".json" else load_yaml(text, str(file))
    except (OSError, ValueError, RecursionError) as error:
        why = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise UsageError(f"cannot be read as YAML or JSON: {why}.", code="file-unreadable", place=str(file)) from None
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise UsageError(
            code="wrong-type",
            place=str(file),
            found=f"a {type(config).__name__}",
            expected="a mapping of keys to values",
        )
    if format == "auto":
        library = next((name for name in FORMATS if not config.keys().isdisjoint(MARKS[name])), None)
        if library == "trl" and not config.keys().isdisjoint(SCRIPT_MARKS):
            library = "transformers"
        if library is None:
            known = ", ".join(f"{MARKS[name][0]} ({name})" for name in FORMATS)
            raise UsageError(
                "no key of a known format.",
                code="unknown-format",
                place=str(file),
                expected=f"one such as {known}, or give --format",
            )
        format = library
    return config, format
