"""Check once per run that optimizer steps change the parameters that have a gradient.

The check samples two elements of each parameter, with the largest and the smallest gradient. It copies no weights,
launches a few small kernels per parameter, and reads one tensor on the host. It examines steps 1, 2, 4, 8, ... until
every parameter has changed; most runs need only step 1. An unchanged parameter is not reported if its learning rate is
0, after an overflow, without a gradient, or if the expected update is below the weight's rounding. If no parameter gets
a gradient, the check samples their first and last elements, and reports that none has changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastloop import Problem
from fastloop.distributed.tensors import elements_at
from fastloop.unstepped import by_module
from fastloop_plugins.guards._parameters import missing_parameters

log = logging.getLogger("fastloop")

SHARE = 0.1
"""Report a weight if this fraction of its expected update exceeds its rounding. Updates of elements with similar
gradients differ by less than this factor, including momentum."""
MIN_STEPS = 8
"""First step at which to report a model without any change. Before it, a warm-up may keep the learning rate near 0."""


class Sample(NamedTuple):
    """Two elements of a parameter on this process, before a step.

    Attributes:
        name: Name of the parameter.
        lr: Learning rate of its group.
        weight: The parameter, or this process's shard of it.
        places: Shape (2,), int64: the elements' positions in the flattened ``weight``.
        before: Shape (2,): the elements.
        gradient: Shape (2,): absolute gradients, multiplied by the loss scale if they are not unscaled yet.
    """

    name: str
    lr: float
    weight: Tensor
    places: Tensor
    before: Tensor
    gradient: Tensor


class Element(NamedTuple):
    """One sampled element after a step. ``change`` and ``gradient`` are absolute values; ``rounding`` is the spacing of
    its dtype."""

    name: str
    lr: float
    change: float
    gradient: float
    rounding: float


class UpdateCheck:
    """Logs one warning about trained parameters that the optimizer does not step, or that it steps without changing
    them, or if none gets a gradient.

    Each process examines its own shards. With strategies that do not set ``grad``, such as DeepSpeed's stages 1 to 3,
    the check only compares the model's parameters with the optimizer's.

    Args:
        model: The prepared model.
        built_model: The model as built, whose parameter names messages use.
        optimizer: The prepared optimizer.
        device: Device on which to compare samples.
        accepted: Parameters that were intentionally left out of the optimizer, by ``id``.

    Attributes:
        is_done: Whether the check is complete.
        pending: Name -> parameter, for parameters that have not changed yet; None before the first step.
        has_changed: Whether a step has changed a parameter.
        ends: If no parameter had a gradient so far: the part of each one on this process, and its first and last
            element before the first step, (2,).
    """

    def __init__(
        self,
        model: nn.Module,
        built_model: nn.Module,
        optimizer: Any,
        device: torch.device,
        accepted: dict[int, Tensor],
    ) -> None:
        self.model = model
        self.built_model = built_model
        self.optimizer = optimizer
        self.device = device
        self.accepted = accepted
        self.is_done = False
        self.pending: dict[str, Tensor] | None = None
        self.missing: list[str] = []
        self.has_changed = False
        self.samples: list[Sample] = []
        self.ends: list[tuple[Tensor, Tensor]] = []
        self.step = 0
        self.due = 1  # the next step to examine

    def before_step(self) -> None:
        """Sample the parameters if this step is examined. Gradients must be final."""
        self.step += 1
        if self.step >= self.due:
            self._sample()

    @torch.no_grad()
    def _sample(self) -> None:
        if self.pending is None:
            self.pending = self._find_parameters()
        learning_rates: dict[int, float] = {}  # by id of the parameter
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                learning_rates[id(weight)] = float(group.get("lr", 0.0))
        self.samples = []
        for name, parameter in self.pending.items():
            weight = _local(parameter)
            gradient = _local(_shard_whole(parameter.grad, parameter))
            if id(parameter) not in learning_rates or not _can_be_sampled(gradient, weight):
                continue
            places = torch.stack([gradient.argmax(), gradient.argmin()])
            before = elements_at(weight, places)
            sizes = elements_at(gradient, places).abs()
            self.samples.append(Sample(name, learning_rates[id(parameter)], weight, places, before, sizes))
        if any(parameter.grad is not None for parameter in self.pending.values()):
            self.ends = []
        elif self.step == 1:
            for weight in map(_local, self.pending.values()):
                if weight.numel():
                    self.ends.append((weight, _ends(weight)))

    def _find_parameters(self) -> dict[str, Tensor]:
        """Name -> parameter, for those that are trained and in the optimizer. Sets ``missing``: the names of those that
        are trained, not in it, and not accepted."""
        built_names = {id(weight): name for name, weight in self.built_model.named_parameters()}
        left_out = {id(weight) for weight in missing_parameters(self.model, self.optimizer).values()}
        stepped: dict[str, Tensor] = {}
        for wrapped_name, weight in self.model.named_parameters():
            if not weight.requires_grad:
                continue
            name = built_names.get(id(weight), wrapped_name)  # without prefixes of strategies
            if id(weight) not in left_out:
                stepped[name] = weight
            elif id(weight) not in self.accepted:
                self.missing.append(name)
        return stepped

    def after_step(self, was_skipped: Callable[[], bool]) -> None:
        """Compare the samples if this step is examined, and log the result when the check is complete.

        Args:
            was_skipped: Returns whether the step was skipped. Called only if the step is examined.
        """
        if self.step >= self.due:
            self.due *= 2
            self._compare(was_skipped)

    @torch.no_grad()
    def _compare(self, was_skipped: Callable[[], bool]) -> None:
        assert self.pending is not None
        problems = ""
        if self.missing:
            problems += f" Not in the optimizer: {by_module(self.missing)}."
        if self.samples and not was_skipped():
            elements = _read(self.samples, self.device)
            # otherwise no optimizer changes the weights as expected
            if all(math.isfinite(element.gradient) for element in elements):
                problems += self._examine(elements)
        self.samples = []
        if self.ends and self.step >= MIN_STEPS and not was_skipped():
            self._report_ends()
        if problems:
            log.warning(
                Problem(
                    f"trained parameters do not change.{problems} Look for what replaces or shares weights "
                    "after the optimizer was built, and for an optimizer that skips them. Set requires_grad "
                    "to False on parameters that are not to be trained.",
                    code="weights-unchanged",
                )
            )
        if problems or not self.pending:
            self.is_done = True

    def _report_ends(self) -> None:
        """Warn if the first and the last elements of all parameters are what they were before the first step."""
        are_equal = [bool((_ends(weight) == before).all()) for weight, before in self.ends]
        self.ends = []
        if all(are_equal):
            log.warning(
                Problem(
                    f"no trained parameter got a gradient in {self.step} steps, and none changed: the loss does not "
                    "depend on the model.",
                    code="no-gradients",
                    remedy="Compute the loss from the output of the model, and detach nothing in between.",
                )
            )
            self.is_done = True

    def _examine(self, elements: list[Element]) -> str:
        """Drop the parameters that changed from ``pending``. Returns a sentence about those that should have changed;
        empty without a problem."""
        assert self.pending is not None
        changed = {element.name for element in elements if element.change != 0}
        self.has_changed = self.has_changed or bool(changed)
        self.pending = {name: weight for name, weight in self.pending.items() if name not in changed}
        unchanged = [name for name in _expected_changes(elements) if name not in changed]
        if unchanged:
            names = by_module(dict.fromkeys(unchanged))  # a parameter has two elements
            return f" In the optimizer, with a gradient, but the same after step {self.step}: {names}."
        lr = max((element.lr for element in elements if element.gradient > 0), default=0.0)
        if not self.has_changed and self.step >= MIN_STEPS and lr > 0:
            return f" Step {self.step} changed none of the elements examined. Is the learning rate, {lr:g}, too small?"
        return ""


def _ends(weight: Tensor) -> Tensor:
    """Copies of the first and the last element of a weight: (2,)."""
    return elements_at(weight, torch.tensor([0, weight.numel() - 1], device=weight.device))


def _can_be_sampled(gradient: Any, weight: Tensor) -> bool:
    """Whether a gradient is there, with an element for each one of the weight that can be compared."""
    if gradient is None or gradient.shape != weight.shape or not gradient.numel():
        return False
    return not gradient.is_sparse and not gradient.is_complex()


def _expected_changes(elements: list[Element]) -> list[str]:
    """Names of the parameters that the step should have changed by more than their rounding.

    Updates are proportional to the gradient (SGD), independent of its size (Adam), or in between. The elements that did
    change give a lower bound on the update of the others, for any optimizer: if they moved by 2 learning rates or more,
    and by 0.5 learning rates or more for each unit of gradient, an element with gradient 3 moves by at least 1.5.
    """
    sizes = []  # of updates, in learning rates
    ratios = []  # of these sizes to the gradients
    for element in elements:
        if element.lr > 0 and element.gradient > 0 and 0 < element.change < math.inf:
            sizes.append(element.change / element.lr)
            ratios.append(element.change / element.lr / element.gradient)
    smallest_size = min(sizes, default=0.0)
    smallest_ratio = min(ratios, default=0.0)
    names = []
    for element in elements:
        least = element.lr * min(smallest_size, smallest_ratio * element.gradient)
        if SHARE * least > element.rounding:
            names.append(element.name)
    return names


def _read(samples: list[Sample], device: torch.device) -> list[Element]:
    """Read the sampled elements after the step. Waits for the device."""
    rows = []
    for sample in samples:
        change = (elements_at(sample.weight, sample.places) - sample.before).abs()
        rounding = sample.before.abs() * torch.finfo(sample.weight.dtype).eps
        rows.append(torch.stack([change.float(), sample.gradient.float(), rounding.float()], dim=1).to(device))
    elements = []
    for sample, pair in zip(samples, torch.stack(rows).tolist(), strict=True):
        for change, gradient, rounding in pair:
            elements.append(Element(sample.name, sample.lr, change, gradient, rounding))
    return elements


def _local(tensor: Any) -> Any:
    """This process's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_whole(gradient: Any, parameter: Any) -> Any:
    """Shard a replicated gradient like its parameter, without communication. Torch replicates those of divided
    embeddings."""
    if isinstance(gradient, DTensor) and all(placement.is_replicate() for placement in gradient.placements):
        return gradient.redistribute(placements=parameter.placements)
    return gradient
