"""Builds the optimizer that ``train.optimizer`` names, unless a plugin builds one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fastloop.errors import RecipeError, did_you_mean
from fastloop.plugins.plugin import hookimpl
from fastloop.problem import clause
from fastloop.recipe.references import argument_names, check_arguments, import_object, takes_any_argument

if TYPE_CHECKING:
    from fastloop.recipe import Recipe
    from fastloop.run import Run


def optimizer_function(recipe: Recipe) -> Callable[..., torch.optim.Optimizer]:
    """The class or function that ``train.optimizer`` names: in torch.optim, or ``package.module:name`` or
    ``file.py:name``.

    Raises:
        RecipeError: It does not exist, or is not an optimizer.
    """
    name = recipe.train.optimizer_name
    where = f"{recipe.where}: train.optimizer"
    if ":" in name:
        optimizer: Callable[..., torch.optim.Optimizer] = import_object(name, recipe, "train.optimizer")
        is_other_class = isinstance(optimizer, type) and not issubclass(optimizer, torch.optim.Optimizer)
        if not callable(optimizer) or is_other_class:
            raise RecipeError(
                f"{name} is no subclass of torch.optim.Optimizer, and no function that returns one.",
                code="wrong-type",
                place=where,
            )
        return optimizer
    known: dict[str, type[torch.optim.Optimizer]] = {}
    for key, value in vars(torch.optim).items():
        is_class = isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
        if is_class and value is not torch.optim.Optimizer:
            known[key] = value
    if name not in known:
        raise RecipeError(
            f"torch.optim has no {name!r}.",
            code="unknown-optimizer",
            place=where,
            remedy=f"{did_you_mean(name, known)} Another one is package.module:name.",
        )
    return known[name]


def optimizer_keywords(recipe: Recipe) -> dict[str, Any]:
    """The keyword arguments of ``optimizer_function`` that the recipe sets: ``lr``, ``weight_decay`` and those in
    ``train.optimizer``.

    A ``train.weight_decay`` of 0 is left out if the function has no such parameter.

    Raises:
        RecipeError: The function has no such parameter, or ``train.optimizer`` has ``lr`` or ``weight_decay``.
    """
    train = recipe.train
    function = optimizer_function(recipe)
    where = f"{recipe.where}: train.optimizer"
    own = {"lr": train.lr, "weight_decay": train.weight_decay}
    takes_decay = takes_any_argument(function) or "weight_decay" in argument_names(function)
    if not takes_decay and not train.weight_decay:
        del own["weight_decay"]
    for key, value in own.items():
        if key in train.optimizer_arguments:
            argument = train.optimizer_arguments[key]
            raise RecipeError(
                f"found {argument!r}, but the optimizer gets the value of train.{key}, which is {value!r}.",
                code="set-twice",
                place=f"{where}.{key}",
                remedy=f"Remove it here. To use {argument!r}, set train.{key}={argument}.",
            )
    check_arguments(function, train.optimizer_name, [*own, *train.optimizer_arguments], where)
    return own | train.optimizer_arguments


@hookimpl(trylast=True)
def check_recipe(recipe: Recipe) -> None:
    """Check that ``train.optimizer`` names an optimizer and arguments of it."""
    optimizer_keywords(recipe)


@hookimpl(trylast=True)
def build_optimizer(run: Run, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The recipe's ``train.optimizer`` for the trainable parameters.

    Raises:
        RecipeError: The optimizer does not take these arguments.
    """
    where = f"{run.recipe.where}: train.optimizer: {run.recipe.train.optimizer_name}"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    arguments = {**optimizer_keywords(run.recipe), **run.settings.optimizer}
    try:
        optimizer = optimizer_function(run.recipe)(parameters, **arguments)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{where} was called with {arguments}: {clause(error)}.", code="call-failed") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RecipeError(
            f"{where} returned a {type(optimizer).__name__}, expected a torch.optim.Optimizer.", code="wrong-result"
        )
    return optimizer
