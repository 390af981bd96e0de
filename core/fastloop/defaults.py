"""The core's implementations of *first* hooks. They run last, so any plugin's result takes precedence."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from fastloop import loop
from fastloop.checkpoint import resume
from fastloop.checkpoint.export import save_model
from fastloop.distributed.tensors import gather_full, shard_like, total_norm
from fastloop.errors import PluginError, RecipeError, SaveError, did_you_mean
from fastloop.optimizers import Optimizers, ScaledOptimizers
from fastloop.plugin import hookimpl
from fastloop.recipe.importing import import_object

if TYPE_CHECKING:
    from fastloop.recipe import Recipe
    from fastloop.run import Run
    from fastloop.state import Batch

core_default = hookimpl(trylast=True)


def optimizer_function(recipe: Recipe) -> Callable[..., torch.optim.Optimizer]:
    """The class or function that ``train.optimizer`` names: in torch.optim, or ``package.module:name`` or ``file.py:name``.

    Raises:
        RecipeError: It does not exist, or is not an optimizer.
    """
    name, where = recipe.train.optimizer_name, f"{recipe.where}: train.optimizer"
    if ":" in name:
        found: Callable[..., torch.optim.Optimizer] = import_object(name, recipe, "train.optimizer")
        if not callable(found) or (isinstance(found, type) and not issubclass(found, torch.optim.Optimizer)):
            raise RecipeError(f"{where}: {name} is no subclass of torch.optim.Optimizer, and no function that returns one.")
        return found
    known = {name: cls for name, cls in vars(torch.optim).items() if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)}
    del known["Optimizer"]
    if name not in known:
        raise RecipeError(f"{where}: torch.optim has no {name!r}.{did_you_mean(name, known)} Another one is package.module:name.")
    return known[name]


def optimizer_keywords(recipe: Recipe) -> dict[str, Any]:
    """The keyword arguments of ``optimizer_function`` that the recipe sets: ``lr``, ``weight_decay`` and those in ``train.optimizer``.

    Without a parameter ``weight_decay``, the optimizer gets none, if it is 0.

    Raises:
        RecipeError: The optimizer has no such argument, or another key of ``train`` sets it.
    """
    train, function, where = recipe.train, optimizer_function(recipe), f"{recipe.where}: train.optimizer"
    parameters = inspect.signature(function).parameters.values()
    taken = [parameter.name for parameter in parameters][1:]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    own = {"lr": train.lr, "weight_decay": train.weight_decay}
    if not takes_any and "weight_decay" not in taken and not train.weight_decay:
        del own["weight_decay"]
    for key in [*own, *train.optimizer_arguments]:
        if key in own and key in train.optimizer_arguments:
            raise RecipeError(f"{where}.{key}: train.{key} sets it. Remove it here.")
        if key not in taken and not takes_any:
            listed = inspect.Signature([parameter.replace(annotation=parameter.empty) for parameter in parameters])
            raise RecipeError(f"{where}.{key}: no such argument.{did_you_mean(key, taken)} The signature: {train.optimizer_name}{listed}")
    return own | train.optimizer_arguments


@core_default
def check_recipe(recipe: Recipe) -> None:
    """Check that ``train.optimizer`` names an optimizer and arguments of it."""
    optimizer_keywords(recipe)


@core_default
def build_collator(run: Run) -> Any:
    """Torch's ``default_collate``, which stacks tensors and numbers."""
    return torch.utils.data.default_collate


