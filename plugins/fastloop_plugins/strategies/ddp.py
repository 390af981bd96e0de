"""Several processes train one model (DistributedDataParallel): each computes gradients on its share of a batch, and all step alike.

    plugins:
      - ddp

Start one process a device: ``fastloop train recipe.yaml --nproc 4``, ``torchrun`` or ``accelerate launch``. ``train.batch_size`` stays what
it is, over all processes. Gradients are exchanged at a step's last micro-step only. In one process there is nothing to do.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastloop import AcceleratorDraft, Device, Plugin, PluginError, When, hookimpl, option

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run

logger = logging.getLogger("fastloop")


class DDP(Plugin):
    """Torch's DistributedDataParallel, put around the model by Accelerate."""

    name = "ddp"
    slot = "strategy"
    numerics = "reassociated"
    requirements = (When(lambda config: config.sync_batch_norm, Device("cuda")),)
    description = "averages gradients over the processes"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        gradient_as_bucket_view: Annotated[bool, option("Gradients live in the buffers that are exchanged: one copy less of them.")] = True
        bucket_cap_mb: Annotated[int, option("MiB of gradients exchanged at once, while backward goes on.", ge=1)] = 25
        find_unused_parameters: Annotated[bool, option("For a model whose forward leaves out some of its weights at times.")] = False
        static_graph: Annotated[bool, option("Every step uses the same weights in the same order: lets torch plan ahead.")] = False
        sync_batch_norm: Annotated[bool, option("Batch norm over the samples of all processes (CUDA).")] = False
        compress: Annotated[Literal["bf16"] | None, option("Exchange gradients in this dtype: half the bytes.")] = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.config.compress is not None:
            self.numerics = "reduced-precision"  # type: ignore[misc, assignment]

    @hookimpl
    def configure_accelerator(self, draft: AcceleratorDraft) -> None:
        from accelerate.utils import DistributedDataParallelKwargs

        config = self.config
        draft.ddp_handler = DistributedDataParallelKwargs(
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            bucket_cap_mb=config.bucket_cap_mb,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
        )

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> nn.Module | None:
        from torch import nn

        if self.config.sync_batch_norm:
            converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
            return converted
        if run.world_size > 1 and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            logger.warning("ddp: batch norm sees the samples of its own process only, so numbers differ with how many there are")
        return None

    @hookimpl
    def after_prepare(self, run: Run, model: nn.Module) -> None:
        if self.config.compress is None or run.world_size == 1:
            return
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        def compress(group, bucket):  # type: ignore[no-untyped-def] # torch reads annotations; and it refuses its hook by name on a CPU
            return bf16_compress_hook(group, bucket)

        model.register_comm_hook(None, compress)  # type: ignore[operator]

    @hookimpl
    def check_run(self, run: Run) -> None:
        if run.world_size == 1:
            logger.info("ddp: one process, so there is nothing to exchange")
        elif self.config.static_graph and run.loader_settings.split is not None:
            splitter = run.loader_settings.writers["split"]
            raise PluginError(
                f"{run.recipe.where}: plugins.ddp.static_graph: torch cannot hold gradients back with it, and {splitter!r} splits each "
                "step as its samples want it. Set it to false."
            )
        elif self.config.static_graph and run.loaders.micro_steps > 1:  # torch's reducer fails an assertion of its own
            fits = run.recipe.train.batch_size // run.world_size
            raise PluginError(
                f"{run.recipe.where}: plugins.ddp.static_graph: torch cannot hold gradients back with it, and steps are of "
                f"{run.loaders.micro_steps} micro-steps. Set it to false, or train.micro_batch_size to {fits}."
            )

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Generator[None, Any, Any]:
        try:
            return (yield)
        except RuntimeError as error:  # torch notices at the next forward pass
            if "find_unused_parameters" not in str(error):
                raise
            raise PluginError(
                "plugin 'ddp': the loss does not depend on all of the model's trained weights, so their gradients were waited for in vain. "
                "Set plugins.ddp.find_unused_parameters: true, or freeze them."
            ) from error
