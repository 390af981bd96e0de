"""Checks, once a run, that an optimizer step changes the parameters that got a gradient.

The check looks at two elements of each parameter: those with the largest and the smallest gradient. It copies no weights, launches a few
small kernels for each parameter, and reads one tensor on the host. Steps 1, 2, 4, 8, ... are examined until every parameter has changed,
which is step 1 in most runs. A parameter that did not change is only reported if the step should have changed it visibly: not with a
learning rate of 0, after an overflow, without a gradient, or where the update is below the weight's rounding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastloop.checks.optimizer import by_module, missing_parameters

log = logging.getLogger("fastloop")

SHARE = 0.1
"""Share of the expected update that must exceed a weight's rounding for the weight to be reported. Updates of elements with like gradients
differ by less than this, momentum included."""
STILL = 8
"""Step from which on a model that does not change at all is reported. Before it, a warm-up may keep the learning rate near 0."""


class Sample(NamedTuple):
    """Two elements of a parameter on this process, before a step.

    Attributes:
        name: The parameter's.
        lr: Learning rate of its group.
        weight: The parameter, or this process's shard of it.
        places: Shape (2,), int64: the elements' positions in the flattened ``weight``.
        before: Shape (2,): the elements.
        gradient: Shape (2,): sizes of their gradients, multiplied by the loss scale where they are not unscaled yet.
    """

    name: str
    lr: float
    weight: Tensor
    places: Tensor
    before: Tensor
    gradient: Tensor


class Element(NamedTuple):
    """One sampled element after a step. ``change`` and ``gradient`` are sizes; ``rounding`` is its spacing to the next number."""

    name: str
    lr: float
    change: float
    gradient: float
    rounding: float


class UpdateCheck:
    """Logs one warning about trained parameters that the optimizer does not step, or that it steps without changing them.

    Each process examines its own shards. Where a strategy shows no gradients in ``grad``, such as DeepSpeed's stages 1 to 3, only the
    optimizer's parameters are examined.

    Args:
        model: As trained.
        built_model: The model as built, whose parameter names messages use.
        optimizer: As the loop steps it.
        device: Where samples are compared.
        accepted: Parameters that were left out of the optimizer on purpose, by ``id``.

    Attributes:
        is_done: Whether the check has its answer: later steps are not examined.
        pending: Name -> each parameter that is not yet known to change; None before the first step.
    """

    def __init__(self, model: nn.Module, built_model: nn.Module, optimizer: Any, device: torch.device, accepted: dict[int, Tensor]) -> None:
        self.model, self.built_model, self.optimizer, self.device, self.accepted = model, built_model, optimizer, device, accepted
        self.is_done = False
        self.pending: dict[str, Tensor] | None = None
        self.missing: list[str] = []
        self.samples: list[Sample] = []
        self.step, self.due = 0, 1

    @torch.no_grad()
    def before_step(self) -> None:
        """Sample parameters when this step is to be examined. Gradients are final."""
        if self.is_done:
            return
        self.step += 1
        self.samples = []
        if self.step < self.due:
            return
        if self.pending is None:
            names = {id(weight): name for name, weight in self.built_model.named_parameters()}  # without what strategies put before them
            trained = {names.get(id(weight), name): weight for name, weight in self.model.named_parameters() if weight.requires_grad}
            left_out = {id(weight) for weight in missing_parameters(self.model, self.optimizer).values()}
            self.missing = [name for name, weight in trained.items() if id(weight) in left_out - self.accepted.keys()]
            self.pending = {name: weight for name, weight in trained.items() if id(weight) not in left_out}
        rates = {id(weight): float(group.get("lr", 0.0)) for group in self.optimizer.param_groups for weight in group["params"]}
        for name, parameter in self.pending.items():
            weight, gradient = _local(parameter), _local(parameter.grad)
            if gradient is None or gradient.is_sparse or gradient.is_complex() or not gradient.numel() or id(parameter) not in rates:
                continue
            places = torch.stack([gradient.argmax(), gradient.argmin()])
            sizes = gradient.reshape(-1)[places].abs()
            self.samples.append(Sample(name, rates[id(parameter)], weight, places, weight.reshape(-1)[places], sizes))

    @torch.no_grad()
    def after_step(self, was_skipped: Callable[[], bool]) -> None:
        """Compare, and end the check when it has its answer.

        Args:
            was_skipped: Whether loss scaling skipped the step; called only for a step that is examined.
        """
        if self.is_done or self.step < self.due:
            return
        self.due *= 2
        assert self.pending is not None
        found = f" Not in the optimizer: {by_module(self.missing)}." if self.missing else ""
        if self.samples and not was_skipped():
            elements = _read(self.samples, self.device)
            if all(math.isfinite(element.gradient) for element in elements):  # else a plugin may have skipped the step on the device
                changed = {element.name for element in elements if element.change != 0}
                self.pending = {name: weight for name, weight in self.pending.items() if name not in changed}
                if stuck := dict.fromkeys(name for name in _visible(elements) if name not in changed):
                    found += f" In the optimizer, with a gradient, but the same after step {self.step}: {by_module(stuck)}."
                elif (
                    not changed and self.step >= STILL and (lr := max((each.lr for each in elements if each.gradient > 0), default=0.0)) > 0
                ):
                    found += f" Step {self.step} changed none of the elements examined. Is the learning rate, {lr:g}, too small?"
        self.samples = []
        if found:
            log.warning(
                "trained parameters do not change.%s Look for what replaces or shares weights after the optimizer was built, and for an "
                "optimizer that skips them. Set requires_grad to False on parameters that are not to be trained",
                found,
            )
        if found or not self.pending:
            self.is_done, self.pending = True, {}


def _visible(elements: list[Element]) -> list[str]:
    """The parameters of the elements that a step should have changed visibly.

    Updates are proportional to the gradient (SGD), of one size (Adam), or between the two. The elements that changed show the least update
    that another one can expect, so that nothing need be known of the optimizer.
    """
    moved = [each for each in elements if each.lr > 0 and each.gradient > 0 and 0 < each.change < math.inf]
    size = min((each.change / each.lr for each in moved), default=0.0)
    ratio = min((each.change / each.lr / each.gradient for each in moved), default=0.0)
    return [each.name for each in elements if SHARE * each.lr * min(size, ratio * each.gradient) > each.rounding]


def _read(samples: list[Sample], device: torch.device) -> list[Element]:
    """The samples' elements after the step, on the host. The one time that it waits for the device."""
    rows = []
    for sample in samples:
        change = (sample.weight.reshape(-1)[sample.places] - sample.before).abs()
        rounding = sample.before.abs() * torch.finfo(sample.weight.dtype).eps
        rows.append(torch.stack([change.float(), sample.gradient.float(), rounding.float()], dim=1).to(device))
    values = torch.stack(rows).tolist()
    return [Element(sample.name, sample.lr, *each) for sample, pair in zip(samples, values, strict=True) for each in pair]


def _local(tensor: Any) -> Any:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
