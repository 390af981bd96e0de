"""Code that a recipe names: ``package.module:name``, or ``file.py:name`` beside the recipe."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from typing import Any

from fastloop.errors import RecipeError, did_you_mean
from fastloop.recipe import Recipe


def import_object(reference: str, recipe: Recipe, key: str) -> Any:
    """Import what ``reference`` names.

    Args:
        reference: ``package.module:name`` or ``path/to/file.py:name``; a path may be relative to the recipe.
        key: Where the reference stands in the recipe, for messages.

    Raises:
        RecipeError: It has another form, the file or module is not there or fails on import, or has no such name.
    """
    where = f"{recipe.where}: {key}"
    module_name, colon, name = reference.rpartition(":")
    if not colon or not module_name or not name.isidentifier():
        raise RecipeError(f"{where}: found {reference!r}, expected file.py:name or package.module:name.")
    try:
        module = _from_file(module_name, recipe, where) if module_name.endswith(".py") else importlib.import_module(module_name)
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(f"{where}: {module_name} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise RecipeError(f"{where}: {module_name} has no {name!r}.{did_you_mean(name, public)}")
    return getattr(module, name)


def _from_file(file: str, recipe: Recipe, where: str) -> Any:
    path = recipe.find(file).resolve()
    if not path.is_file():
        raise RecipeError(f"{where}: no such file: {file} (looked in the current folder and beside the recipe).")
    name = f"fastloop_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
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
