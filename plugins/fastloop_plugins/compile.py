"""Compiles the model with torch.compile: fused kernels instead of one call an operation.

    plugins:
      - compile: {mode: default, pad_to_multiple_of: 64}

Lengths are padded to a multiple, so that the compiler meets few shapes. Compiled code is cached between runs. A model that cannot be
compiled runs eagerly, and one warning says why. Weights keep the names that they have uncompiled. The summary's ``compile`` counts
graphs, graph breaks and recompilations; ``compile_seconds`` is what training steps spent compiling.

``mode: reduce-overhead`` and ``max-autotune`` record CUDA graphs, one a shape: a step is then launched at once instead of kernel by kernel.
They pay for small models and few shapes: ``pad_to_multiple_of``, or ``data.padding: max_length``, and whole batches.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastloop import Batch, DataLoaderDraft, Output, Plugin, PluginError, hookimpl, option
from fastloop_plugins._blocks import transformer_blocks
from fastloop_plugins._cache import user_cache

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run

logger = logging.getLogger("fastloop")


class Compile(Plugin):
    """torch.compile, in place."""

    name = "compile"
    parity = "reassociated"
    runs_after = ("slot:strategy", "lora", "activation-checkpointing")
    configures = "compiles the model"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        backend: Annotated[str, option("A backend of torch.compile (`fastloop doctor` lists them).")] = "inductor"
        mode: Annotated[
            Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"], option("What the compiler optimises for.")
        ] = "default"
        dynamic: Annotated[bool | None, option("Kernels for any shape; null: from the second shape on.")] = None
        fullgraph: Annotated[bool, option("Refuse a model whose graph breaks.")] = False
        regional: Annotated[bool, option("Compile the repeated blocks only: far less to compile, nearly as fast.")] = False
        recompile_limit: Annotated[int, option("Graphs of one function before it runs eagerly.", ge=1)] = 16
        pad_to_multiple_of: Annotated[int | None, option("Pad lengths to a multiple of this; null: leave them.", ge=1)] = 64
        cache: Annotated[bool, option("Keep compiled code in the user's cache folder for later runs.")] = True
        on_failure: Annotated[Literal["eager", "error"], option("What to do with a model that cannot be compiled.")] = "eager"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.failure: str | None = None
        self.while_evaluating = 0.0
        self.records = False

    @hookimpl
    def configure_dataloader(self, draft: DataLoaderDraft) -> None:
        if self.config.pad_to_multiple_of is not None:
            draft.pad_to_multiple_of = self.config.pad_to_multiple_of

    @hookimpl
    def after_prepare(self, run: Run) -> None:
        import torch
        from torch._dynamo import config as dynamo
        from torch._dynamo import list_backends, utils
        from torch._functorch import config as functorch

        if self.config.backend not in (known := list_backends(exclude_tags=())):
            raise PluginError(f"plugins.compile.backend: torch has no {self.config.backend!r}. Expected one of: {', '.join(known)}.")
        torch._dynamo.reset()  # an earlier run of this process must not count towards the limit
        utils.counters.clear()
        utils.clear_compilation_metrics()
        dynamo.recompile_limit = self.config.recompile_limit
        functorch.force_non_lazy_backward_lowering = True  # a backward that cannot be compiled is met in the forward, where it is caught
        if self.config.cache:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache("compiled")))
        torch._inductor.config.fx_graph_cache = self.config.cache
        wanted = self.config.mode in ("reduce-overhead", "max-autotune")
        self.records = wanted and self.config.backend == "inductor" and run.device.type == "cuda"
        if wanted and not self.records:
            logger.warning("compile: mode %s: CUDA graphs are inductor's, for CUDA: none is recorded", self.config.mode)
        self.before = self._seconds()
        for module in self._targets(run.unwrapped()):  # inside what a strategy put around it, which no graph can hold
            self._compile(module)

    @hookimpl
    def before_step(self, run: Run, batches: list[Batch]) -> None:
        """Gradients that micro-steps add up must not lie in a graph's memory, which the next replay writes to."""
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

        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call] # what the last micro-step returned is done with
        output = yield
        predictions = output.predictions
        return Output(output.loss.clone(), None if predictions is None else predictions.clone(), output.targets)  # these may be kept

    @hookimpl(wrapper=True)
    def evaluate(self) -> Generator[None, Any, Any]:
        before = self._seconds()
        try:
            return (yield)
        finally:
            self.while_evaluating += self._seconds() - before

    @hookimpl
    def write_summary(self, summary: dict[str, Any]) -> None:
        from torch._dynamo import utils

        graphs = [metric for metric in utils.get_compilation_metrics() if metric.is_forward]
        reasons = [metric.recompile_reason.partition(": ")[2] for metric in graphs if metric.recompile_reason]
        breaks = dict(utils.counters["graph_break"])
        summary["compile_seconds"] = self._seconds() - self.before - self.while_evaluating
        summary["compile"] = {
            "graphs": utils.counters["stats"]["unique_graphs"],
            "recompilations": len(reasons),
            "recompile_reasons": sorted(set(reasons)),
            "graph_breaks": sum(breaks.values()),
            "graph_break_reasons": sorted(breaks),
            "evaluate_seconds": self.while_evaluating,
            "cuda_graphs_skipped": utils.counters["inductor"]["cudagraph_skips"] if self.records else None,
            "failure": self.failure,
        }
        if skipped := summary["compile"]["cuda_graphs_skipped"]:
            logger.warning("compile: %d graphs could not be recorded as CUDA graphs (TORCH_LOGS=cudagraphs says why)", skipped)
        if len(reasons) >= self.config.recompile_limit:
            logger.warning("compile: %d recompilations: shapes vary too much. Raise pad_to_multiple_of or set dynamic: true.", len(reasons))

    @staticmethod
    def _seconds() -> float:
        """Seconds that this process has spent compiling, forward and backward, as torch counts them."""
        from torch._dynamo import utils

        return float(utils.calculate_time_spent().get("total_wall_time", 0.0))

    def _targets(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model, or its repeated blocks."""
        if not self.config.regional:
            yield model
            return
        blocks = transformer_blocks(model)
        if not blocks:
            logger.warning("compile: regional: %s has no list of like blocks: the whole model is compiled", type(model).__name__)
        yield from blocks or [model]

    def _compile(self, module: nn.Module) -> None:
        """Compile a module in place: what calls it does not change, nor do the names of its weights."""
        import torch
        from torch._dynamo.exc import TorchDynamoException

        eager: Callable[..., Any] = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:  # a frame of our own: torch skips frames that are torch's, as _call_impl is
            return eager(*args, **kwargs)

        compiled: Callable[..., Any] = torch.compile(
            call, backend=self.config.backend, mode=self.config.mode, dynamic=self.config.dynamic, fullgraph=self.config.fullgraph
        )

        def compiled_or_eager(*args: Any, **kwargs: Any) -> Any:
            if self.failure is not None:
                return eager(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except TorchDynamoException as error:  # the model's own errors are of other types, and go on to the caller
                self.failure = " ".join(str(error).split("\n\n")[0].split())[:300]
                if self.config.on_failure == "error":
                    raise PluginError(f"plugin 'compile': {type(module).__name__} cannot be compiled: {self.failure}") from error
                logger.warning("compile: %s cannot be compiled and runs eagerly: %s", type(module).__name__, self.failure)
                return eager(*args, **kwargs)

        module._compiled_call_impl = compiled_or_eager
