"""Checks of the parameters and the optimizer of strategies that divide weights into torch's ``DTensor``."""

from __future__ import annotations

import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastloop import PluginError

TENSOR_CODE = str(Path(torch.distributed.tensor.__file__).parent)
"""Folder of torch's code for divided tensors."""
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
"""Layers that on a CPU take inputs in fp32 only with weights in fp32."""


def refuse_scalars(model: nn.Module, where: str) -> None:
    """Raise an error for parameters without a dimension to divide.

    Args:
        where: The plugin, for messages.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if names:
        raise PluginError(
            f"cannot shard parameters without dimensions: {', '.join(names)}.",
            code="unsupported-parameters",
            place=where,
            remedy="Give them the shape (1,), or use ddp.",
        )


def refuse_ties(model: nn.Module, blocks: list[nn.Module], where: str) -> None:
    """Raise an error if two names of one weight are in different blocks, which are gathered at different times.

    Args:
        where: The option that names the blocks, for messages.
    """
    # inner blocks come later
    part = {id(module): index for index, block in enumerate(blocks) for module in block.modules()}
    parts: dict[int, int | None] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        shard = part.get(id(model.get_submodule(name.rpartition(".")[0])))
        if parts.setdefault(id(weight), shard) != shard:
            raise PluginError(
                f"the weight {name!r} is tied to one outside its block.",
                code="tied-parameters",
                place=where,
                remedy="Name blocks that hold both, or neither.",
            )


def try_step(optimizer: Any, where: str) -> None:
    """Step small parameters that are divided like the optimizer's own, which stay as they are. Every process must call
    it.

    Args:
        where: The recipe, for messages.

    Raises:
        PluginError: The optimizer uses an operation that torch does not have for divided tensors.
    """
    for member in getattr(optimizer, "members", {"": optimizer}).values():
        trial = object.__new__(type(member))
        trial.__dict__.update(member.__dict__)
        trial.__dict__.pop("step", None)  # a scheduler replaces it by one that steps ``member``
        trial.state = defaultdict(dict)
        trial.param_groups = [group | {"params": list(_small(group))} for group in member.param_groups]
        trial._optimizer_step_pre_hooks = OrderedDict()
        trial._optimizer_step_post_hooks = OrderedDict()
        try:
            trial.step()
        except Exception as error:
            if all(TENSOR_CODE not in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
                continue  # not about divided tensors: the optimizer may need more than a trial has
            reason = str(error).partition(". ")[0].removesuffix(".")
            remedy = "Use another, such as AdamW, or the strategy ddp."
            if any(group.get("fused") for group in member.param_groups):
                remedy = (
                    "Step it without its fused kernel: set plugins.fused-optimizer.implementation to foreach, or leave "
                    "out train.optimizer.fused. Or use the strategy ddp."
                )
            raise PluginError(
                f"{type(member).__name__} cannot step divided weights: {reason}.",
                code="unsupported-optimizer",
                place=f"{where}: train.optimizer",
                remedy=remedy,
            ) from None


def _small(group: dict[str, Any]) -> Iterator[nn.Parameter]:
    """A parameter of few elements, with a gradient, for each number of dimensions and each division in a group."""
    kinds: dict[Any, Tensor] = {}
    for parameter in group["params"]:
        division = tuple(parameter.placements) if isinstance(parameter, DTensor) else None
        kinds.setdefault((parameter.dim(), division), parameter)
    for parameter in kinds.values():
        ones = torch.ones((2,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
        if isinstance(parameter, DTensor):
            ones = DTensor.from_local(ones, parameter.device_mesh, parameter.placements, run_check=False)
        small = nn.Parameter(ones)
        small.grad = torch.ones_like(small)
        yield small


def norms_with_statistics(model: nn.Module) -> list[nn.Module]:
    """The norms that keep running statistics, such as batch norm. The statistics stay in fp32, and torch's kernels take
    them only with weights in fp32."""
    norms: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._NormBase) or module.running_mean is None:
            continue
        if any(True for _ in module.parameters(recurse=False)):
            norms.append(module)
    return norms


def match_norm_inputs(model: nn.Module) -> None:
    """Cast inputs in fp32 of norms whose weights are gathered in bf16. A CPU has no kernel for the two, and autocast
    leaves norms alone."""

    def cast(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        weight = module.weight
        if isinstance(weight, Tensor) and weight.dtype == torch.bfloat16 and inputs[0].dtype == torch.float32:
            return inputs[0].to(torch.bfloat16), *inputs[1:]
        return None

    for module in model.modules():
        if isinstance(module, NORMS):
            module.register_forward_pre_hook(cast)
