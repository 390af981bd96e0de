"""Import code that a recipe refers to: ``package.module:name``, or ``file.py:name`` relative to the recipe."""

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
from fastloop.recipe.plugin_references import split_file

PREFIX = "fastloop_file_"
"""Start of the module names of imported files."""
GC_THRESHOLD = 50_000
"""New objects between two garbage collections while libraries are imported."""


@contextmanager
def reduced_gc() -> Iterator[None]:
    """Collect garbage less often while torch is imported and a run is built, which saves an eighth of the startup time.

    Then freeze the objects: later collections ignore them, and workers do not copy their pages."""
    original = gc.get_threshold()
    reduced = (GC_THRESHOLD, *original[1:])
    gc.set_threshold(*reduced)
    try:
        yield
        gc.freeze()
    finally:
        if gc.get_threshold() == reduced:  # otherwise a plugin has set it
            gc.set_threshold(*original)


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


def files(recipe: Recipe) -> list[Path]:
    """The Python files that a run of the recipe executes: plugins, and references in ``model``, ``data`` or an option."""

    def references(value: Any) -> Iterator[Path]:
        if isinstance(value, Mapping | list):
            for item in value.values() if isinstance(value, Mapping) else value:
                yield from references(item)
        elif isinstance(value, str) and (parts := split_file(value)) is not None and recipe.find(parts[0]).is_file():
            yield recipe.find(parts[0]).resolve()

    listed = {recipe.references.get(name, name): options for name, options in recipe.plugins.items() if options is not False}
    return list(dict.fromkeys(references([*listed, *listed.values(), recipe.model, recipe.data, recipe.train.optimizer])))


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
