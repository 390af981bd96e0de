"""Memory and traffic of ``tensor-parallel``, by a model of fake tensors that becomes the share of one process.

Each process computes its heads and its features of the wide layers, for the same samples. The traffic is that of
torch's styles: an all-reduce for each input of a layer that is divided by columns, and for each output of one that is
divided by rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from fastloop_plugins.strategies._tensor_group import find_plan
from fastloop_plugins.strategies._tensor_plan import GATHERED, SummedGradients, rule_of, styles


class TensorShare:
    """The share that one of several processes has of a model.

    Args:
        model: A model of fake tensors, with a plan. Its divided layers shrink in place.
        processes: Number of processes.
        precision: The recipe's.
        where: The plugin, for messages.

    Attributes:
        sent: Bytes that the process has sent in rings: 2 (n - 1) / n of an all-reduced tensor, half of that for a
            gathered one.

    Raises:
        PluginError: The processes cannot divide the model, or the precision is refused.
    """

    def __init__(self, model: nn.Module, processes: int, precision: str, where: str) -> None:
        self.processes = processes
        self.sent = 0.0
        inner, rules = find_plan(model, precision, where)
        for name, style in styles(inner, rules, processes, where).items():
            self._divide(inner.get_submodule(name), style, rule_of(rules, name))

    def _send(self, size: float, rounds: int = 2) -> None:
        self.sent += rounds * size * (self.processes - 1) / self.processes

    def _divide(self, module: nn.Module, style: ParallelStyle, rule: str | None) -> None:
        if isinstance(style, SummedGradients):
            for weight in module.parameters():
                if weight.requires_grad:
                    weight.register_hook(lambda gradient: self._send(gradient.nbytes))  # type: ignore[no-untyped-call]
            return
        is_columns = isinstance(style, ColwiseParallel)
        for name, weight in module.named_parameters():
            if name == "weight" or is_columns:  # a bias is added to the sum of the parts
                dim = 0 if is_columns or isinstance(module, nn.Embedding) else 1
                weight.data = weight.data.narrow(dim, 0, weight.shape[dim] // self.processes).clone()
        module.register_forward_pre_hook(self._enter_columns if is_columns else self._enter_rows)
        if not is_columns:
            module.register_forward_hook(lambda module, inputs, output: self._send(output.nbytes))
        elif rule in GATHERED:
            module.register_forward_hook(self._gather)

    def _enter_columns(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: self._send(gradient.nbytes))  # type: ignore[no-untyped-call]

    def _enter_rows(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        size = getattr(module, "in_features", 0)
        if not size or inputs[0].shape[-1] < size:
            return None
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: self._send(gradient.nbytes, 1))  # type: ignore[no-untyped-call]
        return inputs[0].narrow(-1, 0, size // self.processes), *inputs[1:]

    def _gather(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        full = torch.cat([output] * self.processes, -1)
        self._send(full.nbytes, 1)
        return full
