"""The source of the rows or images of a ``data`` section: exactly one option names it. A function is one of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from fastloop.errors import RecipeError
from fastloop.problem import clause
from fastloop.recipe.references import check_reference, import_object

if TYPE_CHECKING:
    from fastloop.recipe import Recipe


class SourceOptions(Protocol):
    """Options of a ``data`` section that reads the result of a function.

    Attributes:
        module: The function, as ``package.module:name`` or ``file.py:name``; None: another option names the source.
        arguments: Its arguments; None: none.
    """

    module: str | None
    arguments: dict[str, Any] | None


def check_source(options: SourceOptions, sources: Mapping[str, str], recipe: Recipe) -> None:
    """Check that the options name one source.

    Args:
        sources: Option that may name it -> what it is, for messages, such as ``name (a dataset)``.

    Raises:
        RecipeError: They name none or several, or arguments for a function that is not there.
    """
    where = f"{recipe.where}: data"
    named = [key for key in sources if getattr(options, key) is not None]
    if len(named) != 1:
        raise RecipeError(
            code="exclusive-options",
            place=where,
            found=" and ".join(named) or "none",
            expected=f"one of: {', '.join(sources.values())}",
        )
    if options.arguments is not None and options.module is None:
        raise RecipeError(
            "they are for the function of data.module, which is not there.",
            code="unknown-option",
            place=f"{where}.arguments",
        )
    if options.module is not None:
        check_reference(options.module, recipe, "data.module")


def call_source(options: SourceOptions, recipe: Recipe) -> Any:
    """The result of the function ``data.module``.

    Raises:
        RecipeError: The function does not exist, does not accept ``data.arguments``, or needs a package that is not
            installed.
    """
    assert options.module is not None
    function = import_object(options.module, recipe, "data.module")
    arguments = options.arguments or {}
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise RecipeError(
            f"{options.module} cannot take them: {clause(error)}.",
            code="call-failed",
            place=f"{recipe.where}: data.arguments",
        ) from None
    try:
        return function(**arguments)
    except ImportError as error:
        raise RecipeError(
            f"{options.module} needs a module that cannot be imported: {clause(error)}.",
            code="call-failed",
            place=f"{recipe.where}: data.module",
            remedy="Install its package.",
        ) from error
