"""Trains one model in several processes (DistributedDataParallel), which average the gradients of their batch shares.

    plugins:
      - ddp

Start one process for each device, by one of these commands:

    fastloop train recipe.yaml --nproc 4
    torchrun --nproc_per_node 4 -m fastloop train recipe.yaml
    accelerate launch --multi_gpu --num_processes 4 -m fastloop train recipe.yaml

``accelerate launch`` starts several processes only with ``--multi_gpu``, or with ``distributed_type: MULTI_GPU`` in the
file that ``--config_file`` names, also on a CPU: ``use_cpu: true`` beside it keeps to the CPU. In a run of several
processes, the plugin is on by default if the recipe lists no other strategy.

``train.batch_size`` is the total over all processes. ``compress: bf16`` all-reduces gradients in bf16, which rounds
them. fp16 has smaller errors, but overflows.

DDP averages the gradients of the parameters that are trained when the run is built. So a layer that a plugin freezes in
``before_prepare`` cannot be unfrozen later: the run ends with an error. On one process that is a warning. Freeze the
layer in ``before_fit`` instead, with ``find_unused_parameters: true``: then it may be unfrozen at any step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Device, PluginError, Recommendation, When, hookimpl, option
from fastloop.distributed.ranks import world_size
from fastloop.unstepped import by_module
from fastloop_plugins.strategies._gradients import detached_loss
from fastloop_plugins.strategies._timeout import TimedStrategy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

    from fastloop import Layout, MemoryEstimate, Run
    from fastloop.plugins.manager import PluginSet
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine


WITHOUT_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
"""The part of torch's error that lists parameters, by their index among those that DDP reduces: ``2 3``."""


