"""Compiles the model with torch.compile.

    plugins:
      - compile: {mode: default}

Lengths are padded to ``data.pad_to_multiple_of``, by default 64. If lengths vary, one graph trains with all of them,
and one evaluates. A model that cannot be compiled runs eagerly, with one warning.

Compiled code stays in ``~/.cache/fastloop/compiled``, or in the folder that ``TORCHINDUCTOR_CACHE_DIR`` names. A second
machine of the same kind starts warm with a copy of that folder. It holds code, so copy only your own. ``compile`` in
summary.json counts ``cache_hits`` and ``cache_misses``.

With ``regional``, each repeated block is compiled alone: far less to compile, nearly as fast. Under `fsdp`, each module
that is sharded is compiled alone, with and without ``regional``: its weights are gathered outside of the compiled code.

``mode: reduce-overhead`` and ``max-autotune`` record one CUDA graph for each shape, which speeds up small models with
few shapes: ``data.padding: max_length``, and whole batches. Under `fsdp` and `deepspeed` none is recorded: gathered
weights move in memory. ``.item()`` in the forward breaks a graph, unless ``capture_scalars`` is set.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from fastloop import (
    Batch,
    Output,
    Plugin,
    PluginError,
    Problem,
    Recommendation,
    SpeedupEstimate,
    hookimpl,
    option,
)
from fastloop.problem import counted
from fastloop_plugins._cache import private_cache
from fastloop_plugins._listed_strategy import gathers_weights
from fastloop_plugins._task_traits import recipe_traits
from fastloop_plugins.data._padding_multiples import MULTIPLE, SHAPES
from fastloop_plugins.kernels._compiling import METRICS, compile_in_place, counts, seconds
from fastloop_plugins.models.blocks import transformer_blocks

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run, Settings
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine
    from fastloop.speedup_estimates import StepProfile


FUSED = 0.5
"""For estimates: the share of the fusible time that fusion saves."""
SECONDS_A_CALL = 0.02
"""For estimates: the seconds to compile each call of an operation in a step."""
WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""The modes that record CUDA graphs -> the same mode without them."""
SHAPES_TO_RECORD = 2 * SHAPES
"""Shapes of a graph for which torch records CUDA graphs without a warning: the widths of whole and of short batches.
Its own limit is 8."""


