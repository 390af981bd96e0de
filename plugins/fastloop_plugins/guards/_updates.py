"""Check once per run that optimizer steps change the parameters that have a gradient.

The check samples two elements of each parameter, with the largest and the smallest gradient. It copies no weights,
launches a few small kernels per parameter, and reads one tensor on the host. It examines steps 1, 2, 4, 8, ... until
every parameter has changed; most runs need only step 1. An unchanged parameter is not reported if its learning rate is
0, after an overflow, without a gradient, or if the expected update is below the weight's rounding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastloop_plugins.guards._parameters import by_module, missing_parameters

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
    them.

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
    """

    def __init__(
        self,
        model: nn.Module,
        built_model: nn.Module,
        optimizer: Any,
        device: torch.device,
        accepted: dict[int, Tensor],
    ) -> None:
        self.model, self.built_model, self.optimizer, self.device, self.accepted = (
            model,
            built_model,
            optimizer,
            device,
            accepted,
        )
        self.is_done = False
        self.pending: dict[str, Tensor] | None = None
        self.missing: list[str] = []
        self.samples: list[Sample] = []
        self.step, self.due = 0, 1

    def before_step(self) -> None:
        """Sample the parameters if this step is examined. Gradients must be final."""
        self.step += 1
        if self.step >= self.due:
            self._sample()

    @torch.no_grad()
    def _sample(self) -> None:
        self.samples = []
        if self.pending is None:
            # without prefixes of strategies
            names = {id(weight): name for name, weight in self.built_model.named_parameters()}
            trained = {
                names.get(id(weight), name): weight
                for name, weight in self.model.named_parameters()
                if weight.requires_grad
            }
            left_out = {id(weight) for weight in missing_parameters(self.model, self.optimizer).values()}
            self.missing = [name for name, weight in trained.items() if id(weight) in left_out - self.accepted.keys()]
            self.pending = {name: weight for name, weight in trained.items() if id(weight) not in left_out}
        rates = {
            id(weight): float(group.get("lr", 0.0))
            for group in self.optimizer.param_groups
            for weight in group["params"]
        }
        for name, parameter in self.pending.items():
            weight, gradient = _local(parameter), _local(_shard_whole(parameter.grad, parameter))
            if (
                gradient is None
                or gradient.shape != weight.shape
                or gradient.is_sparse
                or gradient.is_complex()
                or not gradient.numel()
                or id(parameter) not in rates
            ):
                continue
            places = torch.stack([gradient.argmax(), gradient.argmin()])
            sizes = gradient.reshape(-1)[places].abs()
            self.samples.append(Sample(name, rates[id(parameter)], weight, places, weight.reshape(-1)[places], sizes))

    def after_step(self, was_skipped: Callable[[], bool]) -> None:
        """Compare the samples if this step is examined, and log the result when the check is complete.

        Args:
            was_skipped: Returns whether loss scaling skipped the step. Called only if the step is examined.
        """
        if self.step >= self.due:
            self.due *= 2
            self._compare(was_skipped)

    @torch.no_grad()
    def _compare(self, was_skipped: Callable[[], bool]) -> None:
        assert self.pending is not None
        problems = f" Not in the optimizer: {by_module(self.missing)}." if self.missing else ""
        if self.samples and not was_skipped():
            elements = _read(self.samples, self.device)
            # otherwise a plugin may have skipped the step on the device
            if all(math.isfinite(element.gradient) for element in elements):
                changed = {element.name for element in elements if element.change != 0}
                self.pending = {name: weight for name, weight in self.pending.items() if name not in changed}
                lr = max((element.lr for element in elements if element.gradient > 0), default=0.0)
                if unchanged := dict.fromkeys(name for name in _expected_changes(elements) if name not in changed):
                    problems += (
                        f" In the optimizer, with a gradient, but the same after step {self.step}: "
                        f"{by_module(unchanged)}."
                    )
                elif not changed and self.step >= MIN_STEPS and lr > 0:
                    problems += (
                        f" Step {self.step} changed none of the elements examined. Is the learning rate, "
                        f"{lr:g}, too small?"
                    )
        self.samples = []
        if problems:
            log.warning(
                "trained parameters do not change.%s Look for what replaces or shares weights after the optimizer was "
                "built, and for an optimizer that skips them. Set requires_grad to False on parameters that are not to "
                "be trained",
                problems,
            )
        if problems or not self.pending:
            self.is_done = True


def _expected_changes(elements: list[Element]) -> list[str]:
    """Names of the parameters that the step should have changed by more than their rounding.

    Updates are proportional to the gradient (SGD), independent of its size (Adam), or in between. The elements that did
    change give a lower bound on the update of the others, for any optimizer.
    """
    changed = [
        element for element in elements if element.lr > 0 and element.gradient > 0 and 0 < element.change < math.inf
    ]
    size = min((element.change / element.lr for element in changed), default=0.0)
    ratio = min((element.change / element.lr / element.gradient for element in changed), default=0.0)
    return [
        element.name
        for element in elements
        if SHARE * element.lr * min(size, ratio * element.gradient) > element.rounding
    ]


def _read(samples: list[Sample], device: torch.device) -> list[Element]:
    """Read the sampled elements after the step. Waits for the device."""
    rows = []
    for sample in samples:
        change = (sample.weight.reshape(-1)[sample.places] - sample.before).abs()
        rounding = sample.before.abs() * torch.finfo(sample.weight.dtype).eps
        rows.append(torch.stack([change.float(), sample.gradient.float(), rounding.float()], dim=1).to(device))
    values = torch.stack(rows).tolist()
    return [Element(sample.name, sample.lr, *row) for sample, pair in zip(samples, values, strict=True) for row in pair]


def _local(tensor: Any) -> Any:
    """This process's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_whole(gradient: Any, parameter: Any) -> Any:
    """Shard a replicated gradient like its parameter, without communication. Torch replicates those of divided
    embeddings."""
    if isinstance(gradient, DTensor) and all(placement.is_replicate() for placement in gradient.placements):
        return gradient.redistribute(placements=parameter.placements)
    return gradient
