"""Import code that a recipe refers to: ``package.module:name``, or ``file.py:name`` relative to the recipe."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fastloop.errors import RecipeError, did_you_mean
from fastloop.recipe import Recipe

PREFIX = "fastloop_file_"
"""Start of the module names of imported files."""


def check_reference(reference: str, recipe: Recipe, key: str) -> tuple[str, str]:
    """Check a reference without running code, and split it at the colon.

    Args:
        reference: ``package.module:name`` or ``path/to/file.py:name``; the path may be relative to the recipe.
        key: The recipe's key, for messages.

    Raises:
        RecipeError: The reference has another form, or the file or package does not exist.
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
    return home, name


def import_object(reference: str, recipe: Recipe, key: str) -> Any:
    """Import the object that a reference names.

    Raises:
        RecipeError: See ``check_reference``; or the import fails (names the line), or the name does not exist.
    """
    home, name = check_reference(reference, recipe, key)
    module = import_file(home, recipe, key) if home.endswith(".py") else _import(home, importlib.import_module, home, recipe, key)
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise RecipeError(f"{recipe.where}: {key}: {home} has no {name!r}.{did_you_mean(name, public)}")
    return getattr(module, name)


def import_file(file: str, recipe: Recipe, key: str) -> ModuleType:
    """Import a file once.

    Raises:
        RecipeError: The code fails; names the line.
    """
    return _import(file, _load_file, recipe.find(file).resolve(), recipe, key)


def _import(label: str, load: Callable[[Any], ModuleType], home: Any, recipe: Recipe, key: str) -> ModuleType:
    try:
        return load(home)
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f" ({last.filename}, line {last.lineno})" if "importlib" not in last.filename else ""
        raise RecipeError(f"{recipe.where}: {key}: {label} cannot be imported: {type(error).__name__}: {error}{place}.") from error


def _load_file(path: Path) -> ModuleType:
    name = f"{PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up the file's classes here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
