"""The parameters of a model that its optimizer does not step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastloop.problem import Problem, counted

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.amp import GradScaler

log = logging.getLogger("fastloop")

LISTED = 5
"""Maximum number of modules in a message."""


def stepped_parameters(optimizer: Any) -> list[Tensor]:
    """The parameters that an optimizer steps: its ``model_parameters()`` if it has that method, else those in its
    ``param_groups``."""
    if hasattr(optimizer, "model_parameters"):
        return list(optimizer.model_parameters())
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def find_unstepped(parameters: Iterable[tuple[str, Tensor]], optimizer: Any) -> list[tuple[str, Tensor]]:
    """Those of some named parameters that an optimizer does not step."""
    stepped = {id(parameter) for parameter in stepped_parameters(optimizer)}
    unstepped = []
    for name, parameter in parameters:
        if id(parameter) not in stepped:
            unstepped.append((name, parameter))
    return unstepped


def by_module(names: Iterable[str]) -> str:
    """Group parameter names by module: ``encoder.0 (weight, bias), head (weight)``."""
    modules: dict[str, list[str]] = {}
    for name in names:
        module, _, parameter = name.rpartition(".")
        modules.setdefault(module or "the model itself", []).append(parameter)
    return list_modules([f"{module} ({', '.join(parameters)})" for module, parameters in modules.items()])


def list_modules(names: Sequence[str]) -> str:
    """The names of modules for messages: the first ones, and how many more there are."""
    listed = ", ".join(names[:LISTED])
    if len(names) > LISTED:
        listed += f" and {counted(len(names) - LISTED, 'more module')}"
    return listed


class UnsteppedParameters:
    """The parameters that the optimizer does not step. Their gradients are kept after an update, and cleared before
    those of the next one are computed.

    The optimizer's own ``zero_grad`` leaves them. In between, a plugin may apply them, such as by an optimizer of its
    own in ``after_step``. Later they would add up over the updates, and clipping would count them.

    Args:
        model: As built, on its device.
        optimizer: As prepared.
        where: The recipe, for messages.

    Attributes:
        all_are_stepped: Whether there are no such parameters. It stays so, as no group of an optimizer is removed.
        has_kept_gradients: Whether the last update has left gradients, which are not cleared yet.
    """

    def __init__(self, model: nn.Module, optimizer: Any, where: str) -> None:
        self._parameters = list(model.named_parameters())
        self._frozen = {id(parameter) for _, parameter in self._parameters if not parameter.requires_grad}
        self._optimizer = optimizer
        self._where = where
        self._unstepped: list[tuple[str, Tensor]] = []
        self._stepped_count = -1
        self.all_are_stepped = False
        self.has_kept_gradients = False
        self._step_of_update = 0

    def keep_gradients(self, step: int) -> None:
        """Keep the gradients that the update of a step has left, until those of the next update are computed.

        Args:
            step: The number of the step.
        """
        self.has_kept_gradients = True
        self._step_of_update = step

    def clear_kept_gradients(self) -> None:
        """Clear the gradients that the last update has left; see ``clear_gradients``."""
        self.clear_gradients(self._step_of_update)

    def clear_gradients(self, step: int) -> None:
        """Clear the gradients. Warn once of parameters that have one, and were frozen when the optimizer was built: it
        does not hold them.

        Args:
            step: The number of the step that computed the gradients.
        """
        self.has_kept_gradients = False
        self._find_unstepped()
        unfrozen = []
        for name, parameter in self._unstepped:
            if parameter.grad is not None:
                parameter.grad = None
                if id(parameter) in self._frozen:
                    unfrozen.append(name)
        if unfrozen:
            self._frozen.clear()
            self._warn(unfrozen, step)

    @contextmanager
    def unscaled(self, scaler: GradScaler | None) -> Iterator[None]:
        """Divide the gradients of these parameters by the scale of the loss inside the block, in which gradients are
        clipped. Clipping itself unscales only the gradients of the optimizer's parameters, and takes the norm of all
        gradients. After the block, the gradients are multiplied by the scale again. If one of them overflows, the
        scaler lowers the scale of later steps.

        Gradients in float16 are in float32 inside the block: a scaler refuses them in float16, and division would round
        them to multiples of 6e-8, the smallest number of that dtype.

        Args:
            scaler: None: losses are not scaled.
        """
        if scaler is None:
            yield
            return
        import torch
        from torch.optim import SGD

        self._find_unstepped()
        parameters = [parameter for _, parameter in self._unstepped if parameter.grad is not None]
        if not parameters:
            yield
            return
        halves: list[tuple[Tensor, Tensor]] = []
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            if gradient.dtype == torch.float16:
                halves.append((parameter, gradient))
                _set_gradient(parameter, gradient.float())
        # unscale_ divides the gradients of an optimizer's parameters. This optimizer only holds the parameters for that
        # call, and never steps them.
        holder = SGD(parameters, lr=0.0)
        scaler.unscale_(holder)
        scale = scaler.scale(torch.ones((), device=parameters[0].device))
        yield
        for parameter in parameters:
            assert parameter.grad is not None
            _multiply(parameter.grad, scale)
        for parameter, gradient in halves:
            assert parameter.grad is not None
            gradient.copy_(parameter.grad)
            _set_gradient(parameter, gradient)

    def _find_unstepped(self) -> None:
        """List the parameters, anew if a plugin has added a group to the optimizer."""
        count = sum(len(group["params"]) for group in self._optimizer.param_groups)
        if count == self._stepped_count:
            return
        self._stepped_count = count
        self._unstepped = find_unstepped(self._parameters, self._optimizer)
        self.all_are_stepped = not self._unstepped

    def _warn(self, names: list[str], step: int) -> None:
        log.warning(
            Problem(
                f"the optimizer does not hold {by_module(names)}, frozen when it was built and not any more. So it "
                "does not change them.",
                code="parameters-left-out",
                place=f"{self._where}: step {step}",
                remedy="Freeze what training unfreezes later in before_fit: then the optimizer holds it.",
            )
        )


def _set_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Give a parameter a gradient of another dtype."""
    parameter.grad = None
    parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


def _multiply(gradient: Tensor, factor: Tensor) -> None:
    """Multiply a gradient in place.

    Args:
        factor: 0-dim, float32.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()  # shares its memory
    if gradient.is_sparse:
        gradient = gradient._values()  # shares its memory
    gradient.mul_(factor.to(gradient.device))
