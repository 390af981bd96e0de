"""Shards the optimizer state, gradients and weights over the processes with DeepSpeed ZeRO.

    plugins:
      - deepspeed: {stage: 2}

Stage 1 shards the optimizer state, stage 2 also the gradients, stage 3 also the weights. With ``amp`` in bf16, the
weights stay in fp32. Every process builds the full model on its CPU first. A checkpoint resumes on any number of
processes, under another stage or strategy.

``config`` names a JSON file of DeepSpeed's own options. The recipe supplies values that are missing or "auto"; a
contradiction is an error. ``"bf16": {"enabled": true}`` in it keeps the weights in bf16 with a sharded copy in fp32, as
fp16 always does. Parameters without dimensions are refused: give them the shape (1,). Under ``accelerate launch``, the
recipe takes over the settings of ``deepspeed_config`` that it leaves open: ``zero_stage``, ``gradient_clipping``, the
devices of offload, and ``deepspeed_config_file``. Others are refused.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Package, PluginError, hookimpl, option
from fastloop_plugins.strategies._deepspeed_config import Configuration
from fastloop_plugins.strategies._gradients import detached_loss
from fastloop_plugins.strategies._timeout import TimedStrategy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fastloop import Layout, MemoryEstimate, Run
    from fastloop.recipe import Recipe
    from fastloop_plugins.strategies._deepspeed_gradients import Reduction
    from fastloop_plugins.strategies._deepspeed_state import Sharded
    from fastloop_plugins.strategies._module_order import ModuleOrder


class DeepSpeed(TimedStrategy):
    """Shards optimizer state, gradients and weights over the processes.

    ``deepspeed.initialize`` divides them. The loop still controls steps, accumulation and the learning rate.
    """

    name = "deepspeed"
    sets_precision = True  # the engine casts weights and inputs
    gathers_weights = True
    forwards_together = True
    keeps_weights_equal = False  # stage 3 divides them
    numerics = "reassociated"
    requirements = (Package("deepspeed", ">=0.19", extra="deepspeed"),)

    stage: Literal[0, 1, 2, 3] | None = option("ZeRO stage; null: the JSON's, else 2.", default=None)
    offload_optimizer: bool | None = option(
        "Keep the optimizer state in the host's memory and step there (stages 1 to 3); null: as the JSON.",
        default=None,
    )
    offload_parameters: bool | None = option(
        "Keep the weights in the host's memory (stage 3); null: as the JSON.", default=None
    )
    overlap_comm: bool | None = option(
        "Overlap the reduction of gradients with backward; null: DeepSpeed's default.", default=None
    )
    bucket_size: int | None = option(
        "Gradient elements reduced at once; null: DeepSpeed's default.", default=None, ge=1
    )
    config: str | None = option("A JSON file of DeepSpeed's own options.", default=None)

    configuration: Configuration  # from check_recipe on
    sharded: Sharded  # this and the next attributes: from prepare on
    reduction: Reduction
    engine: Any

    @classmethod
    def estimate_memory(cls, layout: Layout) -> Iterator[MemoryEstimate]:
        from fastloop_plugins.strategies import _memory_zero

        return _memory_zero.estimate(layout)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order: ModuleOrder | None = None  # below stage 3

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        self.configuration = Configuration(recipe, self)

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return self.timeout_setting()

    def prepare(self, run: Run, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        import torch

        from fastloop.optimizers.several import Optimizers
        from fastloop_plugins.strategies._deepspeed_gradients import Reduction, exclude_hooks, order_modules
        from fastloop_plugins.strategies._deepspeed_state import (
            LossScale,
            Sharded,
            Stepper,
            cast_inputs,
            cast_outputs,
            imported,
        )
        from fastloop_plugins.strategies._sharded_parameters import refuse_scalars

        if isinstance(optimizer, Optimizers):
            names = ", ".join(map(repr, optimizer.members))
            problem = f"build_optimizer returned several optimizers, {names}, and DeepSpeed steps one. Use ddp or fsdp."
            raise PluginError(problem, code="unsupported-model", place=f"{run.recipe.where}: plugins.deepspeed")
        refuse_scalars(model, f"{run.recipe.where}: plugins.deepspeed")  # DeepSpeed cannot exchange them
        if not all(group["params"] for group in optimizer.param_groups):
            raise PluginError(
                "the optimizer has a parameter group without parameters.",
                code="empty-group",
                place="plugins.deepspeed",
                remedy="Leave it out of build_optimizer.",
            )
        config = self.configuration.build(run, model)
        stage = self.configuration.stage
        if not torch.distributed.is_initialized() and "LOCAL_RANK" not in os.environ:
            raise PluginError(
                "needs a launcher, for one process too.",
                code="no-launcher",
                place="plugins.deepspeed",
                remedy="Start it with a launcher:",
                command="fastloop train RECIPE --nproc 1",
            )
        deepspeed = imported(run.device.type)
        self.sharded = Sharded(optimizer)
        try:
            with warnings.catch_warnings():
                # raised by its modules
                warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", category=DeprecationWarning)
                engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        except (ValueError, AssertionError, deepspeed.DeepSpeedConfigError) as error:
            raise PluginError(
                f"DeepSpeed refuses this: {' '.join(str(error).split())}",
                code="invalid-value",
                place=str(self.configuration.file),
            ) from error
        self.sharded.taken(run, engine, stage, self.configuration.half)
        self.reduction = Reduction(run, engine, stage)
        if stage == 3 and run.world_size > 1:
            self.order = order_modules(run, engine.module)
        engine.set_gradient_accumulation_boundary(True)
        engine.no_sync = self.no_sync
        if self.configuration.half:
            cast_inputs(engine)
        if run.accelerator.mixed_precision != "no":
            cast_outputs(engine)
        if "compile" in run.plugins.names():
            exclude_hooks(engine.module)
        if run.accelerator.scaler is not None:
            run.accelerator.scaler = LossScale(engine.optimizer.loss_scaler)
        self.engine: Any = engine
        return engine, Stepper(self.sharded)

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Generator[None, Any, Any]:
        if self.order is not None:
            self.order.restart()
        return (yield)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """The engine's ``no_sync``: suppress the reduction in all micro-steps but the last. DeepSpeed's own one rejects
        stages 2 and 3, which reduce in each."""
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

    @hookimpl
    def check_run(self, run: Run) -> None:
        self.configuration.check_others(run)

    def backward(self, run: Run, loss: Tensor) -> None:
        if self.sharded.has_gradients and self.configuration.stage in (1, 2):
            raise PluginError(
                f"{self.configuration.stage} keeps only the gradients of the last run.accumulate_gradients, and a "
                "plugin's train_step adds those of two.",
                code="unsupported-stage",
                place="plugins.deepspeed.stage",
                remedy="Use stage 0 or 3, or call run.optimizer.zero_grad() in between to replace them.",
            )
        # The loop has weighted the loss, and fp16 scaling is DeepSpeed's. Stage 0 would divide a tensor that the model
        # itself returned.
        gradients = self.reduction.gradients
        gradients.has_any = False
        self.reduction.begin()
        try:
            self.engine.backward(loss.clone(), scale_wrt_gas=False)
        except IndexError as error:  # stages 1 and 2 need a gradient; the others reduce zeros
            if gradients.has_any:
                raise
            raise detached_loss(run, self.name) from error
        gradients.attach()
        self.sharded.has_gradients = self.engine.is_gradient_accumulation_boundary()

    @hookimpl(tryfirst=True)  # before plugins that read gradients
    def after_backward(self) -> None:
        unused = self.reduction.gradients.take_unused()
        if self.sharded.slices is not None:
            self.sharded.slices.leave_out(unused)
            return
        for parameter in unused:
            parameter.grad = None

    def gradient_norm(self, run: Run) -> Tensor:
        """The norm of ZeRO's shards (stages 1 to 3), or of whole gradients (stage 0)."""
        from fastloop.distributed.tensors import total_norm
        from fastloop_plugins.strategies._deepspeed_gradients import zero_norm

        zero = self.sharded.zero
        if zero is None:
            return total_norm(parameter.grad for parameter in run.model.parameters() if parameter.grad is not None)
        return zero_norm(zero, self.configuration.stage, run.device)

    def clip_gradients(self, run: Run, max_norm: float) -> Tensor:
        """Clip whole gradients (stage 0). ZeRO itself clips its shards, inside its step: ``Configuration.build`` has
        set its ``gradient_clipping`` to ``max_norm``."""
        import torch

        if self.sharded.zero is None:
            return torch.nn.utils.clip_grad_norm_(run.model.parameters(), max_norm)
        return self.gradient_norm(run)

    def model_state(self, run: Run) -> dict[str, Any]:
        return self.sharded.model_state(run)

    def load_model_state(self, run: Run, state: Mapping[str, Tensor]) -> None:
        self.sharded.load_model_state(run, state)

    def optimizer_state(self, run: Run) -> dict[str, Any]:
        return self.sharded.optimizer_state(run)

    def load_optimizer_state(self, run: Run, state: dict[str, Any]) -> None:
        self.sharded.load_optimizer_state(run, state)
