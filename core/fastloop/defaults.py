"""The core's own answers to *first* hooks: asked last, so any plugin's answer comes before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastloop import loop
from fastloop.errors import RecipeError, did_you_mean
from fastloop.plugin import hookimpl

if TYPE_CHECKING:
    from fastloop.recipe import Recipe
    from fastloop.run import Run


@hookimpl
def check_recipe(recipe: Recipe) -> None:
    """``train.optimizer`` must be a class of torch.optim.

    Raises:
        RecipeError: torch.optim has no such class.
    """
    names = {name for name, cls in vars(torch.optim).items() if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)}
    if recipe.train.optimizer not in names - {"Optimizer"}:
        hint = did_you_mean(recipe.train.optimizer, names - {"Optimizer"})
        raise RecipeError(f"{recipe.where}: train.optimizer: torch.optim has no {recipe.train.optimizer!r}.{hint}")


@hookimpl
def build_collator(run: Run) -> Any:
    """Torch's default: stacks tensors and numbers."""
    return torch.utils.data.default_collate


@hookimpl
def build_optimizer(run: Run, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The recipe's ``train.optimizer`` over the parameters that are trained."""
    train = run.recipe.train
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, train.optimizer)(
        parameters, lr=train.lr, weight_decay=train.weight_decay, **run.optimizer_arguments
    )
    return optimizer


@hookimpl
def evaluate(run: Run, split: str) -> dict[str, float]:
    """The core's evaluation loop."""
    return loop.evaluation_loop(run, split)


@hookimpl
def export_model(run: Run, folder: Path) -> Path:
    """The weights as ``model.safetensors``."""
    from fastloop.checkpoint import save_tensors

    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(run.unwrapped().state_dict(), folder / "model.safetensors")
    return folder
