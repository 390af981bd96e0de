"""Code that a recipe names: ``package.module:name``, or ``file.py:name`` beside the recipe. Checking a reference runs none of it."""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fastloop.errors import RecipeError, did_you_mean
from fastloop.recipe import Recipe
from fastloop.recipe.source import split

PREFIX = "fastloop_file_"
"""What the modules' names of files begin with."""
MANY = 50_000
"""New objects between two looks for garbage, while libraries are imported."""


@contextmanager
def libraries() -> Iterator[None]:
    """While torch and others are imported and a run is built: they make a million objects that stay, and looking at them for garbage is an
    eighth of a start. Later looks leave them out, and so do not copy them in the processes that read data."""
    before = gc.get_threshold()
    ours = (MANY, *before[1:])
    gc.set_threshold(*ours)
    try:
        yield
        gc.freeze()
    finally:
        if gc.get_threshold() == ours:  # else a plugin has chosen
            gc.set_threshold(*before)


def check_reference(reference: str, recipe: Recipe, key: str) -> None:
    """Refuse a reference that cannot be right, without running what it names.

    Args:
        reference: ``package.module:name`` or ``path/to/file.py:name``; the path may be relative to the recipe.
        key: Where it stands in the recipe, for messages.

    Raises:
        RecipeError: It has another form, or there is no such file or package.
    """
    where = f"{recipe.where}: {key}"
    home, _, name = reference.rpartition(":")
    if not home or not name.isidentifier():
        raise RecipeError(f"{where}: found {reference!r}, expected file.py:name or package.module:name.")
    package = home.partition(".")[0]
    if home.endswith(".py"):
        if not recipe.find(home).is_file():
            raise RecipeError(f"{where}: no such file: {home}, neither in the current folder nor beside the recipe.")
    elif not package or (package not in sys.modules and importlib.util.find_spec(package) is None):
        raise RecipeError(f"{where}: no package {package!r} is installed. Install it, or name a file: file.py:{name}.")


def import_object(reference: str, recipe: Recipe, key: str) -> Any:
    """Import what a reference names.

    Raises:
        RecipeError: As ``check_reference``; or the code fails on import (says in which line), or has no such name.
    """
    check_reference(reference, recipe, key)
    home, _, name = reference.rpartition(":")
    module = import_file(home, recipe, key) if home.endswith(".py") else _imported(home, importlib.import_module, home, recipe, key)
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise RecipeError(f"{recipe.where}: {key}: {home} has no {name!r}.{did_you_mean(name, public)}")
    return getattr(module, name)


def import_file(file: str, recipe: Recipe, key: str) -> ModuleType:
    """Import a file, once.

    Raises:
        RecipeError: The code fails; says in which line.
    """
    return _imported(file, _from_file, recipe.find(file).resolve(), recipe, key)


def files(recipe: Recipe) -> list[Path]:
    """The Python files whose code a run of the recipe executes: plugins', and those that ``model``, ``data`` or an option refer to."""
    found: dict[Path, None] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Mapping):
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)
        elif isinstance(value, str) and (parts := split(value)) is not None and recipe.find(parts[0]).is_file():
            found.setdefault(recipe.find(parts[0]).resolve())

    listed = {recipe.references.get(name, name): options for name, options in recipe.plugins.items() if options is not False}
    walk([*listed, *listed.values(), recipe.model, recipe.data, recipe.train.optimizer])
    return list(found)


def _imported(what: str, load: Callable[[Any], ModuleType], home: Any, recipe: Recipe, key: str) -> ModuleType:
    try:
        return load(home)
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f" ({last.filename}, line {last.lineno})" if "importlib" not in last.filename else ""
        raise RecipeError(f"{recipe.where}: {key}: {what} cannot be imported: {type(error).__name__}: {error}{place}.") from error


def _from_file(path: Path) -> ModuleType:
    name = f"{PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of the file's classes look themselves up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
