"""Tries the task's metrics on a batch before training, and explains their failures.

    plugins:
      - metric-check

Before the first step, every metric is updated once with the first batch of each evaluated split, and reset. An error
names the metric, the split, and the shapes and dtypes of the metric's arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from itertools import islice
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, Problem, UsageError, hookimpl
from fastloop.errors import MetricError

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.data import Loader
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")


class MetricCheck(Plugin):
    """Tries the metrics on a batch before training.

    Refuses those that do not fit the task's predictions and targets.
    """

    name = "metric-check"
    numerics = "bitwise"
    for_inference = True

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str:
        return "every run checks its metrics"

    @hookimpl(trylast=True)  # after plugins that prepare the run in this hook
    def before_fit(self, run: Run) -> None:
        if run.metrics is None:
            return
        from fastloop.runtime.random_states import preserve_random_states

        with run.clock("startup"):
            for split, loader in run.eval_loaders.items():
                if loader.sampler is None:
                    continue
                with preserve_random_states(own=run.loaders.own_generators):
                    problems = run.processes.all_gather_object(try_batch(run, split, loader))
                for problem in problems:
                    if problem is not None:
                        raise UsageError(problem, code="metric-failed")

    @hookimpl(wrapper=True, trylast=True)
    def evaluate(self, run: Run, split: str) -> Generator[None, Any, Any]:
        try:
            return (yield)
        except MetricError as error:
            from fastloop_plugins.guards._metric_problems import explain_error

            raise UsageError(explain_error(run, split, error), code="metric-failed") from error.__cause__


def try_batch(run: Run, split: str, loader: Loader) -> str | None:
    """Evaluate one batch. Returns the first problem, or None."""
    import torch

    from fastloop.evaluation_results import evaluating
    from fastloop.probing import probing, reshard
    from fastloop_plugins.guards._metric_problems import find_problem
    from fastloop_plugins.memory._out_of_memory import is_out_of_memory

    try:
        with probing(run.unwrap_model()), evaluating(run.model), run.scalars.paused():
            first_batches = list(islice(loader.batches(), 1))
            [[batch]] = run.to_device([first_batches])
            output = run.hooks.compute_loss(run=run, model=run.model, batch=batch.inputs)
            return find_problem(run, split, output) if batch.samples else None
    except Exception as error:
        # of several processes, the others may wait in a collective operation of the model
        if run.world_size > 1 or not is_out_of_memory(error):
            raise
        logger.warning(
            Problem(f"a batch of {split} does not fit into memory: its metrics were not tried.", code="out-of-memory")
        )
        return None
    finally:
        if torch.distributed.is_initialized():  # also with one process, which fsdp shards over, too
            reshard(run.model)
