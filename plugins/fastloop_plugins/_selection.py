"""Build a run with plugins that another plugin, such as ``auto``, selected; leave out those that fail with its model.

A selected plugin leaves the run if one of its hooks raises while the run is built, or if a trial step fails with it and
succeeds without it. So a recipe that trains without the selection trains with it. Plugins that a recipe lists, and
strategies, are never left out.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fastloop.data import Loader
from fastloop.data.datasets import Filler
from fastloop.errors import PluginCrash
from fastloop.estimates import Recommendation
from fastloop.evaluation_results import evaluating
from fastloop.plugins.plugin import Numerics, Plugin
from fastloop.plugins.resolve import ResolvedRecipe, resolve
from fastloop.probing import remember
from fastloop.recipe import Recipe
from fastloop.run import Run
from fastloop.runtime import hardware
from fastloop.runtime.hardware import Machine
from fastloop_plugins.auto import recommend_beside

log = logging.getLogger("fastloop")

SAMPLES = 2
"""Samples of a trial: the fewest with which batch norm can train."""
ACTING = {
    "build_collator",
    "build_model",
    "before_prepare",
    "after_prepare",
    "compute_loss",
}
"""Hooks that change what a step computes."""


class SelectedBuild:
    """The builds of a run with selected plugins. The arguments are those of ``Plugin.build_selected``.

    Each build has a recipe of its own, and new plugin objects, except of those that are given in Python.
    """

    def __init__(self, resolved: ResolvedRecipe, build: Callable[[Run], Run]) -> None:
        self.resolved, self.recipe, self.build = resolved, resolved.recipe, build
        self.listed, self.selected = resolved.recipe.plugins, resolved.recipe.selected

    def run(self) -> Run:
        """Build the run, and try a step if a selected plugin changes what it computes.

        Raises:
            FastloopError: The recipe is wrong, or a plugin that is not selected failed.
        """
        run, out = self._build(Run(self.recipe, self.resolved.plugins), {})
        suspects = self._suspects(run)
        if not suspects or (problem := try_step(run)) is None:
            return self._finish(run, out)
        whole, bare = out, out | dict.fromkeys(suspects, problem)
        run, out = self._rebuild(run, bare)
        if try_step(run) is not None:  # the selection is not the cause
            return self._finish(*self._rebuild(run, whole))
        if len(suspects) > 1:
            for name in suspects:
                run, out = self._rebuild(run, whole | {name: problem})
                if try_step(run) is None:
                    break
            else:
                run, out = self._rebuild(run, bare)
        return self._finish(run, out)

    def _suspects(self, run: Run) -> list[str]:
        """The selected plugins that change what a step computes, those with the largest effect on the numbers first."""
        manager, effects = run.plugins.manager, get_args(Numerics)
        found = [
            plugin
            for plugin in reversed(run.plugins.plugins)
            if self._is_selected(plugin) and plugin.numerics != "bitwise"
        ]
        found = [
            plugin
            for plugin in found
            if ACTING & {hook for _, hook in manager.implementations(plugin)}
            or run.settings.writers.get("mixed_precision") == plugin.name
        ]
        return [plugin.name for plugin in sorted(found, key=lambda plugin: -effects.index(plugin.numerics))]

    def _is_selected(self, plugin: Plugin) -> bool:
        return plugin.name in self.selected and plugin.slot != "strategy"  # several processes need theirs

    def _rebuild(self, run: Run, out: dict[str, str]) -> tuple[Run, dict[str, str]]:
        """Build a run instead of another one."""
        discard(run)
        return self._build(self._new(out), out)

    def _build(self, run: Run, out: dict[str, str]) -> tuple[Run, dict[str, str]]:
        """Build a run, and instead of it one without the selected plugins whose hooks raise. Every process must call
        it.

        Args:
            out: Plugin -> why it is left out.

        Returns:
            The run, and ``out`` with the plugins whose hooks raised.
        """
        while True:
            failed = None
            try:
                self.build(run)
            except Exception as error:
                if (failed := self._blame(run, error)) is None:
                    raise
            with run.processes.explain_lost_connection():
                answers = run.processes.all_gather_object(failed)
            if not any(answers):
                return run, out
            discard(run, is_torn_down=failed is not None)
            out = out | dict([next(filter(None, answers))])
            run = self._new(out)

    def _new(self, out: Collection[str]) -> Run:
        """A run without some of the selected plugins, not built yet."""
        plugins = {name: options for name, options in self.listed.items() if name not in out}
        selected = {name: why for name, why in self.selected.items() if name not in out}
        recipe = dataclasses.replace(self.recipe, plugins=plugins, selected=selected)
        for name, again in dependents(recipe, self.listed, hardware.this_machine(recipe.train.device)).items():
            if again is None:
                del plugins[name], selected[name]
            else:
                plugins[name] = dict(again.options)
        before = self.resolved.plugins
        given = [plugin for plugin in before if before.reasons.get(plugin.name) == "given in Python"]
        resolved = resolve(recipe, objects=given, any_machine=True)
        # without a plugin, others may have another place
        order = dict.fromkeys([*before.names(), *resolved.plugins.names()])
        resolved = resolved.with_only(order).with_extra(
            plugin for plugin in before if plugin.name not in before.reasons
        )
        return Run(resolved.recipe, resolved.plugins)

    def _blame(self, run: Run, error: Exception) -> tuple[str, str] | None:
        """The selected plugin whose hook raised an error, and the error in one line; None for any other error."""
        failure = run.plugins.manager.failure
        recorded = failure[1].name if failure is not None and failure[0] is error else ""
        name = error.plugin if isinstance(error, PluginCrash) else recorded
        plugin = next((plugin for plugin in run.plugins if plugin.name == name), None)
        if plugin is None or not self._is_selected(plugin):
            return None
        return name, str(error).partition("\n")[0].removeprefix(f"{self.recipe.where}: plugins.{name}: ")

    def _finish(self, run: Run, out: dict[str, str]) -> Run:
        for name, reason in out.items():
            selector, model = self.selected[name].partition(":")[0], type(run.unwrap_model()).__name__
            log.warning("%s: leaves out %s: %s", selector, name, reason if model in reason else f"{model}: {reason}")
        return run


def discard(run: Run, is_torn_down: bool = False) -> None:
    """Tear down a run, and free its model: two may not fit into memory."""
    for _, call in [] if is_torn_down else run.plugins.each("teardown"):
        call(run=run)
    vars(run).clear()  # callers still hold it
    gc.collect()


def dependents(recipe: Recipe, before: Mapping[str, Any], machine: Machine) -> dict[str, Recommendation | None]:
    """The selected plugins whose recommendation is another one beside the plugins ``before`` than beside the fewer ones
    of the recipe.

    Returns:
        Plugin -> its recommendation now; None: it has none any more.
    """
    full = dataclasses.replace(recipe, plugins=dict(before))
    pairs = {
        name: (recommend_beside(full, name, machine), recommend_beside(recipe, name, machine))
        for name in recipe.selected
    }
    return {
        name: now
        for name, (then, now) in pairs.items()
        if then is not None and (now is None or now.options != then.options)
    }


def try_step(run: Run) -> str | None:
    """Compute the loss of ``SAMPLES`` samples, and its gradients, as a training step would. Without training, evaluate
    or predict them. Every process must call it.

    It changes no weight, gradient or buffer. The caller restores the random states. There is no trial for weights that
    processes share, for an iterable dataset that may not give its samples again, nor for prompts, whose continuation
    takes long.

    Returns:
        The first error of any process, in one line. None: there was no trial or no error, or the trial cannot show its
        cause: the device has too little memory, or a plugin failed that is neither the task nor selected.
    """
    problem = _compute(run) if _has_whole_weights(run) else None
    return next(filter(None, run.processes.all_gather_object(problem)), None)


def _has_whole_weights(run: Run) -> bool:
    """Whether this process can compute with the model alone: no strategy wraps it, except DDP, or shards its
    weights."""
    wrapped = run.model is not run.unwrap_model() and not isinstance(run.model, nn.parallel.DistributedDataParallel)
    return not wrapped and not any(
        weight.is_meta or isinstance(weight, DTensor) for weight in run.unwrap_model().parameters()
    )


def _compute(run: Run) -> str | None:
    """``try_step`` on this process."""
    inference, model, plugins = run.recipe.inference, run.unwrap_model(), run.plugins
    loader = run.train_loader if inference is None else run.eval_loaders[inference.split]
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        samples = _samples(run, loader)
    except Exception:  # training reports it
        return None
    if not samples or getattr(run.loaders.collators[run.loaders.first], "generates", False):
        return None
    restore = remember(model)
    try:
        with run.scalars.paused(), eager:
            ((batch,),) = run.to_device([[loader.loader.collate_fn(samples)]])
            if inference is None:
                loss = run.hooks.compute_loss(run=run, model=model, batch=batch.inputs).loss
                torch.autograd.grad(
                    loss, [weight for weight in model.parameters() if weight.requires_grad], allow_unused=True
                )
            with evaluating(model), torch.no_grad():  # some models compute otherwise in eval mode
                if inference is not None and inference.chunk:
                    run.hooks.predict(run=run, batch=batch.inputs)
                else:
                    run.hooks.compute_loss(run=run, model=model, batch=batch.inputs)
    except Exception as error:  # models raise errors of any type
        failure, plugins.manager.failure = plugins.manager.failure, None
        by = failure[1] if failure is not None and failure[0] is error else None
        is_other = by is not None and by.slot != "task" and by.name not in run.recipe.selected
        is_other = is_other or isinstance(error, torch.OutOfMemoryError)
        return None if is_other else f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    finally:
        for put_back in restore:
            put_back()
    return None


def _samples(run: Run, loader: Loader) -> list[Any] | None:
    """The longest samples of the loader's split, the first of the run, or the first ones without ``lengths``. None for
    an iterable dataset that does not read by position."""
    dataset, count = run.datasets[run.loaders.first], min(SAMPLES, loader.micro_batch_size)
    if loader.stream is None:
        reader: Any = loader.loader.dataset
        lengths = getattr(dataset, "lengths", None)
        longest = range(len(dataset)) if lengths is None else (-lengths).argsort(kind="stable").tolist()
        return list(reader.read(list(longest[:count])))
    if not hasattr(dataset, "read_ranges"):
        return None
    return [sample for sample in islice(loader.stream, count) if not isinstance(sample, Filler)]