@core_default
def build_optimizer(run: Run, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The recipe's ``train.optimizer`` for the trainable parameters.

    Raises:
        RecipeError: The optimizer does not take these arguments.
    """
    where = f"{run.recipe.where}: train.optimizer: {run.recipe.train.optimizer_name}"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    arguments = {**optimizer_keywords(run.recipe), **run.optimizer_arguments}
    try:
        optimizer = optimizer_function(run.recipe)(parameters, **arguments)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{where} was called with {arguments}: {error}.") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RecipeError(f"{where} returned a {type(optimizer).__name__}, expected a torch.optim.Optimizer.")
    return optimizer


@core_default
def prepare(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.nn.Module, Any]:
    """Prepare with Accelerate: device, autocast, loss scaling, and DDP for several processes."""
    model, prepared = run.accelerator.prepare(model, optimizer)
    scaler = run.accelerator.scaler
    if type(prepared) is AcceleratedOptimizer and scaler is None:
        return model, prepared.optimizer  # the wrapper only adds loss scaling, and looks up a package in each step
    return model, ScaledOptimizers(optimizer, scaler) if isinstance(optimizer, Optimizers) else prepared


@core_default
def train_step(run: Run, batches: list[Batch]) -> torch.Tensor:
    """Accumulate the gradients of the micro-batches, and change the weights by them.

    Raises:
        PluginError: A plugin's ``train_step`` changed the weights and returned None.
    """
    if run.updates:
        plugin = next(plugin.name for plugin, _ in run.plugins.each("train_step"))
        raise PluginError(
            f"{run.recipe.where}: plugin {plugin!r}: train_step called run.apply_gradients and returned None. Return the step's loss. "
            "None leaves the whole step to the core."
        )
    loss = run.accumulate_gradients(batches)
    run.apply_gradients(loss)
    return loss


@core_default
def backward(run: Run, loss: torch.Tensor) -> bool:
    """``loss.backward()``, with fp16's loss scaling. Accelerate's own would divide the loss again, by its number of micro-batches."""
    scaler = run.accelerator.scaler
    (loss if scaler is None else scaler.scale(loss)).backward()
    return True


@core_default
def clip_gradients(run: Run, max_norm: float) -> torch.Tensor:
    """Torch's, after loss scaling is undone. With ``inf``, the norm alone. Torch would multiply by inf / norm, which is NaN for an
    infinite norm, and loss scaling may be undone only once a step."""
    if max_norm < math.inf:
        return gather_full(run.accelerator.clip_grad_norm_(run.model.parameters(), max_norm))
    norm = total_norm(parameter.grad for parameter in run.model.parameters() if parameter.grad is not None)
    scaler = run.accelerator.scaler
    return norm if scaler is None else norm / scaler.scale(torch.ones_like(norm))


@core_default
def model_state(run: Run) -> dict[str, Any]:
    """The state dict of the model as built."""
    return run.unwrap_model().state_dict()


@core_default
def load_model_state(run: Run, state: dict[str, torch.Tensor]) -> bool:
    """Load a state dict. Full tensors are sharded like the model's."""
    model = run.unwrap_model()
    own = model.state_dict()
    model.load_state_dict({name: shard_like(tensor, own.get(name)) for name, tensor in state.items()})
    return True


@core_default
def optimizer_state(run: Run) -> dict[str, Any]:
    """The optimizer's own state dict."""
    state: dict[str, Any] = run.optimizer.state_dict()
    return state


@core_default
def load_optimizer_state(run: Run, state: dict[str, Any]) -> bool:
    """Load a state dict. Full tensors are sharded like their parameters."""
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    sharded = {
        index: {name: shard_like(value, parameters[index]) if index < len(parameters) else value for name, value in values.items()}
        for index, values in state["state"].items()
    }
    run.optimizer.load_state_dict(state | {"state": sharded})
    return True


@core_default
def write_checkpoint(run: Run, folder: Path, model: dict[str, torch.Tensor], state: dict[str, Any]) -> Future[None]:
    """Write before training continues."""
    future: Future[None] = Future()
    try:
        resume.write(run, folder, model, state)
        future.set_result(None)
    except SaveError as error:
        future.set_exception(error)
    return future


@core_default
def evaluate(run: Run, split: str) -> dict[str, float]:
    """The core's evaluation loop."""
    return loop.evaluation_loop(run, split)


@core_default
def export_model(run: Run, folder: Path) -> Path:
    """Export with the model's ``save_pretrained``, or write ``model.safetensors``."""
    return save_model(run, folder)
