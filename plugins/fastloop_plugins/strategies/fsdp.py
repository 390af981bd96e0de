"""Shards weights, gradients and optimizer state over the processes (FSDP2).

    plugins:
      - fsdp

With ``amp`` in bf16, weights are gathered in bf16, gradients are reduced in fp32, and the weights that the optimizer
steps stay in fp32. Norms with running statistics, such as batch norm, are gathered on their own, in fp32.
``param_dtype: bf16`` without ``amp`` computes all of the forward pass in bf16. ``shard_within: 8`` shards within groups
of 8 processes, such as those of a machine (hybrid sharding). ``cpu_offload`` needs a GPU.

``tensor: 4`` also divides each layer over 4 consecutive processes, which train on the same samples
(`tensor-parallel`); the others shard. With ``shard_within: 4``, too, each 4 processes hold one copy of the model, as
with ddp around tensor parallelism.

Under ``accelerate launch``, the recipe takes over the settings of ``fsdp_config`` that it leaves open; others are
refused. Parameters without dimensions, and optimizers such as Adafactor and Rprop, whose operations torch lacks for
shards, are refused. Any number of processes can read the sharded checkpoint. The export gathers the weights, in
``run.full_state_dict()``. Method: Zhao et al., "PyTorch FSDP", 2023.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Device, PluginError, Problem, When, hookimpl, option
from fastloop_plugins.models.blocks import transformer_blocks
from fastloop_plugins.strategies._fsdp_meshes import Meshes, make_meshes
from fastloop_plugins.strategies._fsdp_reduction import fill_gradients, held_back
from fastloop_plugins.strategies._gradients import Gradients, detached_loss
from fastloop_plugins.strategies._meta_init import MetaInit
from fastloop_plugins.strategies._module_order import ModuleOrder
from fastloop_plugins.strategies._tensor_group import CONFLICTS, DividingStrategy, TensorGroup, step_one_by_one

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.optim import Optimizer

    from fastloop import Layout, MemoryEstimate, Run
    from fastloop.recipe import Recipe


class FSDP(DividingStrategy):
    """Shards weights, gradients and optimizer state over the processes.

    Torch's ``fully_shard`` is applied to each block and to the model.
    """

    name = "fsdp"
    division = "plugins.fsdp.tensor"
    gathers_weights = True
    numerics = "reassociated"
    runs_after = ("lora", "activation-checkpointing")
    requirements = (When(lambda plugin: plugin.cpu_offload, Device("cuda", "xpu")),)

    blocks: list[str] | None = option(
        "Classes of modules to shard one by one; null: the repeated blocks.", default=None
    )
    reshard_after_forward: bool = option("Free a block's gathered weights between forward and backward.", default=True)
    shard_within: int | None = option("Processes that share one copy of the model; null: all.", default=None, ge=2)
    tensor: int | None = option(
        "Consecutive processes that divide each layer (tensor-parallel); null: none.", default=None, ge=2
    )
    param_dtype: Literal["fp32", "bf16"] | None = option(
        "Dtype of gathered weights and of the forward pass; null: bf16 with amp, else fp32.", default=None
    )
    reduce_dtype: Literal["fp32", "bf16"] = option("Dtype of the gradient reduction.", default="fp32")
    hold_gradients: bool = option(
        "Reduce gradients only in the last micro-step; keeps full gradients until then.", default=False
    )
    cpu_offload: bool = option("Keep the shards in the host's memory, and step there.", default=False)
    meta_device: bool = option(
        "Only the main process builds the model; the others receive their shards from it.", default=False
    )

    @classmethod
    def estimate_memory(cls, layout: Layout) -> Iterator[MemoryEstimate]:
        from fastloop_plugins.strategies import _memory_fsdp

        return _memory_fsdp.estimate(layout)

    @classmethod
    def divisions(cls, processes: int, per_node: int) -> list[int]:
        """For `fastloop plan`: a layer is divided over 1, 2, 4, ... processes of one machine."""
        sizes = [2**power for power in range(per_node.bit_length())]
        return [size for size in sizes if per_node % size == 0 and (size == 1 or size < processes)]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gradients: Gradients | None = None  # with one process
        self.order: ModuleOrder | None = None
        if self.tensor:
            self.conflicts = CONFLICTS
        if "bf16" in (self.param_dtype, self.reduce_dtype):
            self.numerics = "reduced-precision"  # type: ignore[misc, assignment]

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        from fastloop_plugins.strategies._fsdp_launcher import take_over

        take_over(recipe, self)
        if self.tensor and self.meta_device:
            raise PluginError(
                "needs the full model in each process.",
                code="conflicting-values",
                place=f"{recipe.where}: plugins.fsdp.tensor",
                remedy="Set plugins.fsdp.meta_device: false.",
            )

    @hookimpl
    def configure(self) -> dict[str, Any]:
        settings = {"processes_per_batch": self.tensor} if self.tensor else {}
        settings |= self.timeout_setting()
        if not self.cpu_offload:
            return settings
        from accelerate.utils import InitProcessGroupKwargs

        # gradients are on the host when they are clipped
        return {"init_handler": InitProcessGroupKwargs(backend="cpu:gloo,cuda:nccl"), **settings}

    @hookimpl(wrapper=True)
    def build_model(self, run: Run) -> Generator[None, Any, Any]:
        import torch

        with torch.device("meta") if self.meta_device and not run.is_main else nullcontext():
            return (yield)

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        import torch

        from fastloop_plugins.strategies._sharded_parameters import (
            match_norm_inputs,
            norms_with_statistics,
            refuse_scalars,
            refuse_ties,
        )

        place = f"{run.recipe.where}: plugins.fsdp"
        precision = run.accelerator.mixed_precision
        if precision not in ("no", "bf16"):
            raise PluginError(
                f"works in fp32 and bf16; the recipe's precision is {precision!r}.",
                code="unsupported-precision",
                place=place,
            )
        if not torch.distributed.is_initialized():
            self.log.info("one process, so there is nothing to shard")
            return
        refuse_scalars(model, place)
        param_dtype = self.param_dtype or ("bf16" if precision == "bf16" else "fp32")
        meshes = make_meshes(run, self.shard_within, self.tensor)
        blocks = self._find_blocks(model, place)
        refuse_ties(model, blocks, f"{place}.blocks")
        if precision == param_dtype == "bf16" and run.device.type == "cpu":
            match_norm_inputs(model)
        if meshes.tensor is not None:
            self.group = TensorGroup(run, model, meshes.tensor, f"{place}.tensor")
        meta = MetaInit(run, model) if self.meta_device else None
        norms = norms_with_statistics(model) if param_dtype == "bf16" else []
        self._shard(model, blocks, norms, meshes, self._mixed_precision(param_dtype), precision == "bf16")
        if meta is not None:
            meta.share("cpu" if self.cpu_offload else run.device)
        gathered = [*blocks, *norms]
        if gathered:
            remedy = "Use ddp with find_unused_parameters, or leave its class out of plugins.fsdp.blocks."
            self.order = ModuleOrder(run, model, gathered, remedy)
        if self.hold_gradients or self.shard_within is not None:
            # Without `no_sync`, each micro-step reduces its gradients. With `shard_within`, there are several copies of
            # the model, and each micro-step would also add the gradients of all copies. Once a step is enough, so the
            # other micro-steps add gradients within a copy alone. With `hold_gradients`, they reduce nothing.
            switch = "set_requires_gradient_sync" if self.hold_gradients else "set_requires_all_reduce"

            def no_sync() -> AbstractContextManager[None]:
                return held_back(getattr(model, switch))

            model.no_sync = no_sync  # type: ignore[assignment] # Accelerate calls it in all micro-steps but the last

    def _find_blocks(self, model: nn.Module, place: str) -> list[nn.Module]:
        """The modules to shard one by one, without the model, which is sharded anyway."""
        blocks = transformer_blocks(model, self.blocks, f"{place}.blocks")
        blocks = [block for block in blocks if block is not model]
        if not blocks:
            self.log.warning(
                Problem(
                    f"{type(model).__name__} has no list of repeated blocks: it is gathered all at once.",
                    code="no-blocks",
                    remedy="Set blocks.",
                )
            )
        return blocks

    def _mixed_precision(self, param_dtype: str) -> MixedPrecisionPolicy:
        """Torch's policy for the dtypes of gathered weights and of the gradient reduction."""
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if "bf16" not in (param_dtype, self.reduce_dtype):
            return MixedPrecisionPolicy()
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        return MixedPrecisionPolicy(dtypes[param_dtype], dtypes[self.reduce_dtype], torch.float32)

    def _shard(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        norms: Sequence[nn.Module],
        meshes: Meshes,
        policy: MixedPrecisionPolicy,
        has_autocast: bool,
    ) -> None:
        """Apply ``fully_shard`` to the norms, which stay in fp32, then to the blocks, and then to the model."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
        from torch.distributed.tensor import Shard

        from fastloop_plugins.strategies._memory_fsdp import shard_dim

        options: dict[str, Any] = {
            "mesh": meshes.shard,
            "offload_policy": CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
            "shard_placement_fn": lambda weight: Shard(shard_dim(weight.shape, meshes.shards)),
        }
        # without autocast, dtypes must match between blocks
        block_policy = policy if has_autocast else replace(policy, output_dtype=None)
        for norm in norms:
            fully_shard(norm, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **options)
        for block in reversed(blocks):  # inner blocks first
            fully_shard(block, reshard_after_forward=self.reshard_after_forward, mp_policy=block_policy, **options)
        fully_shard(model, mp_policy=policy, **options)

    def prepare(self, run: Run, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        import torch

        if not torch.distributed.is_initialized():
            return super().prepare(run, model, optimizer)
        from fastloop_plugins.strategies._sharded_parameters import try_step

        if self.group is not None:
            step_one_by_one(optimizer, run.recipe.where)
        try_step(optimizer, run.recipe.where)
        self.gradients = Gradients(run, model.parameters())
        fill_gradients(model, self.gradients)
        return model, optimizer

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Generator[None, Any, Any]:
        if self.order is not None:
            self.order.restart()
        return (yield)

    def backward(self, run: Run, loss: Tensor) -> None:
        if self.gradients is None:
            super().backward(run, loss)
            return
        self.gradients.has_any = False
        super().backward(run, loss)
        if not self.gradients.has_any:
            raise detached_loss(run, self.name)
        self.gradients.attach()

    @hookimpl(tryfirst=True)  # before plugins that read gradients
    def after_backward(self) -> None:
        if self.gradients is None:
            return
        for parameter in self.gradients.take_unused():
            parameter.grad = None  # zero, but an optimizer would move it by momentum and weight decay

    @contextmanager
    def unsharded(self, run: Run) -> Iterator[None]:
        """Gather the weights of all layers at once, and keep them until the end of the ``with`` block."""
        from torch.distributed.fsdp import FSDPModule

        root = run.unwrap_model()
        shards = [module for module in root.modules() if isinstance(module, FSDPModule)]
        if self.group is not None or not shards:
            with super().unsharded(run):
                yield
            return
        shards[0]._get_fsdp_state()._lazy_init()  # else the first block that is called would become the root
        for module in shards:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            with nullcontext() if self.order is None else self.order.paused():
                yield
        finally:
            for module in shards:
                if module is not root:  # the root keeps its weights until the backward pass
                    module.set_reshard_after_forward(self.reshard_after_forward, recurse=False)
                module.reshard()

    @hookimpl(wrapper=True, trylast=True)
    def evaluate(self, run: Run) -> Generator[None, Any, Any]:
        from torch.distributed.fsdp import FSDPModule

        try:
            return (yield)
        finally:
            for module in run.unwrap_model().modules():  # without a backward pass, nothing frees the gathered weights
                if isinstance(module, FSDPModule):
                    module.reshard()
