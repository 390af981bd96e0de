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
shards, are refused. Any number of processes can read the sharded checkpoint. Method: Zhao et al., "PyTorch FSDP", 2023.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Device, PluginError, When, hookimpl, option
from fastloop_plugins.models.blocks import transformer_blocks
from fastloop_plugins.strategies._fsdp_groups import fill_gradients, held_back, make_meshes
from fastloop_plugins.strategies._gradients import Gradients
from fastloop_plugins.strategies._meta_init import MetaInit
from fastloop_plugins.strategies._module_order import ModuleOrder
from fastloop_plugins.strategies._tensor_group import CONFLICTS, DividingStrategy, TensorGroup, step_one_by_one

if TYPE_CHECKING:
    from torch import Tensor, nn
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
            self.conflicts = CONFLICTS  # type: ignore[misc]
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
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
        from torch.distributed.tensor import Shard

        from fastloop_plugins.strategies._memory_fsdp import shard_dim
        from fastloop_plugins.strategies._sharded_parameters import (
            match_norm_inputs,
            norms_with_statistics,
            refuse_scalars,
            refuse_ties,
        )

        precision = run.accelerator.mixed_precision
        if precision not in ("no", "bf16"):
            raise PluginError(
                f"works in fp32 and bf16; the recipe's precision is {precision!r}.",
                code="unsupported-precision",
                place=f"{run.recipe.where}: plugins.fsdp",
            )
        if not torch.distributed.is_initialized():
            self.log.info("one process, so there is nothing to shard")
            return
        refuse_scalars(model, f"{run.recipe.where}: plugins.fsdp")
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        given = self.param_dtype or ("bf16" if precision == "bf16" else "fp32")
        policy = MixedPrecisionPolicy()
        if "bf16" in (given, self.reduce_dtype):
            policy = MixedPrecisionPolicy(dtypes[given], dtypes[self.reduce_dtype], torch.float32)
        offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
        mesh, inner_mesh = make_meshes(run, self.shard_within, self.tensor)
        shards = mesh.size(mesh.ndim - 1)
        options: dict[str, Any] = {
            "mesh": mesh,
            "offload_policy": offload,
            "shard_placement_fn": lambda weight: Shard(shard_dim(weight.shape, shards)),
        }
        blocks = transformer_blocks(model, self.blocks, f"{run.recipe.where}: plugins.fsdp.blocks")
        blocks = [block for block in blocks if block is not model]  # it is sharded anyway
        if not blocks:
            self.log.warning(
                "%s has no list of repeated blocks: it is gathered all at once. Set blocks.", type(model).__name__
            )
        refuse_ties(model, blocks, f"{run.recipe.where}: plugins.fsdp.blocks")
        if precision == given == "bf16" and run.device.type == "cpu":
            match_norm_inputs(model)
        if inner_mesh is not None:
            self.group = TensorGroup(run, model, inner_mesh, f"{run.recipe.where}: plugins.fsdp.tensor")
        meta = MetaInit(run, model) if self.meta_device else None
        # without autocast, dtypes must match between blocks
        inner = policy if precision == "bf16" else replace(policy, output_dtype=None)
        norms = norms_with_statistics(model) if given == "bf16" else []
        for norm in norms:
            fully_shard(norm, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **options)
        for block in reversed(blocks):  # inner blocks first
            fully_shard(block, reshard_after_forward=self.reshard_after_forward, mp_policy=inner, **options)
        fully_shard(model, mp_policy=policy, **options)
        if meta is not None:
            meta.share("cpu" if self.cpu_offload else run.device)
        remedy = "Use ddp with find_unused_parameters, or leave its class out of plugins.fsdp.blocks."
        gathered = [*blocks, *norms]
        self.order = ModuleOrder(run, model, gathered, remedy) if gathered else None
        if self.hold_gradients or self.shard_within is not None:
            name = "set_requires_gradient_sync" if self.hold_gradients else "set_requires_all_reduce"
            model.no_sync = lambda: held_back(getattr(model, name))  # type: ignore[assignment] # Accelerate calls it

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
        super().backward(run, loss)
        if self.gradients is not None:
            self.gradients.attach()

    @hookimpl(tryfirst=True)  # before plugins that read gradients
    def after_backward(self) -> None:
        for parameter in self.gradients.take_unused() if self.gradients is not None else ():
            parameter.grad = None  # zero, but an optimizer would move it by momentum and weight decay

    @contextmanager
    def gathered(self, run: Run) -> Iterator[None]:
        """Gather the weights of all blocks at once, and keep them until the end of the block."""
        from torch.distributed.fsdp import FSDPModule

        root = run.unwrap_model()
        shards = [module for module in root.modules() if isinstance(module, FSDPModule)]
        if self.group is not None or not shards:
            with super().gathered(run):
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