class DDP(TimedStrategy):
    """Averages gradients over the processes, by torch's DistributedDataParallel through Accelerate."""

    name = "ddp"
    numerics = "reassociated"
    recordable = True
    shares_buffers = True
    requirements = (When(lambda plugin: plugin.sync_batch_norm, Device("cuda")),)

    gradient_as_bucket_view: bool = option(
        "Store gradients in the all-reduce buckets: saves one copy of them.", default=True
    )
    bucket_cap_mb: int = option("MiB of gradients in one all-reduce, which overlaps with backward.", default=25, ge=1)
    find_unused_parameters: bool = option(
        "For a model whose forward does not use all weights in each step.", default=False
    )
    static_graph: bool = option(
        "Every step uses the same weights in the same order, so torch can plan ahead.", default=False
    )
    sync_batch_norm: bool = option("Compute batch norm over the samples of all processes (CUDA).", default=False)
    compress: Literal["bf16", "fp16"] | None = option(
        "All-reduce gradients in this dtype: half the bytes.", default=None
    )

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        processes = world_size()
        return f"the run has {processes} processes" if processes > 1 else None

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """For several processes. A model that does not fit needs another strategy, which the recipe lists."""
        return Recommendation(why=f"{machine.processes} processes train together") if machine.processes > 1 else None

    @classmethod
    def estimate_memory(cls, layout: Layout) -> Iterator[MemoryEstimate]:
        from fastloop_plugins.strategies import _memory_ddp

        return _memory_ddp.estimate(layout)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.frozen: list[tuple[str, nn.Parameter]] = []  # when DistributedDataParallel was built
        self._reduced_names: list[str] = []  # in the order of DistributedDataParallel's indices
        self._wrapped: DistributedDataParallel | None = None
        self._has_gradient = False  # whether the last backward pass has reached a parameter that DDP reduces
        if self.compress is not None:
            self.numerics = "reduced-precision"  # type: ignore[misc, assignment]

    @hookimpl
    def check_recipe(self, recipe: Recipe, plugins: PluginSet) -> None:
        reason = plugins.reasons.get(self.name, "")
        if reason.startswith("on by default"):
            self.log.info("%s, and the recipe lists no strategy. --without ddp leaves it out", reason)

    @hookimpl
    def configure(self) -> dict[str, Any]:
        from accelerate.utils import DistributedDataParallelKwargs

        handler = DistributedDataParallelKwargs(
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
        )
        return {"ddp_handler": handler, **self.timeout_setting()}

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> nn.Module | None:
        from torch import nn

        if self.sync_batch_norm:
            converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
            return converted
        return None

    def prepare(self, run: Run, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        wrapped, optimizer = super().prepare(run, model, optimizer)
        if run.world_size > 1:
            self._wrapped = wrapped  # type: ignore[assignment]
            # not those of an earlier run
            self.frozen = []
            self._reduced_names = []
            reduced: list[nn.Parameter] = []
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    self.frozen.append((name, parameter))
                elif name not in wrapped.parameters_to_ignore:  # type: ignore[operator]
                    self._reduced_names.append(name)
                    reduced.append(parameter)
            self._record_gradients(reduced)
            if not model.state_dict().keys() & dict(model.named_buffers()).keys():
                # training changes no buffer that is not saved
                wrapped.broadcast_buffers = False  # type: ignore[assignment]
            if self.compress is not None:
                compress_gradients(wrapped, self.compress)
        return wrapped, optimizer

    def _record_gradients(self, reduced: list[nn.Parameter]) -> None:
        """Let a backward pass set ``_has_gradient`` if it computes the gradient of a parameter.

        One parameter stands for all of them: DDP reports a pass that reaches others without it. With options that
        permit unused parameters, each one counts.
        """

        def record(*gradients: Any) -> None:
            self._has_gradient = True

        if not self.find_unused_parameters and not self.static_graph:
            reduced = reduced[:1]
        for parameter in reduced:
            # the node that adds to the gradient: a hook of the parameter itself would keep step-graph from recording
            accumulator = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            accumulator.register_hook(record)  # type: ignore[union-attr]  # DDP keeps the node

    def backward(self, run: Run, loss: Tensor) -> None:
        self._has_gradient = False
        super().backward(run, loss)
        self._check_reduction(run)
        if self._wrapped is not None and self._wrapped.require_backward_grad_sync and not self._has_gradient:
            raise detached_loss(run, self.name)

    def _check_reduction(self, run: Run) -> None:
        """Raise if this process has not taken part in the all-reduce of each gradient. Another process may wait for it,
        so this comes before any collective operation: gloo aborts if processes call different ones."""
        if self._wrapped is None:
            return
        try:
            self._wrapped._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            listed = WITHOUT_GRADIENT.search(str(error))
            if listed is None:
                raise
            names = [self._reduced_names[int(index)] for index in listed[1].split()]
            raise PluginError(
                f"the loss does not depend on {by_module(names)} on process {run.rank}. DDP would wait for these "
                "gradients forever.",
                code="unused-parameters",
                place=f"{run.recipe.where}: plugins.ddp: step {run.state.step + 1}",
                remedy="Set plugins.ddp.find_unused_parameters: true, or freeze them.",
            ) from error

    @hookimpl
    def check_run(self, run: Run) -> None:
        if run.world_size == 1:
            self.log.info("one process, so there are no gradients to average")
        elif self.static_graph and run.settings.split_step is not None:
            splitter = run.settings.writers["split_step"]
            raise PluginError(
                f"torch cannot accumulate gradients with it, and {splitter!r} splits each step by the lengths of its "
                "samples.",
                code="static-graph",
                place=f"{run.recipe.where}: plugins.ddp.static_graph",
                remedy="Set it to false.",
            )
        elif self.static_graph and run.loaders.micro_steps > 1:  # else an assertion in torch's reducer fails
            fits = run.recipe.train.batch_size // run.world_size
            raise PluginError(
                f"torch cannot accumulate gradients with it, and each step has {run.loaders.micro_steps} micro-steps.",
                code="static-graph",
                place=f"{run.recipe.where}: plugins.ddp.static_graph",
                remedy=f"Set it to false, or train.micro_batch_size to {fits}.",
            )

    @hookimpl
    def after_backward(self, run: Run) -> None:
        self._check_reduction(run)  # a plugin's train_step may call backward itself
        for name, parameter in self.frozen:
            # not `grad`, which processes disagree about if the loss of one does not depend on the parameter
            if parameter.requires_grad:
                raise PluginError(
                    f"{name} was frozen when the run was built, and is not any more. DDP does not average its "
                    "gradients, so each process would train other weights.",
                    code="unfrozen-parameters",
                    place=f"{run.recipe.where}: plugins.ddp: step {run.state.step + 1}",
                    remedy="Freeze it in before_fit instead, and set plugins.ddp.find_unused_parameters: true.",
                )


def compress_gradients(model: nn.Module, dtype: Literal["bf16", "fp16"]) -> None:
    """Let DDP reduce gradients in a dtype of half the bytes."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

    hook = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}[dtype]

    # torch checks annotations, and rejects its own hook by name on a CPU
    def compress(group, bucket):  # type: ignore[no-untyped-def]
        return hook(group, bucket)

    model.register_comm_hook(None, compress)  # type: ignore[operator]
