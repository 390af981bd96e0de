"""Read the config of another library, find its format, and write a recipe with comments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fastloop.errors import UsageError
from fastloop.recipe import safe_yaml
from fastloop_tools.importing.keys import FORMATS, MARKS


def read_config(file: Path, format: str) -> tuple[dict[str, Any], str]:
    """The config in a file, and its format.

    Raises:
        UsageError: The file cannot be read, is no plain data or no mapping, or has no key of a known format.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            config = json.loads(text)
        else:
            safe_yaml.check(text, str(file))
            config = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise UsageError(f"{file}: cannot be read as YAML or JSON: {why}.") from None
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise UsageError(f"{file}: found a {type(config).__name__}, expected a mapping of keys to values.")
    if format == "auto":
        found = next((name for name in FORMATS if not config.keys().isdisjoint(MARKS[name])), None)
        if found is None:
            known = ", ".join(f"{MARKS[name][0]} ({name})" for name in FORMATS)
            raise UsageError(f"{file}: no key of a known format. Expected one such as {known}, or give --format.")
        format = found
    return config, format


def recipe_text(recipe: Mapping[str, Any], notes: Mapping[str, str], file: Path, format: str) -> str:
    """The recipe as YAML. Comments list the keys without a counterpart."""
    lines = [f"# Made by `fastloop import` from {' '.join(file.name.split())} ({format})."]
    if notes:
        lines += ["# Keys without an equal counterpart:", *(f"#   {key}: {reason}" for key, reason in notes.items())]
    for section, value in recipe.items():
        if isinstance(value, Mapping):
            lines += ["", f"{section}:", *(f"  {key}: {inline(item)}" for key, item in value.items())]
        elif isinstance(value, list):
            entries = [item if isinstance(item, str) else entry(item) for item in value]
            lines += ["", f"{section}:", *(f"  - {text}" for text in entries)]
        else:
            lines += ["", f"{section}: {inline(value)}"]
    return "\n".join(lines) + "\n"


def entry(plugin: Mapping[str, Any]) -> str:
    """A plugin with its options, as a list of a recipe has it."""
    ((name, options),) = plugin.items()
    return f"{name}: {inline(options)}"


def inline(value: Any) -> str:
    """A value as YAML in one line."""
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")
