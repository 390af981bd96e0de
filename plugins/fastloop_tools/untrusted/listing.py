"""The code, files and URLs that a recipe names.

Reads the recipe and package metadata, and imports nothing that the recipe names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from fastloop.errors import FastloopError
from fastloop.plugins.installed import defaults, find_entry_point
from fastloop.plugins.packages import DISTRIBUTION
from fastloop.recipe import Recipe
from fastloop.recipe.plugin_references import split_file
from fastloop_tools.untrusted.effects import effects
from fastloop_tools.untrusted.origin import Origin, find_module, find_name, on_import_path
from fastloop_tools.untrusted.values import Value, files_of, is_import_key, refused_value, values_of


@dataclass(frozen=True)
class Code:
    """Code that a run of the recipe imports.

    Attributes:
        key: The recipe's key that names it.
        name: Its name there.
        kind: ``plugin``, ``default plugin``, ``import``, or ``possible import`` for a value that only looks like one.
        file: The file that defines it; empty if there is none.
        line: The line of its definition; 0: unknown.
        package: Name of the installed package that has the file; empty if none has.
        version: Version of the package.
        arguments: The arguments or options that the recipe gives.
        effects: Effect that the text of the code shows, beyond computation -> the file that shows it.
        note: A remark for the reader.
    """

    key: str
    name: str
    kind: str
    file: str = ""
    line: int = 0
    package: str = ""
    version: str = ""
    arguments: Any = None
    effects: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Listing:
    """Everything outside of the recipe that its run uses.

    Attributes:
        recipe: The recipe's name in messages.
        code: Code that it imports.
        files: Files, folders, URLs and hub names: ``{key, what, use}``.
        refused: ``KEY: NAME: REASON`` for each thing that is not installed.
    """

    recipe: str
    code: list[Code]
    files: list[dict[str, str]]
    refused: list[str]


def list_recipe(recipe: Recipe) -> Listing:
    """List a recipe's code, files and URLs."""
    found = Listing(recipe.where, [], [], [])
    folders = [Path(), *([recipe.source.parent] if recipe.source else [])]
    for folder in folders:
        if on_import_path(folder):
            found.refused.append(
                f"import path: {folder.resolve()}: Python imports modules from there, so a file beside the recipe can "
                "replace installed code. Start fastloop as `fastloop`, not as `python -m fastloop`, and remove the "
                "folder from PYTHONPATH"
            )
            break
    _add_plugins(recipe, found)
    values = list(values_of(recipe))
    for value in values:
        if (reason := refused_value(value, recipe)) is not None:
            found.refused.append(f"{value.key}: {value.text}: {reason}")
        _add_import(value, recipe, found)
    found.files.extend(files_of(recipe, values))
    return found


def _add_plugins(recipe: Recipe, found: Listing) -> None:
    for name, options in recipe.plugins.items():
        if options is False:
            continue
        reference = recipe.references.get(name, name)
        key = f"plugins.{reference}"
        if (parts := split_file(reference)) is not None:
            found.code.append(Code(key, reference, "plugin", str(recipe.find(parts[0]).resolve()), arguments=options))
            found.refused.append(f"{key}: {_local(recipe, parts[0])}")
            continue
        try:
            module = find_entry_point(reference, recipe.where).value.partition(":")[0].strip()
        except FastloopError as error:
            found.code.append(Code(key, reference, "plugin", arguments=options))
            found.refused.append(f"{key}: {str(error).partition(': ')[2].rstrip('.')}")
            continue
        origin = find_module(module)
        _add(found, key, reference, "plugin", module, origin, options)
    for name, point in defaults().items():
        if name not in recipe.plugins:
            module = point.value.partition(":")[0].strip()
            _add(found, f"plugins.{name}", name, "default plugin", module, find_module(module), {})


def _add_import(value: Value, recipe: Recipe, found: Listing) -> None:
    """Add a value that names a Python object: ``package.module:name`` or ``file.py:name``."""
    home, _, name = value.text.rpartition(":")
    parts = split_file(value.text)
    if parts is not None and (is_import_key(value.key) or recipe.find(parts[0]).is_file()):
        file = recipe.find(parts[0])
        found.code.append(Code(value.key, value.text, "import", str(file.resolve()), arguments=value.arguments))
        found.refused.append(f"{value.key}: {_local(recipe, parts[0])}")
    elif parts is None and home and name.isidentifier():
        origin = find_name(home, name)
        if origin is not None or is_import_key(value.key):
            kind = "import" if is_import_key(value.key) else "possible import"
            _add(found, value.key, value.text, kind, home, origin, value.arguments)


def _add(found: Listing, key: str, name: str, kind: str, module: str, origin: Origin | None, arguments: Any) -> None:
    if origin is None:
        found.code.append(Code(key, name, kind, arguments=arguments))
        found.refused.append(f"{key}: {name}: module {module} is not installed")
        return
    shown = effects(module) if not origin.problem and kind != "default plugin" else {}
    note = (
        ""
        if origin.problem or _uses_fastloop(origin.package)
        else "not written for fastloop: the arguments decide what it does"
    )
    found.code.append(
        Code(key, name, kind, origin.file, origin.line, origin.package, origin.version, arguments, shown, note)
    )
    if origin.problem:
        found.refused.append(f"{key}: {name}: {origin.problem}")


def _uses_fastloop(package: str) -> bool:
    """Whether an installed package is fastloop or requires it."""
    requires = (text.lower() for text in distribution(package).requires or ())
    return package == DISTRIBUTION or any(text.startswith("fastloop") for text in requires)


def _local(recipe: Recipe, file: str) -> str:
    place = recipe.find(file).resolve()
    return f"{place}: a local file, and not of an installed package" if place.is_file() else f"{file}: no such file"


def lines(found: Listing) -> Iterator[str]:
    """The listing as text."""
    yield f"recipe   {found.recipe}"
    yield from ("", "Code that the recipe names")
    for code in (code for code in found.code if code.kind != "default plugin"):
        package = f"  ({code.package} {code.version})" if code.package else ""
        yield f"  {code.key}: {code.name}{package}{'  (may be imported)' * (code.kind == 'possible import')}"
        yield f"      {code.file or 'not found'}{f', line {code.line}' * bool(code.line)}"
        if code.arguments:
            yield f"      with {code.arguments}"
        yield from (f"      {effect}: {file}" for effect, file in code.effects.items())
        if code.note:
            yield f"      {code.note}"
    yield from ("", "Plugins of fastloop that are on by default, if they fit the recipe")
    yield "  " + ", ".join(code.name for code in found.code if code.kind == "default plugin")
    yield from ("", "Files and addresses")
    yield from (f"  {item['key']}: {item['use']} {item['what']}" for item in found.files)
