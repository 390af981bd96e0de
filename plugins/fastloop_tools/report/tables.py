"""Tables of the page, such as those of how runs differ: in their recipes, and in the environment that they ran in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Rows = list[tuple[str, list[str]]]
"""Key -> the value of each run."""
ENVIRONMENT = ("device", "world_size", "plugins", "disabled", "versions")
"""Keys of a summary that describe where and with what a run ran."""
NAMES = {"world_size": "processes", "disabled": "disabled plugins"}
"""Names of these keys on the page, if others."""


class Cell(NamedTuple):
    """A value, and whether it is the best of its kind."""

    text: str
    best: bool = False


@dataclass
class ReportTable:
    """A table with a head and names of rows.

    Attributes:
        corner: The head of the names.
        numbers: Whether the cells are numbers.
    """

    corner: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    numbers: bool = False

    def transposed(self, corner: str) -> ReportTable:
        """The table with its columns as rows."""
        cells = zip(*(cells for _, cells in self.rows), strict=True)
        rows = [(name, list(row)) for name, row in zip(self.columns, cells, strict=True)]
        return ReportTable(corner, [name for name, _ in self.rows], rows, self.numbers)


def differences(recipes: Sequence[Mapping[str, Any]]) -> Rows:
    """The keys in which recipes differ. Ignores the output folder."""
    rows = compare([flat(recipe) for recipe in recipes])
    return [(key, values) for key, values in rows if key != "output"]


def environment(summaries: Sequence[Mapping[str, Any]]) -> Rows:
    """The facts in which runs differ. A fact that a run has not recorded is no difference."""
    found: list[dict[str, str]] = []
    for summary in summaries:
        facts: dict[str, str] = {}
        for key in ENVIRONMENT:
            name, value = NAMES.get(key, key), summary.get(key)
            if isinstance(value, Mapping):
                facts |= {f"{name}: {part}": str(text) for part, text in value.items()}
            elif value is not None:
                facts[name] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        found.append(facts)
    rows = compare(found)
    return [(key, values) for key, values in rows if len(set(values) - {""}) > 1]


def compare(facts: Sequence[Mapping[str, str]]) -> Rows:
    """The keys whose values are not all the same."""
    keys = dict.fromkeys(key for one in facts for key in one)
    rows = [(key, [one.get(key, "") for one in facts]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def flat(values: Any, where: str = "") -> dict[str, str]:
    """A recipe's dotted keys -> values as text. Plugins are keyed by name, not by position."""
    if isinstance(values, Mapping):
        found: dict[str, str] = {}
        for key, value in values.items():
            found |= flat(value, f"{where}.{key}" if where else str(key))
        return found or ({where: "{}"} if where else {})
    if where == "plugins" and isinstance(values, list):
        named = {
            name: options
            for entry in values
            for name, options in (entry.items() if isinstance(entry, Mapping) else [(entry, {})])
        }
        return {f"plugins.{name}": _options(options) for name, options in named.items()}
    return {where: json.dumps(values) if isinstance(values, list) else str(values)}


def _options(options: Any) -> str:
    if isinstance(options, Mapping) and options:
        return ", ".join(f"{key}: {value}" for key, value in options.items())
    return "off" if options is False else "on"
