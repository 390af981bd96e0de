"""Optimizers that step one flat tensor instead of the parameters, as strategies that shard have."""

from __future__ import annotations

import torch
from torch import nn


class Flat:
    """Does not list the parameters that it steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
        self.inner = type(optimizer)([self.flat], **{key: optimizer.defaults[key] for key in ("lr", "weight_decay")})
        self.param_groups, self.state_dict = self.inner.param_groups, self.inner.state_dict

    def step(self) -> None:
        self.flat.grad = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        self.inner.step()
        for parameter, part in zip(
            self.parameters, self.flat.detach().split([p.numel() for p in self.parameters]), strict=True
        ):
            parameter.data.copy_(part.view_as(parameter))

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class Listed(Flat):
    """Lists the parameters that it steps."""

    def model_parameters(self) -> list[nn.Parameter]:
        return self.parameters
