"""Divides each layer of a transformers model over the processes, which train on the same samples (tensor parallelism).

    plugins:
      - tensor-parallel

The model must have a plan: the layers to divide by columns and by rows (``tp_plan``), as Llama, Qwen and Mistral have.
Layers without a rule, tied weights, and a vocabulary that the processes cannot divide evenly stay whole. Experts and
fused layers are refused. The processes need a fast connection. The plugin is not tested with ``compile``, and not on a
GPU.

Dropout of the attention weights repeats between the shares of the heads. Any number of processes can read the sharded
checkpoint. Method: Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastloop import PluginError, Strategy, hookimpl
from fastloop_plugins._models import transformers_model
from fastloop_plugins.strategies._timeout import Timeout, read_timeout

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fastloop import Run
    from fastloop_plugins.strategies._memory_layout import Layout
    from fastloop_plugins.strategies._memory_tensor import Share

logger = logging.getLogger("fastloop")


class TensorParallel(Strategy):
    """Torch's ``parallelize_module`` with the plan of the model."""

    name = "tensor-parallel"
    numerics = "reassociated"
    runs_after = ("activation-checkpointing",)
    conflicts = {
        "auto-micro-batch": "it divides a step's samples over the processes, and here each process trains on all "
        "of them.",
        "ema": "torch cannot average divided and whole weights together.",
        "fused-optimizer": "torch's fused optimizers cannot step divided and whole weights together.",
        "lora": "adapters wrap the layers that the plan names.",
        "sample-audit": "it counts each sample once, and here every process trains on it.",
        "torchao-fp8": "it replaces the layers that the plan names.",
    }
    description = "divides the layers of a transformers model over the processes"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        timeout: Timeout = None

    @classmethod
    def estimate_memory(cls, layout: Layout) -> Iterator[dict[str, Any]]:
        """For `fastloop plan`: bytes of a process, whose share of the model ``layout`` has; see ``_memory_layout``."""
        from fastloop_plugins.strategies._memory_layout import total

        yield {
            "name": cls.name,
            "options": {},
            "weights": total(layout.weights) + layout.buffers,
            "gradients": total(layout.trained),
            "optimizer": total(layout.trained, lambda weight: weight.state),
            "buckets": 0.0,
            "wire": 0.0,
        }

    @classmethod
    def divide_model(cls, model: nn.Module, processes: int, precision: str, where: str) -> Share:
        """For `fastloop plan`: make a model of fake tensors the share of a process; see ``_memory_layout``.

        Raises:
            PluginError: The model or the precision is refused.
        """
        from fastloop_plugins.strategies._memory_tensor import Share

        found, rules = cls._plan(model, precision, f"{where}: plugins.{cls.name}")
        return Share(found, rules, processes, f"{where}: plugins.{cls.name}")

    @staticmethod
    def _plan(model: nn.Module, precision: str, where: str) -> tuple[Any, Any]:
        """The transformers model in ``model``, and its plan."""
        if precision == "fp16":
            raise PluginError(f"{where}: works in fp32 and bf16; the recipe's precision is 'fp16'.")
        found = transformers_model(model)
        if not (rules := getattr(found, "tp_plan", None)):
            name = type(found or model).__name__
            raise PluginError(f"{where}: {name} has no plan (tp_plan of a transformers model). Use fsdp or ddp.")
        return found, rules

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.drew_together = False

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"same_batches": True, **read_timeout(self)}

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import parallelize_module

        from fastloop_plugins.strategies._tensor_plan import styles

        where = f"{run.recipe.where}: plugins.tensor-parallel"
        if run.world_size == 1:
            logger.info("tensor-parallel: one process, so there is nothing to divide")
            return
        found, rules = self._plan(model, run.accelerator.mixed_precision, where)
        mesh = init_device_mesh(run.device.type, (run.world_size,))
        parallelize_module(found, mesh, styles(found, rules, run.world_size, where))

    def prepare(self, run: Run, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        if run.world_size == 1:
            return super().prepare(run, model, optimizer)
        from fastloop_plugins.strategies._sharded_parameters import try_step

        try_step(optimizer, run.recipe.where)
        return model, optimizer

    @hookimpl
    def check_run(self, run: Run) -> None:
        for metric in run.metrics.values(copy_state=False) if run.metrics is not None else ():
            metric.sync_on_compute = False  # every process has all predictions

    @hookimpl
    def before_step(self, run: Run) -> None:
        """Draw the same random numbers on all processes: activations between divided layers must be equal."""
        from fastloop.runtime.random_states import random_states, restore_random_states

        if not self.drew_together and run.world_size > 1:
            restore_random_states(run.processes.all_gather_object(random_states())[0])
        self.drew_together = True

    def clip_gradients(self, run: Run, max_norm: float) -> Tensor:
        """Torch's own cannot clip divided and whole gradients together."""
        from fastloop.distributed.tensors import total_norm

        gradients = [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
        norm = total_norm(gradients)
        if max_norm < math.inf:
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
            for gradient in gradients:
                gradient.mul_(scale)
        return norm
