"""Build a JSON Schema of recipes from the ``train`` section, the options of every plugin and every task's ``sections``.

Editors use it to complete and check recipes, and the docs are built from it: a table written by hand is wrong after the
next change. The schema describes a single file. No key is required, because ``extends`` or the command line may set it,
and ``${another.key}`` is valid for any value. `fastloop plan` checks combinations of options, files and the machine.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from fastloop.options import adapter
from fastloop.plugins.declared_options import options_of
from fastloop.plugins.installed import installed, is_own, load, name_and_version
from fastloop.plugins.plugin import Plugin
from fastloop.problem import typed_clause
from fastloop.recipe import Train

DIALECT = "https://json-schema.org/draft/2020-12/schema"
REFERENCE = r"^(.+\.py(:\w+)?|[\w.-]+:[\w.-]+)$"
"""References to plugins that are not listed by name: ``./file.py``, ``./file.py:Class``, ``package:name``."""
_INTERPOLATION = {
    "type": "string",
    "pattern": r"^(\$\{[^${}:]+\}|\?\?\?)$",
    "description": "${another.key}, or ??? for a value that must be set.",
}
_REFERENCE_ITEM = {
    "type": "string",
    "pattern": REFERENCE,
    "description": "A plugin in a file next to the recipe, or in the named package.",
}
ONE_KEY = {"type": "object", "minProperties": 1, "maxProperties": 1}
"""A mapping of one name."""


def recipe_schema(every: bool = False, others: bool = True) -> tuple[dict[str, Any], list[str]]:
    """Returns the schema, and a message for each plugin that was left out.

    Args:
        every: Import plugins of other distributions, too. Otherwise the schema has only their names and accepts any
            options.
        others: Whether plugins of other distributions are part of it at all.
    """
    definitions: dict[str, Any] = {"interpolation": _INTERPOLATION, "train": _mapping(Train, "train", "How to train.")}
    descriptions: dict[str, str] = {}
    sections: dict[str, dict[type, list[str]]] = {"model": {}, "data": {}}
    opaque = []
    problems = []
    for name, point in installed().items():
        if not others and not is_own(point):
            continue
        if not every and not is_own(point):
            descriptions[name] = " ".join(name_and_version(point.dist)) if point.dist else ""
            definitions[f"plugins.{name}"] = {"type": ["object", "null"]}
            opaque.append(name)
            continue
        try:
            cls = load(name)
            definitions[f"plugins.{name}"] = _mapping(options_of(cls), f"plugins.{name}", summary(cls))
            for section, keys in cls.sections.items():
                sections[section].setdefault(keys, []).append(name)
        except Exception as error:
            problems.append(f"{name} is left out: {typed_clause(error)}")
            continue
        descriptions[name] = summary(cls)
        if cls.slot == "task" and not cls.sections:
            opaque.append(name)
    return _assemble(definitions, descriptions, sections, opaque), problems


def docstring(cls: type[Plugin]) -> str:
    """The docstring of a plugin's module, or of its class if the module has none."""
    module = sys.modules.get(cls.__module__)
    return inspect.cleandoc(getattr(module, "__doc__", None) or cls.__doc__ or "")


def summary(cls: type[Plugin]) -> str:
    """First line of the docstring of a plugin's module or class."""
    return docstring(cls).partition("\n")[0]


def _mapping(cls: type, name: str, description: str) -> dict[str, Any]:
    """Define a section or the options of a plugin: null, or a mapping whose values may be interpolations."""
    schema = json_schema(cls, f"#/$defs/{name}")
    properties = {}
    for key, value in schema["properties"].items():
        annotations = {word: value.pop(word) for word in ("description", "default") if word in value}
        members = value.get("anyOf", [value]) if value else []
        if all(_refuses_some_text(member) for member in members):
            members = [*members, {"$ref": "#/$defs/interpolation"}]
        if len(members) == 1:
            properties[key] = {**annotations, **members[0]}
        elif members:
            properties[key] = {**annotations, "anyOf": members}
        else:
            properties[key] = annotations
    schema.pop("required", None)
    return {**schema, "type": ["object", "null"], "description": description, "properties": properties}


