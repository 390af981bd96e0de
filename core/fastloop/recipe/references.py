"""Objects that a recipe's key names: ``package.module:name``, or ``file.py:name`` relative to the recipe."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from fastloop import no_code
from fastloop.errors import RecipeError, did_you_mean
from fastloop.recipe import Recipe
from fastloop.recipe.importing import import_code, import_file
from fastloop.recipe.paths import nothing_at


def check_reference(reference: str, recipe: Recipe, key: str) -> tuple[str, str]:
    """Check a reference without running code, and split it at the colon.

    Args:
        reference: ``package.module:name`` or ``path/to/file.py:name``; the path may be relative to the recipe.
        key: The recipe's key, for messages.

    Raises:
        RecipeError: The reference has another form, the file or package does not exist, or the command has the option
            ``--no-code``.
    """
    where = f"{recipe.where}: {key}"
    home, _, name = reference.rpartition(":")
    if not home or not name.isidentifier():
        raise RecipeError(
            code="wrong-format", place=where, found=repr(reference), expected="file.py:name or package.module:name"
        )
    package = home.partition(".")[0]
    is_file = home.endswith(".py")
    if is_file:
        if not recipe.find(home).is_file():
            problem = nothing_at(recipe.find(home))
            if problem == "no such file":
                problem = f"no such file: {home}, neither in the current folder nor beside the recipe"
            raise RecipeError(
                f"{problem}.",
                code="file-missing",
                place=where,
            )
    elif not package or (package not in sys.modules and importlib.util.find_spec(package) is None):
        raise RecipeError(
            f"no package {package!r} is installed.",
            code="not-installed",
            place=where,
            remedy=f"Install it, or name a file: file.py:{name}.",
        )
    no_code.refuse(where, f"it runs the Python code of {recipe.find(home) if is_file else home}")
    return home, name


def import_object(reference: str, recipe: Recipe, key: str) -> Any:
    """Import the object that a reference names.

    Raises:
        RecipeError: See ``check_reference``; or the import fails (names the line), or the name does not exist.
    """
    home, name = check_reference(reference, recipe, key)
    if home.endswith(".py"):
        module = import_file(home, recipe, key)
    else:
        module = import_code(home, importlib.import_module, home, recipe, key)
    if not hasattr(module, name):
        # dir(module), unlike vars(module), has the names that a lazy module such as transformers has not imported yet.
        public = [known for known in dir(module) if not known.startswith("_")]
        raise RecipeError(
            f"{home} has no {name!r}.",
            code="unknown-name",
            place=f"{recipe.where}: {key}",
            remedy=did_you_mean(name, public),
        )
    return getattr(module, name)


def takes_any_argument(function: Callable[..., Any]) -> bool:
    """Whether a function takes keyword arguments of any name."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def argument_names(function: Callable[..., Any]) -> list[str]:
    """The names of a function's arguments, without the first one, which fastloop gives."""
    return list(inspect.signature(function).parameters)[1:]


def check_arguments(function: Callable[..., Any], name: str, keys: Iterable[str], place: str) -> None:
    """Check that a function that a recipe names takes the arguments that the recipe gives, without calling it.

    Args:
        function: Its first argument is given by fastloop, such as the parameters of an optimizer.
        name: Its name, for messages.
        keys: The names of the keyword arguments.
        place: The recipe and the key of the arguments, for messages.

    Raises:
        RecipeError: It has no such argument. The message has its signature.
    """
    if takes_any_argument(function):
        return
    taken = argument_names(function)
    for key in keys:
        if key not in taken:
            parameters = inspect.signature(function).parameters.values()
            listed = inspect.Signature([parameter.replace(annotation=parameter.empty) for parameter in parameters])
            raise RecipeError(
                "no such argument.",
                code="unknown-argument",
                place=f"{place}.{key}",
                remedy=f"{did_you_mean(key, taken)} The signature: {name}{listed}",
            )
