"""Divides each layer of a transformers model over the processes, which train on the same samples (tensor parallelism).

    plugins:
      - tensor-parallel

The model must have a plan: the layers to divide by columns and by rows (``tp_plan``), as Llama, Qwen and Mistral
have. Layers without a rule, tied weights, and a vocabulary that the processes cannot divide evenly stay whole.
Experts and fused layers are refused. `fsdp: {tensor: N}` divides layers over N processes, and shards over the rest.
The processes need a fast connection. The plugin is not tested with ``compile``, and not on a GPU.

Dropout of the attention weights repeats between the shares of the heads. Any number of processes can read the sharded
checkpoint. Method: Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastloop import MemoryEstimate, hookimpl
from fastloop_plugins.strategies._tensor_group import CONFLICTS, DividingStrategy, TensorGroup, step_one_by_one

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from fastloop import Layout, Run


class TensorParallel(DividingStrategy):
    """Divides the layers of a transformers model over the processes. The model's plan says how."""

    name = "tensor-parallel"
    division = "plugins.tensor-parallel"
    numerics = "reassociated"
    runs_after = ("lora", "activation-checkpointing")
    conflicts = CONFLICTS

    @classmethod
    def estimate_memory(cls, layout: Layout) -> Iterator[MemoryEstimate]:
        """``layout`` describes the share of the model that a process has. `fastloop plan` counts the exchanged
        activations."""
        yield MemoryEstimate(
            name=cls.name,
            weights=layout.weight_bytes + layout.buffers,
            gradients=layout.gradient_bytes,
            optimizer=layout.state_bytes,
        )

    @classmethod
    def divisions(cls, processes: int, per_node: int) -> list[int]:
        """For `fastloop plan`: all processes divide each layer."""
        return [processes]

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"processes_per_batch": 0, **self.timeout_setting()}

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        if run.world_size == 1:
            self.log.info("one process, so there is nothing to divide")
            return
        mesh = init_device_mesh(run.device.type, (run.world_size,))
        self.group = TensorGroup(run, model, mesh, f"{run.recipe.where}: plugins.{self.name}")

    def prepare(self, run: Run, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        if self.group is None:
            return super().prepare(run, model, optimizer)
        from fastloop_plugins.strategies._sharded_parameters import try_step

        step_one_by_one(optimizer, run.recipe.where)
        try_step(optimizer, run.recipe.where)
        return model, optimizer
