"""Several processes share one model (FSDP2): each keeps a part of the weights, their gradients and their optimizer state.

    plugins:
      - fsdp

Weights are gathered block by block for the time they are computed with. With ``amp`` in bf16 they travel in bf16, and gradients are
summed in fp32. Checkpoints are written in parts by all processes and read by any number of them, or by one without this plugin;
``model/`` holds the whole weights. In one process there is nothing to do. Method: Zhao et al., "PyTorch FSDP", 2023.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastloop import AcceleratorDraft, Device, Plugin, PluginError, When, hookimpl, option
from fastloop_plugins.kernels._blocks import transformer_blocks
from fastloop_plugins.strategies._meta_init import MetaInit

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from fastloop import Run

logger = logging.getLogger("fastloop")


class FSDP(Plugin):
    """Torch's ``fully_shard``."""

    name = "fsdp"
    slot = "strategy"
    numerics = "reassociated"
    runs_after = ("lora", "activation-checkpointing")
    requirements = (When(lambda config: config.cpu_offload, Device("cuda", "xpu")),)
    description = "shards weights, gradients and optimizer state over the processes"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        blocks: Annotated[list[str] | None, option("Classes of the modules that are sharded one by one; null: the repeated blocks.")] = None
        reshard_after_forward: Annotated[bool, option("Let a block's whole weights go between forward and backward.")] = True
        reduce_dtype: Annotated[Literal["fp32", "bf16"], option("What gradients are summed in, with amp.")] = "fp32"
        hold_gradients: Annotated[bool, option("Exchange at a step's last micro-step only; holds whole gradients till then.")] = False
        cpu_offload: Annotated[bool, option("Keep the parts in the host's memory, and step there.")] = False
        meta_device: Annotated[bool, option("Only the main process builds the model for real; the others get their parts from it.")] = False

    @hookimpl
    def configure_accelerator(self, draft: AcceleratorDraft) -> None:
        if self.config.cpu_offload:
            from accelerate.utils import InitProcessGroupKwargs

            draft.init_handler = InitProcessGroupKwargs(backend="cpu:gloo,cuda:nccl")  # gradients are on the host when they are clipped

    @hookimpl(wrapper=True)
    def build_model(self, run: Run) -> Generator[None, Any, Any]:
        import torch

        with torch.device("meta") if self.config.meta_device and not run.is_main else nullcontext():
            return (yield)

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        config, precision = self.config, run.accelerator.mixed_precision
        if precision not in ("no", "bf16"):
            raise PluginError(f"{run.recipe.where}: plugins.fsdp: works in fp32 and bf16; the recipe's precision is {precision!r}.")
        if not torch.distributed.is_initialized():
            logger.info("fsdp: one process, so there is nothing to share")
            return
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        options: dict[str, Any] = {
            "mesh": init_device_mesh(run.device.type, (run.world_size,)),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, dtypes[config.reduce_dtype], torch.float32)
            if precision == "bf16"
            else MixedPrecisionPolicy(),
            "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
        }
        blocks = transformer_blocks(model, config.blocks, f"{run.recipe.where}: plugins.fsdp.blocks")
        if not blocks:
            logger.warning("fsdp: %s has no list of like blocks: it is gathered in one piece. Set blocks.", type(model).__name__)
        self._check_tied(run, model, blocks)
        whole = MetaInit(run, model) if config.meta_device else None
        for block in reversed(blocks):  # the inner ones first
            fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
        fully_shard(model, **options)
        if whole is not None:
            whole.share("cpu" if config.cpu_offload else run.device)
        if config.hold_gradients:
            model.no_sync = lambda: held_back(model)  # type: ignore[assignment] # what Accelerate looks for

    @staticmethod
    def _check_tied(run: Run, model: nn.Module, blocks: list[nn.Module]) -> None:
        """A weight under two names must be in one block, or in none: it cannot be gathered at two times."""
        part = {id(module): index for index, block in enumerate(blocks) for module in block.modules()}  # inner blocks come later
        parts: dict[int, int | None] = {}
        for name, weight in model.named_parameters(remove_duplicate=False):
            found = part.get(id(model.get_submodule(name.rpartition(".")[0])))
            if parts.setdefault(id(weight), found) != found:
                raise PluginError(
                    f"{run.recipe.where}: plugins.fsdp.blocks: the weight {name!r} is tied to one outside its block. "
                    "Name blocks that hold both, or neither."
                )

    @hookimpl
    def prepare(self, run: Run, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer] | None:
        import torch

        if not torch.distributed.is_initialized():
            return None
        return run.accelerator.prepare_model(model, evaluation_mode=True), optimizer  # autocast, and no DDP

    @hookimpl(wrapper=True, trylast=True)
    def evaluate(self, run: Run) -> Generator[None, Any, Any]:
        from torch.distributed.fsdp import FSDPModule

        try:
            return (yield)
        finally:
            for module in run.unwrap_model().modules():  # no backward pass let the gathered weights go, and others may be put in place now
                if isinstance(module, FSDPModule):
                    module.reshard()


@contextmanager
def held_back(model: Any) -> Iterator[None]:
    """For all micro-steps but a step's last."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
