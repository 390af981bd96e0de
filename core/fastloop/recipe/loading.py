"""Makes a ``Recipe`` from a file, the recipes that it ``extends``, and the command line; or from mappings of Python.

Order of precedence, low to high: the recipe named by ``extends:``, the file, ``--with``, overrides (``train.lr=1e-4``,
``plugins.amp.dtype=fp16``), ``--without``. An override may also set an option of a default plugin
(``plugins.progress.every=1``). ``${train.lr}`` stands for another key's value. Resolvers such as ``${oc.env:...}`` are
refused.

The task plugin checks ``model`` and ``data``, and each plugin its options. This module checks ``train`` and the form of
the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastloop import no_code
from fastloop.errors import RecipeError, did_you_mean
from fastloop.options import parse
from fastloop.plugins.installed import defaults, find_entry_point
from fastloop.problem import clause
from fastloop.recipe import safe_yaml, secrets
from fastloop.recipe.overrides import apply_overrides
from fastloop.recipe.paths import anchored, check_path, find_recipe
from fastloop.recipe.plugin_references import plugin_name, plugins_by_name, split_file
from fastloop.recipe.recipe import SECTIONS, Recipe, Train


def load_recipe(
    name: str,
    overrides: Iterable[str] = (),
    with_plugins: Iterable[str] = (),
    without_plugins: Iterable[str] = (),
    variants: Iterable[str] = (),
) -> Recipe:
    """Read a recipe file and apply the command line's additions.

    Args:
        name: A path, or a shipped recipe's name.
        overrides: Dotlist items such as ``train.lr=1e-4`` or ``plugins.amp.dtype=fp16``.
        with_plugins: Plugins to add, as a recipe lists them. A plugin that the recipe lists keeps its options.
        without_plugins: Plugins to leave out, also default ones.
        variants: Plugins to add, too, which ``fastloop bench --variants`` names.

    Raises:
        RecipeError: The file cannot be read, or a key is invalid; names file, key and the expected value.
    """
    path = find_recipe(name)
    references: dict[str, str] = {}
    tree = _read(path, [], references)
    for option, added in (("--with", with_plugins), ("--variants", variants)):
        for reference in added:
            plugin = plugin_name(reference, option, path, references)
            if plugin not in tree["plugins"] and split_file(reference) is None:
                find_entry_point(reference, option)  # a misspelled name is reported where it was written
            tree["plugins"][plugin] = tree["plugins"].get(plugin) or {}
    listed = set(tree["plugins"])
    tree = apply_overrides(tree, overrides, str(path), references)
    overridden = [plugin for plugin in tree["plugins"] if plugin not in listed]
    for reference in without_plugins:
        plugin = plugin_name(reference, "--without", path, {})
        if plugin not in tree["plugins"] and split_file(reference) is None:
            find_entry_point(reference, "--without")
        tree["plugins"][plugin] = False
    if no_code.is_forbidden():
        no_code.check_import_path(path.parent)
    recipe = make_recipe(tree, path, references)
    for plugin in overridden:
        if recipe.plugins[plugin] is not False and not defaults()[plugin].load().auto_enable(recipe):
            raise RecipeError(
                "an override sets its options, but the recipe does not list it, and it is not on by default here.",
                code="plugin-not-listed",
                place=f"{path}: plugins.{plugin}",
                remedy=f"Add it with --with {plugin}.",
            )
    return recipe


def make_recipe(
    tree: Mapping[str, Any], source: Path | None = None, references: Mapping[str, str] | None = None
) -> Recipe:
    """A typed recipe from plain mappings.

    Args:
        source: The recipe's file.
        references: Listed form of plugins that ``tree`` has by name.

    Raises:
        RecipeError: A key is invalid.
    """
    where = str(source) if source else "recipe"
    secrets.remember(tree, where)
    _check_sections(tree, where)
    output = tree.get("output") or (f"runs/{source.stem}" if source else "runs/run")
    if not isinstance(output, str) or "://" in output:
        raise RecipeError(
            code="wrong-type",
            place=f"{where}: output",
            found=repr(output),
            expected="the path of a folder on this machine",
        )
    check_path(output, source)
    references = dict(references or {})
    return Recipe(
        model=dict(tree.get("model") or {}),
        data=dict(tree.get("data") or {}),
        train=parse(Train, tree.get("train"), f"{where}: train"),
        plugins=plugins_by_name(tree.get("plugins"), where, source, references),
        output=output,
        references=references,
        source=source,
    )


def _check_sections(tree: Mapping[str, Any], where: str) -> None:
    """Check the names of a recipe's sections, the keys in them, and that ``model`` and ``data`` are mappings.

    Raises:
        RecipeError: One of them is invalid.
    """
    for key in tree:
        if key not in SECTIONS:
            raise RecipeError(
                "no such section.",
                code="unknown-section",
                place=f"{where}: {key}",
                remedy=did_you_mean(str(key), (*SECTIONS, "extends")),
            )
    safe_yaml.check_keys(tree, where)
    for section in ("model", "data"):
        if not isinstance(tree.get(section) or {}, Mapping):
            raise RecipeError(
                code="wrong-type",
                place=f"{where}: {section}",
                found=repr(tree[section]),
                expected="a mapping such as {name: ...}",
            )


def _read(path: Path, seen: list[Path], references: dict[str, str]) -> dict[str, Any]:
    """Read a file and the recipe that it extends, with ``plugins`` by name.

    Args:
        seen: Files that extend this one, to find a circle. Gets the file.
        references: Gets plugin name -> its listed form, see ``plugin_name``.
    """
    if path.resolve() in seen:
        raise RecipeError(
            f"recipes extend each other: {' -> '.join(map(str, (*seen, path)))}.",
            code="extends-itself",
            place=f"{path}: extends",
        )
    seen.append(path.resolve())
    try:
        tree = safe_yaml.load(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot be read: {clause(error)}.", code="file-unreadable", place=str(path)) from None
    if not isinstance(tree, dict) or not tree:
        raise RecipeError(
            code="wrong-type", place=str(path), expected=f"a mapping with the sections {', '.join(SECTIONS)}"
        )
    secrets.remember(tree, str(path))
    tree["plugins"] = plugins_by_name(tree.get("plugins"), str(path), path, references)
    parent_name = tree.pop("extends", None)
    if parent_name is None:
        return tree
    parent_path = _find_parent(parent_name, path)
    parent_references: dict[str, str] = {}
    parent = _read(parent_path, seen, parent_references)
    if parent_path.parent != path.parent:  # its files are beside it, and not beside this one
        parent_references = anchored(parent_references, parent_path.parent)
        for section in {"model", "data", "plugins"}.intersection(parent):
            parent[section] = anchored(parent[section], parent_path.parent)
    for plugin, reference in parent_references.items():
        references.setdefault(plugin, reference)
    given = {section: value for section, value in tree.items() if value is not None}
    merged: dict[str, Any] = _merge(parent, given)
    return merged


def _find_parent(name: Any, path: Path) -> Path:
    """The file of ``extends``: a path beside the recipe ``path``, or a recipe as on the command line."""
    if not isinstance(name, str):
        raise RecipeError(
            code="wrong-type", place=f"{path}: extends", found=repr(name), expected="one recipe's path or name"
        )
    beside = path.parent / check_path(name, path)
    return beside if beside.is_file() else find_recipe(name)


def _merge(base: Any, top: Any) -> Any:
    """Merge nested mappings; other values of ``top`` replace those of ``base``."""
    if not isinstance(base, Mapping) or not isinstance(top, Mapping):
        return top
    merged = dict(base)
    for key, value in top.items():
        merged[key] = _merge(base.get(key), value)
    return merged
