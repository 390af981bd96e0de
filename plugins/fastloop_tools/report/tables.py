"""How the runs of a page differ: in their recipes, and in the environment that they ran in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastloop_tools.shared.differing_keys import Rows, as_yaml, dotted, rows_that_differ

ENVIRONMENT = ("device", "world_size", "plugins", "disabled", "versions")
"""Keys of a summary that describe where and with what a run ran."""
NAMES = {"world_size": "processes", "disabled": "disabled plugins"}
"""Names of these keys on the page, if others."""


def differences(recipes: Sequence[Mapping[str, Any]]) -> Rows:
    """The keys in which recipes differ. Ignores the output folder."""
    rows = rows_that_differ([dotted(recipe) for recipe in recipes])
    return [(key, values) for key, values in rows if key != "output"]


def environment(summaries: Sequence[Mapping[str, Any]]) -> Rows:
    """The facts in which runs differ. A fact that a run has not recorded is no difference."""
    facts_of_runs: list[dict[str, str]] = []
    for summary in summaries:
        facts: dict[str, str] = {}
        for key in ENVIRONMENT:
            name = NAMES.get(key, key)
            value = summary.get(key)
            if isinstance(value, Mapping):
                facts |= {f"{name}: {part}": as_yaml(text) for part, text in value.items()}
            elif value is not None:
                facts[name] = ", ".join(map(as_yaml, value)) if isinstance(value, list) else as_yaml(value)
        facts_of_runs.append(facts)
    rows = rows_that_differ(facts_of_runs)
    return [(key, values) for key, values in rows if len(set(values) - {""}) > 1]
