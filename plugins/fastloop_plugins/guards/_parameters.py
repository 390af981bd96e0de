"""Compare the parameters of a model with those of its optimizer, by identity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastloop.unstepped import stepped_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn


def missing_parameters(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Name -> parameter, for the parameters that require gradients, but that the optimizer does not step."""
    stepped = {id(parameter) for parameter in stepped_parameters(optimizer)}
    missing: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad and id(weight) not in stepped:
            missing[name] = weight
    return missing


def orphaned_parameters(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """The parameters with gradients that the optimizer steps, but that are not in the model."""
    own = {id(parameter) for parameter in model.parameters()}
    orphans = []
    for parameter in stepped_parameters(optimizer):
        if parameter.requires_grad and id(parameter) not in own:
            orphans.append(parameter)
    return orphans