class Compile(Plugin):
    """Compiles the model, or its repeated blocks, in place."""

    name = "compile"
    numerics = "reassociated"
    runs_after = ("slot:strategy", "lora", "activation-checkpointing")
    for_inference = True
    recordable = True

    backend: str = option("A backend of torch.compile (`fastloop doctor` lists them).", default="inductor")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = option(
        "Mode of torch.compile.", default="default"
    )
    dynamic: bool | None = option(
        "Kernels for any shape; null: from the first batch on if lengths vary, else from the second shape on.",
        default=None,
    )
    fullgraph: bool = option("Refuse a model whose graph breaks.", default=False)
    regional: bool = option(
        "Compile the repeated blocks only; under fsdp, the sharded modules are compiled either way.", default=False
    )
    capture_scalars: bool = option(
        "Keep numbers that a model reads off tensors (`.item()`) in the graph.", default=False
    )
    recompile_limit: int = option("Graphs of one function before it runs eagerly.", default=16, ge=1)
    cache: bool = option("Keep compiled code in the user's cache folder for later runs.", default=True)
    on_failure: Literal["eager", "error"] = option("What to do with a model that cannot be compiled.", default="eager")

    seconds_before: float  # of compiling in this process before the run; from after_prepare on

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """For training on CUDA. With few shapes, it records CUDA graphs, unless weights are gathered. Most predictions
        take less than compiling."""
        if machine.device != "cuda" or recipe.inference is not None:
            return None
        if recipe.has_plugin("step-graph"):
            return Recommendation(why="fused kernels; step-graph records whole steps")
        if gathers_weights(recipe):
            return Recommendation(why="fused kernels; no CUDA graphs, since weights are gathered anew in each step")
        grouped = any(recipe.has_plugin(name) for name in ("length-bucketing", "packing"))
        if grouped or "fixed-length" in recipe_traits(recipe):
            return Recommendation(
                why="CUDA graphs for the few shapes of the batches", options={"mode": "reduce-overhead"}
            )
        return Recommendation(why="fused kernels")

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        """Fusion saves about half the time of everything but matrix products and attention, launch overhead
        included."""
        listed = recipe.plugins.get(cls.name)
        graph_break = None  # where the model reads a number from a tensor
        for candidate in profile.graph_breaks:
            if "capture_scalar_outputs" in candidate["reason"]:
                graph_break = candidate
                break
        if listed and listed.get("capture_scalars"):
            return None
        if listed is not None and graph_break is None:
            return None
        not_fusible = []  # beside matrix products
        for name in profile.operations:
            if "attention" in name or name.startswith("fastloop::"):
                not_fusible.append(name)
        fused = sum(profile.operations.values()) - profile.multiplying() - profile.spent(not_fusible)
        fused += profile.region("launch")
        calls = sum(profile.counts.values())
        why = f"{fused / profile.seconds:.0%} of a step is fusible operations, in {calls:,.0f} calls."
        if graph_break is not None:
            why = f"The graph breaks at {graph_break['where']}, which reads a number from a tensor. {why}"
        options = {} if graph_break is None else {"capture_scalars": True}
        return SpeedupEstimate(seconds=FUSED * fused, why=why, options=options, once=SECONDS_A_CALL * calls)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.failure: str | None = None
        self.used_mode: str = self.mode  # without CUDA graphs where none can be recorded
        self.while_evaluating = 0.0
        self.records = False
        self.settings = ExitStack()  # torch's settings, patched for the duration of the run

    @hookimpl
    def configure(self, settings: Settings) -> dict[str, Any]:
        return {"pad_to_multiple_of": MULTIPLE} if settings.pad_to_multiple_of is None else {}

    @hookimpl
    def after_prepare(self, run: Run) -> None:
        self._set_up_torch()
        self._choose_mode(run)
        self.seconds_before = seconds()
        model = run.unwrap_model()  # inside the strategy's wrapper, which cannot be compiled
        shards = sharded_modules(model)
        targets = shards or self._targets(model)
        # a block takes tensors whose last size is constant, and compiles fast
        whole_model = targets == [model]
        any_shape = self.dynamic is None and whole_model and "padded" in recipe_traits(run.recipe)
        for module in targets:
            compile_in_place(module, self, any_shape, hooks_outside=bool(shards))

    def _set_up_torch(self) -> None:
        """Patch torch's settings for the duration of the run.

        Raises:
            PluginError: Torch has no such backend.
        """
        import torch
        from torch._dynamo import config as dynamo
        from torch._dynamo import list_backends, utils
        from torch._functorch import config as functorch

        known = list_backends(exclude_tags=())
        if self.backend not in known:
            raise PluginError(
                f"torch has no {self.backend!r}.",
                code="unknown-choice",
                place="plugins.compile.backend",
                expected=f"one of: {', '.join(known)}",
            )
        torch._dynamo.reset()  # earlier runs in this process must not count towards the limit
        utils.counters.clear()
        utils.clear_compilation_metrics()
        utils.set_compilation_metrics_limit(METRICS)
        self.settings.callback(utils.set_compilation_metrics_limit, utils.DEFAULT_COMPILATION_METRICS_LIMIT)
        set_here = self.settings.enter_context
        limit = self.recompile_limit
        set_here(dynamo.patch(recompile_limit=limit, capture_scalar_outputs=self.capture_scalars))
        set_here(dynamo.patch(reorderable_logging_functions={*dynamo.reorderable_logging_functions, print}))
        # report failures in the forward, where they are caught
        set_here(functorch.patch(force_non_lazy_backward_lowering=True))
        set_here(torch._inductor.config.patch(fx_graph_cache=self.cache))
        set_here(torch._inductor.config.patch({"triton.cudagraph_dynamic_shape_warn_limit": SHAPES_TO_RECORD}))
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # torch sets this variable itself
            self.settings.callback(os.environ.pop, "TORCHINDUCTOR_CACHE_DIR", None)
        if self.cache:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(private_cache("compiled")))

    def _choose_mode(self, run: Run) -> None:
        """Set the mode, which is without CUDA graphs where none can be recorded."""
        self.used_mode = self.mode
        self.records = False
        wanted = self.mode in WITHOUT_GRAPHS
        if wanted and run.strategy.gathers_weights:
            self.used_mode = WITHOUT_GRAPHS[self.mode]
            self.log.warning(
                Problem(
                    f"CUDA graphs need weights that stay in place, and {run.strategy.name} gathers them anew "
                    "in each step: none is recorded.",
                    code="no-cuda-graphs",
                    place=f"mode {self.mode}",
                )
            )
        elif wanted and (self.backend != "inductor" or run.device.type != "cuda"):
            self.log.warning(
                Problem(
                    "CUDA graphs need the inductor backend and a CUDA device: none is recorded.",
                    code="no-cuda-graphs",
                    place=f"mode {self.mode}",
                )
            )
        elif wanted:
            self.records = True

    @hookimpl
    def before_step(self, run: Run, batches: list[Batch]) -> None:
        """Allocate gradients for accumulation outside of the graph's memory pool, which the next replay overwrites."""
        if self.records and len(batches) > 1:
            import torch

            for parameter in run.model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Generator[None, Output, Output]:
        if not self.records:
            return (yield)
        import torch

        # outputs of the last micro-step are no longer used
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        output = yield
        predictions = output.predictions
        # callers may keep these
        return Output(output.loss.clone(), None if predictions is None else predictions.clone(), output.targets)

    @hookimpl(wrapper=True)
    def evaluate(self) -> Generator[None, Any, Any]:
        before = seconds()
        try:
            return (yield)
        finally:
            self.while_evaluating += seconds() - before

    @hookimpl
    def write_summary(self, summary: dict[str, Any]) -> None:
        summary["compile_seconds"] = seconds() - self.seconds_before - self.while_evaluating
        totals = counts(self.records)
        summary["compile"] = {**totals, "evaluate_seconds": self.while_evaluating, "failure": self.failure}
        skipped = totals["cuda_graphs_skipped"]
        if skipped:
            self.log.warning(
                Problem(
                    f"{counted(skipped, 'graph')} could not be recorded as CUDA graphs (TORCH_LOGS=cudagraphs shows "
                    "why).",
                    code="no-cuda-graphs",
                )
            )
        again = totals["recompilations"]
        # with a limit of 3, a function has its first graph and 2 recompilations before it runs eagerly
        if again > 0 and again >= self.recompile_limit - 1:
            self.log.warning(
                Problem(
                    f"{counted(again, 'recompilation')}: shapes vary too much. Above "
                    f"{counted(self.recompile_limit, 'graph')} of a function, it runs eagerly for other shapes.",
                    code="many-recompilations",
                    remedy=(
                        "Raise data.pad_to_multiple_of, set plugins.compile.dynamic=true, or raise "
                        "plugins.compile.recompile_limit."
                    ),
                )
            )

    @hookimpl
    def teardown(self) -> None:
        self.settings.close()

    def _targets(self, model: nn.Module) -> list[nn.Module]:
        """The modules to compile: the model, or its repeated blocks."""
        if not self.regional:
            return [model]
        blocks = transformer_blocks(model)
        if not blocks:
            self.log.warning(
                Problem(
                    f"{type(model).__name__} has no list of repeated blocks: the full model is compiled.",
                    code="no-blocks",
                    place="regional",
                )
            )
        return blocks or [model]


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that torch's ``fully_shard`` shards, to compile one by one. A module that contains another one is
    left out: gathering the weights of the inner one would break its graph."""
    import torch

    if not torch.distributed.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    shards: set[nn.Module] = {module for module in model.modules() if isinstance(module, FSDPModule)}
    innermost = []
    for module in model.modules():
        if module in shards and shards.intersection(module.modules()) == {module}:
            innermost.append(module)
    return innermost
