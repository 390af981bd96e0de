"""Which parameters got a gradient in a step.

Processes may use different layers, and a parameter that none of them used must not change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop import Run


class Gradients:
    """The parameters that got a gradient on this process since the last optimizer step, and on any process.

    The processes exchange flags of the parameters in the reduction of the step's loss, which follows the last backward
    pass.

    Args:
        run: The run.
        parameters: The parameters of the model, in the same order on every process.
    """

    def __init__(self, run: Run, parameters: Iterable[Tensor]) -> None:
        self.run = run
        self.parameters = list(parameters)
        self.trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.used: set[int] = set()
        self.sent: tuple[list[bool], Tensor] | None = None  # the newest flags, and on the device
        self.attached: Tensor | None = None  # flags for the next reduction
        self.shares: Tensor | None = None  # of processes with a gradient, after it
        self.average = run.processes.all_reduce_mean
        run.processes.all_reduce_mean = self._average_with_flags  # type: ignore[method-assign]

    def add(self, parameter: Tensor) -> None:
        """Record that a parameter got a gradient on this process."""
        self.used.add(id(parameter))

    def attach(self) -> None:
        """Exchange the record in the reduction that follows. Call it after each backward pass."""
        import torch

        flags = [id(parameter) in self.used for parameter in self.parameters]
        if self.sent is None or self.sent[0] != flags:
            self.sent = flags, torch.tensor(flags, dtype=torch.float32).to(self.run.device, non_blocking=True)
        self.attached = self.sent[1]

    def _average_with_flags(self, tensor: Tensor) -> Tensor:
        import torch

        if self.attached is None:
            return self.average(tensor)
        together = self.average(torch.cat([tensor.flatten(), self.attached.to(tensor.dtype)]))
        self.attached = None
        self.shares = together[tensor.numel() :]
        return tensor.copy_(together[: tensor.numel()].view_as(tensor))

    def take_unused(self) -> list[Tensor]:
        """The trained parameters without a gradient on any process, and those that were frozen since; then begin a new
        record.

        It reads the device only on processes that lack a gradient themselves.
        """
        used = self.used
        self.used = set()
        shares = self.shares
        self.shares = None
        frozen = [parameter for parameter in self.trained if not parameter.requires_grad]
        if shares is None or all(id(parameter) in used for parameter in self.parameters if parameter.requires_grad):
            return frozen
        pairs = zip(self.parameters, shares.tolist(), strict=True)
        return frozen + [parameter for parameter, share in pairs if share == 0 and parameter.requires_grad]
