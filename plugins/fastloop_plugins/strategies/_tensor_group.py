"""Processes that compute a part of each layer for the same samples: tensor parallelism, alone or within ``fsdp``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastloop import PluginError, hookimpl
from fastloop_plugins.models.wrapped import transformers_model
from fastloop_plugins.strategies._timeout import TimedStrategy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from fastloop import Run
    from fastloop_plugins.strategies._memory_tensor import TensorShare

SAME_SAMPLES = {
    "auto-micro-batch": "it divides a step's samples over the processes, and here some train on the same ones.",
    "sample-audit": "it counts each sample once, and here several processes train on it.",
}
"""Plugins that do not work where processes train on the same samples -> why."""
CONFLICTS = {
    **SAME_SAMPLES,
    "fused-loss": "it needs all rows of the head, which the processes divide.",
    "fused-optimizer": "torch's fused optimizers cannot step divided and whole weights together.",
    "torchao-fp8": "it replaces the layers that the plan names.",
}
"""Plugins that do not work with divided layers -> why."""


def find_plan(model: nn.Module, precision: str, where: str) -> tuple[Any, Any]:
    """The transformers model in ``model``, and its plan: the layers to divide by columns and by rows (``tp_plan``).

    Raises:
        PluginError: There is no plan, or the precision is fp16.
    """
    if precision == "fp16":
        raise PluginError(
            "works in fp32 and bf16; the recipe's precision is 'fp16'.", code="unsupported-precision", place=where
        )
    inner = transformers_model(model)
    rules = getattr(inner, "tp_plan", None)
    if not rules:
        name = type(inner or model).__name__
        raise PluginError(
            f"{name} has no plan (tp_plan of a transformers model).",
            code="unsupported-model",
            place=where,
            remedy="Use fsdp or ddp.",
        )
    return inner, rules


class TensorGroup:
    """Consecutive processes that share every layer of a model.

    Args:
        model: A model with a plan. Its layers become this process's parts, in place.
        mesh: The processes of the group, in one dimension.
        where: The plugin, for messages.

    Raises:
        PluginError: The processes cannot divide the model.
    """

    def __init__(self, run: Run, model: nn.Module, mesh: DeviceMesh, where: str) -> None:
        from torch.distributed.tensor.parallel import parallelize_module

        from fastloop_plugins.strategies._tensor_plan import styles

        self.size = mesh.size()
        self.drew_together = False
        inner, rules = find_plan(model, run.accelerator.mixed_precision, where)
        parallelize_module(inner, mesh, styles(inner, rules, self.size, where))

    def share_metrics(self, run: Run) -> None:
        """Let metrics count each sample once: every process of a group has the same predictions."""
        if run.metrics is None:
            return
        for metric in run.metrics.values(copy_state=False):
            metric.sync_on_compute = run.loaders.processes.world_size > 1
            metric.process_group = run.loaders.processes.device_group

    def draw_together(self, run: Run) -> None:
        """Let the processes draw the same random numbers, once: activations between divided layers must be equal."""
        from fastloop.runtime.random_states import random_states, restore_random_states

        if not self.drew_together:
            restore_random_states(run.processes.all_gather_object(random_states())[run.rank // self.size * self.size])
        self.drew_together = True


class DividingStrategy(TimedStrategy):
    """A strategy that can divide layers.

    Attributes:
        group: The processes that divide the layers with this one; None: layers are whole.
        division: The key of the recipe that divides them, for messages.
    """

    keeps_weights_equal = False

    group: TensorGroup | None = None
    division: str

    @classmethod
    def divide_model(cls, model: nn.Module, processes: int, precision: str, where: str) -> TensorShare:
        """For `fastloop plan`: make a model of fake tensors the share of a process; see ``Strategy.estimate_memory``.

        Raises:
            PluginError: The model or the precision is refused.
        """
        from fastloop_plugins.strategies._memory_tensor import TensorShare

        return TensorShare(model, processes, precision, f"{where}: {cls.division}")

    @hookimpl
    def check_run(self, run: Run) -> None:
        if self.group is not None:
            self.group.share_metrics(run)

    @hookimpl
    def before_step(self, run: Run) -> None:
        if self.group is not None:
            self.group.draw_together(run)

    def gradient_norm(self, run: Run) -> Tensor:
        """The default's, which counts divided and whole gradients together. A class that overrides ``clip_gradients``
        must override it, too: see ``fastloop.plugins.declarations``."""
        return super().gradient_norm(run)

    def clip_gradients(self, run: Run, max_norm: float) -> Tensor:
        """Clip divided and whole gradients together, which torch's ``clip_grad_norm_`` cannot do."""
        if self.group is None:
            return super().clip_gradients(run, max_norm)
        norm = self.gradient_norm(run)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        return norm


def step_one_by_one(optimizer: Optimizer, where: str) -> None:
    """Step the parameters in a Python loop: torch's multi-tensor operations cannot mix divided and whole weights.

    Args:
        where: The recipe, for messages.

    Raises:
        PluginError: The recipe selects such an operation for the optimizer.
    """
    from torch.distributed.tensor import DTensor

    for member in getattr(optimizer, "members", {"": optimizer}).values():
        for group in member.param_groups:
            if group.get("foreach", False) is None:
                group["foreach"] = False
            is_mixed = len({isinstance(weight, DTensor) for weight in group["params"]}) > 1
            for key in ("foreach", "fused"):
                if is_mixed and group.get(key):
                    raise PluginError(
                        "torch cannot step divided and whole weights together.",
                        code="unsupported-optimizer",
                        place=f"{where}: train.optimizer.{key}",
                        remedy="Remove it.",
                    )
