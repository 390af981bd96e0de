"""Import code that a recipe refers to: modules, and files relative to the recipe."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fastloop import no_code
from fastloop.errors import RecipeError
from fastloop.problem import typed_clause
from fastloop.recipe import Recipe

PREFIX = "fastloop_file_"
"""Start of the module names of imported files."""


def import_file(file: str, recipe: Recipe, key: str) -> ModuleType:
    """Import a file once. It may import the modules beside it.

    Raises:
        RecipeError: The code fails; names the line.
    """
    return import_code(file, _load_file, recipe.find(file).resolve(), recipe, key)


def import_code(label: str, load: Callable[[Any], ModuleType], home: Any, recipe: Recipe, key: str) -> ModuleType:
    """Call ``load(home)``, which runs code of a user.

    Raises:
        RecipeError: The command has the option ``--no-code``; or the code fails (names the line).
    """
    no_code.refuse(f"{recipe.where}: {key}", f"it runs the Python code of {home}")
    try:
        return load(home)
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f" ({last.filename}, line {last.lineno})" if "importlib" not in last.filename else ""
        raise RecipeError(
            f"{label} cannot be imported: {typed_clause(error)}{place}.",
            code="import-failed",
            place=f"{recipe.where}: {key}",
        ) from error


def _load_file(path: Path) -> ModuleType:
    name = f"{PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that a file beside this one does not hide an installed module
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name] = module  # dataclasses and pickle look up the file's classes here
    try:
        module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
    except BaseException:
        del sys.modules[name]
        raise
    return module