def _refuses_some_text(schema: dict[str, Any]) -> bool:
    return schema.get("type") != "string" or bool({"enum", "const", "pattern"} & schema.keys())


def _assemble(
    definitions: dict[str, Any],
    descriptions: dict[str, str],
    sections: dict[str, dict[type, list[str]]],
    opaque: list[str],
) -> dict[str, Any]:
    known: dict[str, list[dict[str, Any]]] = {}
    for section, owners in sections.items():
        for cls, names in owners.items():
            definitions[f"{section}.{names[0]}"] = _mapping(cls, f"{section}.{names[0]}", f"For {' and '.join(names)}.")
        known[section] = [{"$ref": f"#/$defs/{section}.{names[0]}"} for names in owners.values()]
    return {
        "$schema": DIALECT,
        "title": "A recipe of fastloop",
        "type": "object",
        "minProperties": 1,
        "properties": {
            "extends": {
                "type": "string",
                "description": "The recipe to extend: a relative path, or the name of a shipped recipe.",
            },
            "model": {
                "description": "The model. The task defines the keys.",
                "anyOf": [*known["model"], {"type": ["object", "null"]}],
            },
            "data": {
                "description": "The data. The task defines the keys.",
                "anyOf": [*known["data"], {"type": ["object", "null"]}],
            },
            "train": {"$ref": "#/$defs/train"},
            "plugins": {
                "description": "Plugins by name, in call order.",
                "type": ["array", "null"],
                "items": _plugin_item(descriptions),
            },
            "output": {"type": ["string", "null"], "description": "The run folder; null: runs/ and the recipe's name."},
        },
        "additionalProperties": False,
        "if": {"not": _unknown_sections(opaque)},
        "then": {"properties": {section: {"anyOf": members} for section, members in known.items() if members}},
        "$defs": definitions,
    }


def _plugin_item(descriptions: Mapping[str, str]) -> dict[str, Any]:
    """The schema of an item of ``plugins``: a name or a reference, or a mapping of one to its options.

    Args:
        descriptions: Plugin -> the first line of its description.
    """
    names = [{"const": name, "description": text} for name, text in descriptions.items()]
    options_by_name = {}
    for name, text in descriptions.items():
        options_by_name[name] = {
            "description": text,
            "anyOf": [{"$ref": f"#/$defs/plugins.{name}"}, {"const": False}],
        }
    any_options = {"anyOf": [{"type": ["object", "null"]}, {"const": False}]}
    with_options = {
        **ONE_KEY,
        "properties": options_by_name,
        "patternProperties": {REFERENCE: any_options},
        "additionalProperties": False,
    }
    return {"anyOf": [*names, _REFERENCE_ITEM, with_options]}


def _unknown_sections(opaque: list[str]) -> dict[str, Any]:
    """The schema of recipes whose ``model`` and ``data`` may have keys that are not known: they extend another one, or
    list a plugin that may be a task with keys of its own.

    Args:
        opaque: Plugins whose sections are not known.
    """
    may_be_task: dict[str, Any] = {"anyOf": [{"enum": opaque}, _REFERENCE_ITEM]}
    item = {"anyOf": [*may_be_task["anyOf"], {**ONE_KEY, "propertyNames": may_be_task}]}
    lists_task = {"required": ["plugins"], "properties": {"plugins": {"contains": item}}}
    return {"anyOf": [{"required": ["extends"]}, lists_task]}


def json_schema(cls: type, pointer: str) -> dict[str, Any]:
    """A JSON Schema of the mappings that ``parse`` accepts for the dataclass ``cls``.

    Args:
        pointer: Location in the enclosing schema, such as ``#/$defs/train``.
    """
    from pydantic.json_schema import GenerateJsonSchema

    class Untitled(GenerateJsonSchema):
        """Omits the titles that pydantic derives from names."""

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    schema = adapter(cls).json_schema(ref_template=f"{pointer}/$defs/{{model}}", schema_generator=Untitled)
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            schema["properties"][field.name]["default"] = field.default_factory()
    return {key: value for key, value in schema.items() if key not in ("title", "description")}
