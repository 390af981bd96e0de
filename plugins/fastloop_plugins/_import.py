"""Finds a Python object that a recipe names: ``package.module:name``, or ``file.py:name`` with the file beside the recipe."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from fastloop.errors import RecipeError, did_you_mean
from fastloop.recipe import Recipe


def check_reference(recipe: Recipe, key: str, reference: str) -> None:
    """Refuse a reference that cannot be right, without running any of the named code.

    Raises:
        RecipeError: It has another form, or there is no such file or package.
    """
    where = f"{recipe.where}: {key}"
    module, colon, name = reference.partition(":")
    if not colon or not module or not name.isidentifier():
        raise RecipeError(f"{where}: found {reference!r}, expected 'package.module:name' or 'file.py:name'.")
    if module.endswith(".py"):
        if not recipe.find(module).is_file():
            raise RecipeError(f"{where}: there is no file {module}, neither from here nor beside the recipe.")
    elif importlib.util.find_spec(module.partition(".")[0]) is None:
        raise RecipeError(f"{where}: there is no package {module.partition('.')[0]!r}. Install it, or name a file: 'file.py:{name}'.")


def load_reference(recipe: Recipe, key: str, reference: str) -> Any:
    """The object that a reference names. An error inside the named code is raised as it is.

    Raises:
        RecipeError: The module is not there, or has no such name.
    """
    check_reference(recipe, key, reference)
    path, _, name = reference.partition(":")
    if path.endswith(".py"):
        module = _run_file(recipe, path)
    else:
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise
            raise RecipeError(f"{recipe.where}: {key}: there is no module {error.name!r}.") from None
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise RecipeError(f"{recipe.where}: {key}: {path} has no {name!r}.{did_you_mean(name, public)}")
    return getattr(module, name)


def _run_file(recipe: Recipe, path: str) -> ModuleType:
    file = recipe.find(path).resolve()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)  # pickling and dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
