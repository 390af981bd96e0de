"""How a recipe lists plugins: by name, by package and name, or by file. A file is parsed, not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from fastloop.errors import RecipeError, did_you_mean
from fastloop.recipe.paths import find_path


def read_literals(cls: ast.ClassDef) -> dict[str, Any]:
    """The attributes of a class with literal values, such as ``name``, ``slot`` and ``numerics``."""
    literals = {}
    for item in cls.body:
        if isinstance(item, ast.Assign | ast.AnnAssign) and isinstance(item.value, ast.Constant):
            target = item.target if isinstance(item, ast.AnnAssign) else item.targets[0]
            if isinstance(target, ast.Name):
                literals[target.id] = item.value.value
    return literals


def split_file(reference: str) -> tuple[str, str] | None:
    """Split ``file.py`` or ``file.py:Class`` into the file and the class (or ''). None: not a reference to a file."""
    if reference.endswith(".py"):
        return reference, ""
    home, _, cls = reference.rpartition(":")
    return (home, cls) if home.endswith(".py") else None


def plugin_name(reference: str, where: str, source: Path | None, references: dict[str, str]) -> str:
    """The name of the plugin that ``reference`` refers to.

    Args:
        reference: ``name``, ``package:name``, ``file.py`` or ``file.py:Class``.
        where: The recipe and key, or the option, for messages.
        source: The recipe's file, whose folder is searched too; None: only the current folder.
        references: Gets ``name -> reference`` if they differ and the name is not in it yet.

    Raises:
        RecipeError: There is no such file, or no such plugin in it.
    """
    parts = split_file(reference)
    if parts is not None:
        name = _name_in_file(*parts, where=f"{where}: {reference}", source=source)
    else:
        name = reference.rpartition(":")[2]
    if reference != name:
        references.setdefault(name, reference)
    return name


def _name_in_file(file: str, cls: str, where: str, source: Path | None) -> str:
    path = find_path(file, source)
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError:
        beside = " nor beside the recipe" if source else ""
        raise RecipeError(
            f"there is no file {file} that can be read, in the current folder{beside}.",
            code="file-missing",
            place=where,
        ) from None
    except SyntaxError as error:
        raise RecipeError(
            f"not valid Python: {error.msg}.", code="invalid-python", place=f"{where}: {path}, line {error.lineno}"
        ) from None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    plugins: dict[str, str] = {}  # class -> name of the plugin
    for class_name, node in classes.items():
        name = read_literals(node).get("name")
        if node.bases and isinstance(name, str) and name:
            plugins[class_name] = name
    if cls and cls not in plugins:
        what = "has no literal `name`, or no base class" if cls in classes else "is not a class of the file"
        raise RecipeError(f"{cls} {what}.", code="not-a-plugin", place=where, remedy=did_you_mean(cls, plugins))
    if not plugins:
        held = f"It has the classes {', '.join(classes)}. " if classes else ""
        raise RecipeError(
            f'the file holds no plugin. {held}Expected a subclass of fastloop.Plugin with `name = "..."`.',
            code="no-plugin",
            place=where,
        )
    if not cls and len(plugins) > 1:
        raise RecipeError(
            "the file holds several plugins.",
            code="ambiguous-name",
            place=where,
            remedy=f"Say which: {' or '.join(f'{file}:{known}' for known in plugins)}.",
        )
    return plugins[cls] if cls else next(iter(plugins.values()))


def plugins_by_name(
    plugins: Any, where: str, source: Path | None, references: dict[str, str]
) -> dict[str, dict[str, Any] | Literal[False]]:
    """A recipe's ``plugins`` as a mapping from name to options; False: left out.

    Args:
        plugins: A list of references and of mappings from one reference to its options, or one mapping of them; None:
            no plugins.
        where, source, references: See ``plugin_name``.

    Raises:
        RecipeError: ``plugins`` has another form, a name is listed twice, or see ``plugin_name``.
    """
    entries: dict[str, dict[str, Any] | Literal[False]] = {}
    for reference, options in _each_entry(plugins, where):
        name = plugin_name(str(reference), f"{where}: plugins", source, references)
        if name in entries:
            raise RecipeError(
                f"{name!r} is listed twice.", code="listed-twice", place=f"{where}: plugins", remedy="Remove one."
            )
        if options is not None and options is not False and not isinstance(options, Mapping):
            raise RecipeError(
                code="wrong-type",
                place=f"{where}: plugins.{reference}",
                found=repr(options),
                expected="a mapping of options, or false to leave it out",
            )
        entries[name] = False if options is False else dict(options or {})
    return entries


def _each_entry(plugins: Any, where: str) -> Iterator[tuple[Any, Any]]:
    """The reference and the options of each entry of a recipe's ``plugins``.

    Raises:
        RecipeError: ``plugins`` or an entry has another form.
    """
    if plugins is None:
        return
    if isinstance(plugins, Mapping):
        yield from plugins.items()
        return
    if not isinstance(plugins, list):
        raise RecipeError(code="wrong-type", place=f"{where}: plugins", found=repr(plugins), expected="a list of names")
    for index, entry in enumerate(plugins):
        if isinstance(entry, str):
            yield entry, {}
        elif isinstance(entry, Mapping) and len(entry) == 1:
            yield from entry.items()
        else:
            raise RecipeError(
                code="wrong-type",
                place=f"{where}: plugins[{index}]",
                found=repr(entry),
                expected="a name or one {name: {option: value}}",
            )
