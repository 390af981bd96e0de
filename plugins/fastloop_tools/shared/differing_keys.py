"""The keys in which recipes, or other facts of runs, differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

Rows = list[tuple[str, list[str]]]
"""Key -> its value in each recipe."""


def rows_that_differ(facts: Sequence[Mapping[str, str]]) -> Rows:
    """The keys whose values are not all the same."""
    keys = dict.fromkeys(chain.from_iterable(facts))
    rows = []
    for key in keys:
        values = [of_recipe.get(key, "") for of_recipe in facts]
        if len(set(values)) > 1:
            rows.append((key, values))
    return rows


def dotted(values: Any, where: str = "") -> dict[str, str]:
    """The dotted keys of a recipe -> values as text. Plugins are keyed by name, not by position.

    Values are written as in YAML: ``{"train": {"lr": 1.0, "max_steps": None}, "plugins": ["ema", {"amp": {"dtype":
    "bf16"}}]}`` is ``{"train.lr": "1.0", "train.max_steps": "null", "plugins.ema": "on", "plugins.amp": "dtype:
    bf16"}``.
    """
    if isinstance(values, Mapping):
        texts: dict[str, str] = {}
        for key, value in values.items():
            texts |= dotted(value, f"{where}.{key}" if where else str(key))
        if not texts and where:
            return {where: "{}"}
        return texts
    if where == "plugins" and isinstance(values, list):
        texts = {}
        for entry in values:
            named = entry if isinstance(entry, Mapping) else {entry: {}}
            for name, options in named.items():
                texts[f"plugins.{name}"] = _options(options)
        return texts
    return {where: as_yaml(values)}


def as_yaml(value: Any) -> str:
    """A value of a recipe or a summary as it is written in YAML: ``null``, ``true``, ``[1, 2]``."""
    if isinstance(value, bool | list | Mapping) or value is None:
        return json.dumps(value, default=str)
    return str(value)


def _options(options: Any) -> str:
    if isinstance(options, Mapping) and options:
        return ", ".join(f"{key}: {as_yaml(value)}" for key, value in options.items())
    return "off" if options is False else "on"
