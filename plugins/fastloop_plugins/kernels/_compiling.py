"""Compile a module in place, and read torch's counters of compilation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fastloop import PluginError, Problem

if TYPE_CHECKING:
    from torch import nn

    from fastloop_plugins.kernels.compile import Compile

logger = logging.getLogger("fastloop")


METRICS = 4096
"""Compilations of which torch keeps the metrics during a run. Its default of 64 is too few: each recording of a CUDA
graph counts as one, and pushes out the compilations before it."""


def compile_in_place(module: nn.Module, plugin: Compile, any_shape: bool, hooks_outside: bool) -> None:
    """Compile a module's forward with a plugin's options. Its callers and the names of its weights stay the same.

    If compilation fails, ``plugin.failure`` holds the reason, and every module that the plugin compiles runs eagerly.

    Args:
        any_shape: Compile for any size of the module's inputs from the first call on, where torch would first build a
            graph for the sizes of the first batch, and a second one for any.
        hooks_outside: Leave out the hooks of the module itself, such as those that gather its weights: they run before
            and after the compiled code. Otherwise, they are part of it.
    """
    import torch
    from torch._dynamo.exc import TorchDynamoException

    eager: Callable[..., Any] = module.forward if hooks_outside else module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:  # torch compiles no frame of its own, such as _call_impl
        return eager(*args, **kwargs)

    compiled: Callable[..., Any] = torch.compile(
        call, backend=plugin.backend, mode=plugin.used_mode, dynamic=plugin.dynamic, fullgraph=plugin.fullgraph
    )

    def compiled_or_eager(*args: Any, **kwargs: Any) -> Any:
        if plugin.failure is not None:
            return eager(*args, **kwargs)
        if any_shape:
            mark_dynamic((*args, *kwargs.values()))
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:  # errors of the model itself have other types and propagate
            first_paragraph = " ".join(str(error).split("\n\n")[0].split())
            plugin.failure = first_paragraph[:300].rstrip(" .")
            if plugin.on_failure == "error":
                raise PluginError(
                    f"{type(module).__name__} cannot be compiled: {plugin.failure}.",
                    code="compilation-failed",
                    place="plugin 'compile'",
                ) from error
            logger.warning(
                Problem(
                    f"{type(module).__name__} cannot be compiled and runs eagerly: {plugin.failure}.",
                    code="compilation-failed",
                    place="compile",
                )
            )
            return eager(*args, **kwargs)

    if hooks_outside:
        module.forward = compiled_or_eager
    else:
        module._compiled_call_impl = compiled_or_eager


def mark_dynamic(inputs: Iterable[Any]) -> None:
    """Let the compiler treat every size of these tensors as a variable. It makes a constant of a size that the model
    compares with a constant, such as the features of a weight.

    A mark is part of a graph's guards, so tensors of all batches need it.
    """
    import torch

    for value in inputs:
        if isinstance(value, torch.Tensor):
            torch._dynamo.maybe_mark_dynamic(value, tuple(range(value.dim())))


def seconds() -> float:
    """Seconds that this process has spent compiling forward and backward graphs, by torch's counters."""
    from torch._dynamo import utils

    return float(utils.calculate_time_spent().get("total_wall_time", 0.0))


def counts(records: bool) -> dict[str, Any]:
    """Count graphs, recompilations, graph breaks and uses of inductor's cache since torch's counters were cleared.

    Args:
        records: Whether CUDA graphs were to be recorded.
    """
    from torch._dynamo import utils

    graphs = [metric for metric in utils.get_compilation_metrics() if metric.is_forward]
    lines = [metric.recompile_reason.partition("\n")[0] for metric in graphs if metric.recompile_reason]
    reasons = [line.partition(": ")[2] for line in lines]  # without the stack of the code that torch guards
    breaks = dict(utils.counters["graph_break"])
    return {
        "graphs": utils.counters["stats"]["unique_graphs"],
        "recompilations": len(reasons),
        "recompile_reasons": sorted(set(reasons)),
        "graph_breaks": sum(breaks.values()),
        "graph_break_reasons": sorted(breaks),
        # inductor compiles forward and backward of a graph apart
        "cache_hits": utils.counters["inductor"]["fxgraph_cache_hit"],
        "cache_misses": utils.counters["inductor"]["fxgraph_cache_miss"],
        "cuda_graphs_skipped": utils.counters["inductor"]["cudagraph_skips"] if records else None,
    }
