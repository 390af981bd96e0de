"""How a recipe lists plugins: by name, by package and name, or by file. ``source`` reads what a file declares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fastloop.errors import RecipeError, did_you_mean
from fastloop.recipe.paths import find_path
from fastloop.recipe.source import read, split


def plugin_name(reference: str, where: str, source: Path | None, references: dict[str, str]) -> str:
    """The name of the plugin that ``reference`` refers to.

    Args:
        reference: ``name``, ``package:name``, ``file.py`` or ``file.py:Class``. A file's code does not run.
        where: The recipe and key, or the option, for messages.
        source: The recipe's file, whose folder is searched too; None: only the current folder.
        references: Gets ``name -> reference`` if they differ and the name is not in it yet.

    Raises:
        RecipeError: There is no such file, or no such plugin in it.
    """
    if (parts := split(reference)) is not None:
        name = _name_in_file(*parts, where=f"{where}: {reference}", source=source)
    else:
        name = reference.rpartition(":")[2]
    if reference != name:
        references.setdefault(name, reference)
    return name


def _name_in_file(file: str, cls: str, where: str, source: Path | None) -> str:
    path = find_path(file, source)
    try:
        found = read(path)
    except OSError:
        beside = " nor beside the recipe" if source else ""
        raise RecipeError(f"{where}: there is no file {file} that can be read, in the current folder{beside}.") from None
    except SyntaxError as error:
        raise RecipeError(f"{where}: {path}, line {error.lineno}: not valid Python: {error.msg}.") from None
    plugins = found.plugins()
    if cls and cls not in plugins:
        what = "has no literal `name`, or no base class" if cls in found.classes else "is not a class of the file"
        raise RecipeError(f"{where}: {cls} {what}.{did_you_mean(cls, plugins)}")
    if not plugins:
        classes = f"It has the classes {', '.join(found.classes)}. " if found.classes else ""
        raise RecipeError(f'{where}: the file holds no plugin. {classes}Expected a subclass of fastloop.Plugin with `name = "..."`.')
    if not cls and len(plugins) > 1:
        raise RecipeError(f"{where}: the file holds several plugins. Say which: {' or '.join(f'{file}:{known}' for known in plugins)}.")
    return plugins[cls] if cls else next(iter(plugins.values()))


def plugins_by_name(
    plugins: Any, where: str, source: Path | None, references: dict[str, str]
) -> dict[str, dict[str, Any] | Literal[False]]:
    """A recipe's ``plugins`` as a mapping from name to options; False: left out. Overrides address plugins by name.

    Args:
        plugins: A list of references and of mappings from one reference to its options, or one mapping of them; None: no plugins.
        where, source, references: As ``plugin_name``.

    Raises:
        RecipeError: ``plugins`` has another form or lists a name twice, or as ``plugin_name``.
    """
    if plugins is None:
        return {}
    if isinstance(plugins, Mapping):
        items = list(plugins.items())
    elif isinstance(plugins, list):
        items = []
        for index, entry in enumerate(plugins):
            if isinstance(entry, str):
                items.append((entry, {}))
            elif isinstance(entry, Mapping) and len(entry) == 1:
                items.append(next(iter(entry.items())))
            else:
                raise RecipeError(f"{where}: plugins[{index}]: found {entry!r}, expected a name or one {{name: {{option: value}}}}.")
    else:
        raise RecipeError(f"{where}: plugins: found {plugins!r}, expected a list of names.")
    found: dict[str, dict[str, Any] | Literal[False]] = {}
    for reference, options in items:
        name = plugin_name(str(reference), f"{where}: plugins", source, references)
        if name in found:
            raise RecipeError(f"{where}: plugins: {name!r} is listed twice. Remove one.")
        if options is not None and options is not False and not isinstance(options, Mapping):
            raise RecipeError(f"{where}: plugins.{reference}: found {options!r}, expected a mapping of options, or false to leave it out.")
        found[name] = False if options is False else dict(options or {})
    return found
