"""The core's implementations of *first* hooks, beside those of a step in ``loop``.

The entry points of the group ``fastloop.implementations`` name further modules, such as that of ``train.optimizer``.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from fastloop.checkpoint import resume
from fastloop.checkpoint.export import save_model
from fastloop.distributed.tensors import shard_like
from fastloop.errors import SaveError
from fastloop.plugin import hookimpl

if TYPE_CHECKING:
    from fastloop.run import Run

core_default = hookimpl(trylast=True)  # any plugin's result takes precedence


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
def export_model(run: Run, folder: Path) -> Path:
    """Export with the model's ``save_pretrained``, or write ``model.safetensors``."""
    return save_model(run, folder)
