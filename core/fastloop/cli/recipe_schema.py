"""A JSON Schema of recipes, from what declares their keys: the ``train`` section, every plugin's ``Config``, every task's ``sections``.

Editors complete and check recipes by it, and the docs are made from it. It describes one file as it is written: ``extends`` and the
command line may give what the file leaves out, so no key is required, and ``${another.key}`` may stand for any value. What options ask of
each other, and of files and the machine, `fastloop plan` checks.
"""

from __future__ import annotations

import inspect
from typing import Any

from fastloop.options import json_schema
from fastloop.plugin import Observer, Plugin
from fastloop.recipe import Train
from fastloop.registry import installed, load

DIALECT = "https://json-schema.org/draft/2020-12/schema"
ELSEWHERE = r"^(.+\.py(:\w+)?|[\w.-]+:[\w.-]+)$"
"""How a recipe lists a plugin that is not known here by name: ``./file.py``, ``./file.py:Class``, ``package:name``."""
_STANDS_FOR = {"type": "string", "pattern": r"^(\$\{[^${}:]+\}|\?\?\?)$", "description": "${another.key}, or ??? for what is to be given."}


def recipe_schema(every: bool = False) -> tuple[dict[str, Any], list[str]]:
    """The schema, and why plugins were left out of it, a line each.

    Args:
        every: Import other distributions' plugins too. Otherwise their names are known, and their options may be anything.
    """
    definitions: dict[str, Any] = {"stands-for": _STANDS_FOR, "train": _mapping(Train, "train", "How to train.")}
    about: dict[str, str] = {}
    sections: dict[str, dict[type, list[str]]] = {"model": {}, "data": {}}
    opaque, problems = [], []
    for name, point in installed().items():
        if not every and (point.dist is None or point.dist.name != "fastloop"):
            about[name] = f"{point.dist.name} {point.dist.version}" if point.dist else ""
            definitions[f"plugins.{name}"] = {"type": ["object", "null"]}
            opaque.append(name)
            continue
        try:
            cls = load(name)
            definitions[f"plugins.{name}"] = options = _mapping(cls.Config, f"plugins.{name}", summary(cls))
            if cls.read_only:
                options["properties"] |= _mapping(Observer, f"plugins.{name}", "")["properties"]
            for section, keys in cls.sections.items():
                sections[section].setdefault(keys, []).append(name)
        except Exception as error:
            problems.append(f"{name} is left out: {type(error).__name__}: {error}")
            continue
        about[name] = summary(cls)
        if cls.slot == "task" and not cls.sections:
            opaque.append(name)
    return _whole(definitions, about, sections, opaque), problems


def summary(cls: type[Plugin]) -> str:
    """What a plugin is, in the first line of its module's or its class's docstring."""
    return inspect.cleandoc(getattr(inspect.getmodule(cls), "__doc__", None) or cls.__doc__ or "").partition("\n")[0]


def _mapping(cls: type, name: str, description: str) -> dict[str, Any]:
    """A definition for a section or a plugin's options: nothing or a mapping, whose values may stand elsewhere in the recipe."""
    schema = json_schema(cls, f"#/$defs/{name}")
    properties = {}
    for key, value in schema["properties"].items():
        shown = {word: value.pop(word) for word in ("description", "default") if word in value}
        members = value.get("anyOf", [value]) if value else []
        if all(_refuses_some_text(member) for member in members):
            members = [*members, {"$ref": "#/$defs/stands-for"}]
        properties[key] = {**shown, **(members[0] if len(members) == 1 else {"anyOf": members} if members else {})}
    schema.pop("required", None)
    return {**schema, "type": ["object", "null"], "description": description, "properties": properties}


def _refuses_some_text(schema: dict[str, Any]) -> bool:
    return schema.get("type") != "string" or bool({"enum", "const", "pattern"} & schema.keys())


def _whole(
    definitions: dict[str, Any], about: dict[str, str], sections: dict[str, dict[type, list[str]]], opaque: list[str]
) -> dict[str, Any]:
    known: dict[str, list[dict[str, Any]]] = {}
    for section, owners in sections.items():
        for cls, names in owners.items():
            definitions[f"{section}.{names[0]}"] = _mapping(cls, f"{section}.{names[0]}", f"For {' and '.join(names)}.")
        known[section] = [{"$ref": f"#/$defs/{section}.{names[0]}"} for names in owners.values()]
    by_name = {
        name: {"description": text, "anyOf": [{"$ref": f"#/$defs/plugins.{name}"}, {"const": False}]} for name, text in about.items()
    }
    options = {"type": "object", "minProperties": 1, "maxProperties": 1}
    elsewhere = {"type": "string", "pattern": ELSEWHERE, "description": "A plugin of a file beside the recipe, or of the package named."}
    item = {
        "anyOf": [
            *({"const": name, "description": text} for name, text in about.items()),
            elsewhere,
            {
                **options,
                "properties": by_name,
                "patternProperties": {ELSEWHERE: {"anyOf": [{"type": ["object", "null"]}, {"const": False}]}},
                "additionalProperties": False,
            },
        ]
    }
    not_known = {  # a plugin that may be a task with keys of its own
        "anyOf": [
            {"enum": opaque},
            elsewhere,
            {**options, "propertyNames": {"anyOf": [{"enum": opaque}, elsewhere]}},
        ]
    }
    open_sections = {"anyOf": [{"required": ["extends"]}, {"required": ["plugins"], "properties": {"plugins": {"contains": not_known}}}]}
    return {
        "$schema": DIALECT,
        "title": "A recipe of fastloop",
        "type": "object",
        "minProperties": 1,
        "properties": {
            "extends": {"type": "string", "description": "A recipe that this one changes: a path from here, or a shipped one's name."},
            "model": {"description": "What is trained. The task has its keys.", "anyOf": [*known["model"], {"type": ["object", "null"]}]},
            "data": {
                "description": "What it is trained on. The task has its keys.",
                "anyOf": [*known["data"], {"type": ["object", "null"]}],
            },
            "train": {"$ref": "#/$defs/train"},
            "plugins": {"description": "Plugins by name, in the order in which they are called.", "type": ["array", "null"], "items": item},
            "output": {"type": ["string", "null"], "description": "The run folder; null: runs/ and the recipe's name."},
        },
        "additionalProperties": False,
        "if": {"not": open_sections},
        "then": {"properties": {section: {"anyOf": members} for section, members in known.items() if members}},
        "$defs": definitions,
    }
