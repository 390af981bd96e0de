"""The core's implementations of *first* hooks. They run last, so any plugin's result takes precedence.

The entry points of the group ``fastloop.implementations`` name further modules, such as that of ``train.optimizer``.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from fastloop import loop
from fastloop.checkpoint import resume
from fastloop.checkpoint.export import save_model
from fastloop.distributed.tensors import gather_full, shard_like, total_norm
from fastloop.errors import PluginError, SaveError
from fastloop.plugin import hookimpl

if TYPE_CHECKING:
    from fastloop.run import Run
    from fastloop.state import Batch

core_default = hookimpl(trylast=True)


@core_default
def build_collator(run: Run) -> Any:
    """Torch's ``default_collate``, which stacks tensors and numbers."""
    return torch.utils.data.default_collate


@core_default
def prepare(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.nn.Module, Any]:
    """Prepare with Accelerate: device, autocast, loss scaling, and DDP for several processes."""
    model, prepared = run.accelerator.prepare(model, optimizer)
    if type(prepared) is AcceleratedOptimizer and run.accelerator.scaler is None:
        prepared = prepared.optimizer  # the wrapper only adds loss scaling, and looks up a package in each step
    return model, prepared


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
