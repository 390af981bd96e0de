"""Which parameters got a gradient in a step.

Processes may use different layers, and a parameter that none of them used must not change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastloop import PluginError

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop import Run


def detached_loss(run: Run, strategy: str) -> PluginError:
    """The error for a backward pass that reached no trained parameter on this process, and so did not take part in the
    exchange of gradients."""
    return PluginError(
        f"the loss does not depend on any trained parameter of the model on process {run.rank}. Another process may "
        "wait for its gradients.",
        code="unused-parameters",
        place=f"{run.recipe.where}: plugins.{strategy}: step {run.state.step + 1}",
        remedy="Compute the loss from the output of the model.",
    )


class Gradients:
    """The parameters that got a gradient on this process since the last optimizer step, and on any process.

    The processes exchange one flag a parameter in the reduction of the step's loss, which follows the last backward
    pass: it averages both in one tensor.

    Args:
        run: The run.
        parameters: The parameters of the model, in the same order on every process.

    Attributes:
        has_any: Whether the newest backward pass has computed a gradient on this process.
    """

    def __init__(self, run: Run, parameters: Iterable[Tensor]) -> None:
        self.run = run
        self.parameters = list(parameters)
        self.trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.has_any = False
        self.used: set[int] = set()  # ids of the parameters that got a gradient on this process
        self.flags: list[bool] = []  # as they were exchanged last: whether each parameter is used
        self.flags_on_device: Tensor | None = None  # (parameters,) float32; usual steps have the same, and copy none
        self.attached: Tensor | None = None  # (parameters,) float32: flags that the next reduction exchanges
        self.shares: Tensor | None = None  # (parameters,): share of the processes that use each, after the reduction
        self.average = run.processes.all_reduce_mean  # the reduction itself
        run.processes.all_reduce_mean = self._average_with_flags  # type: ignore[method-assign]

    def add(self, parameter: Tensor) -> None:
        """Record that a parameter got a gradient on this process."""
        self.used.add(id(parameter))

    def add_new(self, parameter: Tensor) -> None:
        """Record that the newest backward pass computed the gradient of a parameter."""
        self.has_any = True
        self.add(parameter)

    def attach(self) -> None:
        """Exchange the record in the reduction that follows. Call it after each backward pass."""
        import torch

        flags = [id(parameter) in self.used for parameter in self.parameters]
        if flags != self.flags or self.flags_on_device is None:
            self.flags = flags
            self.flags_on_device = torch.tensor(flags, dtype=torch.float32).to(self.run.device, non_blocking=True)
        self.attached = self.flags_on_device

    def _average_with_flags(self, tensor: Tensor) -> Tensor:
        """``Processes.all_reduce_mean`` of a tensor. Attached flags are averaged with it.

        A loss of 2.0 and 3.0 on two processes, and flags [1, 1] and [1, 0]: the averages are 2.5, and shares [1, 0.5].
        """
        import torch

        if self.attached is None:
            return self.average(tensor)
        values = tensor.numel()
        averages = self.average(torch.cat([tensor.flatten(), self.attached.to(tensor.dtype)]))
        self.attached = None
        self.shares = averages[values:]
        return tensor.copy_(averages[:values].view_as(tensor))

    def take_unused(self) -> list[Tensor]:
        """The trained parameters without a gradient on any process, and those that were frozen since; then begin a new
        record.

        It reads the device only on processes that lack a gradient themselves.
        """
        used = self.used
        self.used = set()
        shares = self.shares
        self.shares = None
        unused = [parameter for parameter in self.trained if not parameter.requires_grad]
        uses_all = all(id(parameter) in used for parameter in self.parameters if parameter.requires_grad)
        if shares is None or uses_all:
            return unused
        for parameter, share in zip(self.parameters, shares.tolist(), strict=True):
            if share == 0 and parameter.requires_grad:
                unused.append(parameter)
        return unused
