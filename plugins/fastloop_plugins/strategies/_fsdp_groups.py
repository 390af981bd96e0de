"""The parts of a model that torch's ``fully_shard`` gathers and reduces at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastloop import PluginError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from fastloop import Run
    from fastloop_plugins.strategies._gradients import Gradients


def fill_gradients(model: nn.Module, gradients: Gradients) -> None:
    """Reduce a gradient of every trained parameter, and record which ones backward computed.

    Torch reduces only the gradients that a process has. Processes that used different layers would add gradients of
    different parameters.
    """
    for group in _groups(model):
        group.post_backward = partial(_post_backward, group, group.post_backward, gradients)


def _groups(model: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # torch 2.10 has one
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            yield from filter(None, groups)


def _post_backward(group: Any, post_backward: Callable[[], None], gradients: Gradients, *unused: Any) -> None:
    import torch

    for parameter in group.fsdp_params if group.reduce_grads else ():
        full = getattr(parameter, "_unsharded_param", None)  # None before it was gathered once
        if full is None or not parameter.sharded_param.requires_grad:
            continue
        if full.grad is not None or parameter.unsharded_accumulated_grad is not None:
            gradients.add(parameter.sharded_param)
        else:
            full.grad = torch.zeros_like(full)
    post_backward()


def make_meshes(run: Run, shard_within: int | None, tensor: int | None) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The processes to shard over, and those that divide each layer.

    The first mesh has one dimension, or with ``shard_within`` two: (copies of the model, shards of one). The second one
    has one dimension of consecutive processes; None: layers are not divided.
    """
    from torch.distributed.device_mesh import init_device_mesh

    where, world_size = f"{run.recipe.where}: plugins.fsdp.shard_within", run.world_size
    inner = min(tensor or 1, world_size)
    size = shard_within or world_size
    if world_size % size:
        fits = ", ".join(str(part) for part in range(2, world_size + 1) if world_size % part == 0)
        raise PluginError(
            f"{world_size} processes are not a multiple of {size}.",
            code="not-divisible",
            place=where,
            expected=f"one of: {fits}",
        )
    if size % inner:
        raise PluginError(
            f"{size} processes are not a multiple of the {inner} of plugins.fsdp.tensor.",
            code="not-divisible",
            place=where,
        )
    sizes = {"replicate": world_size // size, "shard": size // inner, "tensor": inner}
    sizes = {name: part for name, part in sizes.items() if part > 1 or name == "shard"}
    mesh = init_device_mesh(run.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return mesh["replicate", "shard"] if "replicate" in sizes else mesh["shard"], mesh["tensor"] if inner > 1 else None


@contextmanager
def held_back(switch: Callable[[bool], None]) -> Iterator[None]:
    """Suppress the reduction of gradients that ``switch`` controls, in all micro-steps but the last."""
    switch(False)
    try:
        yield
    finally:
        switch(True)
