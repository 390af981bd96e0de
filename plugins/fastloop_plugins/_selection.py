"""Build a run with plugins that another plugin, such as ``auto``, selected; leave out those that fail with its model.

A selected plugin leaves the run if one of its hooks raises while the run is built, if the strategy refuses a setting of
it, or if a trial step fails with it and succeeds without it. So a recipe that trains without the selection trains with
it. Plugins that a recipe lists, and strategies, are never left out.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fastloop import Problem
from fastloop.data import Loader
from fastloop.data.datasets import FillerCandidates
from fastloop.errors import FastloopError, PluginCrash, PluginError
from fastloop.evaluation_results import evaluating
from fastloop.plugins.plugin import Numerics, Plugin
from fastloop.plugins.resolve import ResolvedRecipe, resolve
from fastloop.probing import has_values, remember, uncompiled
from fastloop.problem import clause, typed_clause
from fastloop.recipe import Recipe
from fastloop.run import Run
from fastloop.runtime import hardware
from fastloop.runtime.hardware import Machine
from fastloop.speedup_estimates import Recommendation
from fastloop.strategy import method_that_raised
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


@dataclass(frozen=True)
class BuiltRun:
    """A run that was built.

    Attributes:
        left_out: Selected plugin -> why the run does not have it.
    """

    run: Run
    left_out: dict[str, str]


@dataclass(frozen=True)
class SelectedFailure:
    """The error of a selected plugin's hook while a run was built, in one line."""

    plugin: str
    reason: str


@dataclass(frozen=True)
class StrategyRefusal:
    """The error of a strategy that refused a run while it was built, in one line.

    Attributes:
        writers: The selected plugins that have set a setting, in call order. One of them may be the cause.
    """

    reason: str
    writers: list[str]


class SelectedBuild:
    """The builds of a run with selected plugins. The arguments are those of ``Plugin.build_selected``.

    Each build has a recipe of its own, and new plugin objects, except of those that are given in Python.
    """

    def __init__(self, resolved: ResolvedRecipe, build: Callable[[Run], Run]) -> None:
        self.resolved = resolved
        self.recipe = resolved.recipe
        self.build = build
        self.listed = resolved.recipe.plugins
        self.selected = resolved.recipe.selected

    def run(self) -> Run:
        """Build the run, and try a step if a selected plugin changes what it computes.

        Raises:
            FastloopError: The recipe is wrong, or a plugin that is not selected failed.
        """
        attempt = self._build(Run(self.recipe, self.resolved.plugins), {})
        suspects = self._suspects(attempt.run)
        problem = try_step(attempt.run) if suspects else None
        if problem is None:
            return self._finish(attempt)
        with_suspects = attempt.left_out
        without_suspects = with_suspects | dict.fromkeys(suspects, problem)
        attempt = self._rebuild(attempt, without_suspects)
        if try_step(attempt.run) is not None:  # the selection is not the cause
            return self._finish(self._rebuild(attempt, with_suspects))
        if len(suspects) == 1:
            return self._finish(attempt)
        for name in suspects:
            attempt = self._rebuild(attempt, with_suspects | {name: problem})
            if try_step(attempt.run) is None:
                return self._finish(attempt)
        return self._finish(self._rebuild(attempt, without_suspects))

    def _suspects(self, run: Run) -> list[str]:
        """The selected plugins that change what a step computes, those with the largest effect on the numbers first."""
        suspects = []
        for plugin in reversed(run.plugins.plugins):
            hooks = {hook for _, hook in run.plugins.manager.implementations(plugin)}
            sets_precision = run.settings.writers.get("mixed_precision") == plugin.name
            acts = sets_precision or not ACTING.isdisjoint(hooks)
            if acts and self._is_selected(plugin) and plugin.numerics != "bitwise":
                suspects.append(plugin)
        effects = get_args(Numerics)  # from the smallest effect to the largest
        suspects.sort(key=lambda plugin: effects.index(plugin.numerics), reverse=True)
        return [plugin.name for plugin in suspects]

    def _is_selected(self, plugin: Plugin) -> bool:
        return plugin.name in self.selected and plugin.slot != "strategy"  # several processes need theirs

    def _rebuild(self, before: BuiltRun, left_out: dict[str, str]) -> BuiltRun:
        """Build a run instead of another one."""
        discard(before.run)
        return self._build(self._new(left_out), left_out)

    def _build(self, run: Run, left_out: dict[str, str], raises_refusals: bool = False) -> BuiltRun:
        """Build a run, and instead of it one without the selected plugins whose hooks raise, or whose settings the
        strategy refuses. Every process must call it.

        Args:
            left_out: Plugin -> why it is left out.
            raises_refusals: Raise what the strategy refuses.
        """
        while True:
            own_error: Exception | None = None
            own_failure: SelectedFailure | StrategyRefusal | None = None
            try:
                self.build(run)
            except Exception as error:
                own_error = error
                own_failure = self._blame(run, error)
                if own_failure is None or (raises_refusals and isinstance(own_failure, StrategyRefusal)):
                    raise
            with run.processes.explain_lost_connection():
                answers = run.processes.all_gather_object(own_failure)
            failures = [failure for failure in answers if failure is not None]
            if not failures:
                return BuiltRun(run, left_out)
            discard(run, is_torn_down=own_failure is not None)
            first = failures[0]
            if isinstance(first, StrategyRefusal):
                return self._build_accepted(
                    first, own_error or PluginError(f"{first.reason}.", code="nothing-selected"), left_out
                )
            left_out = left_out | {first.plugin: first.reason}
            run = self._new(left_out)

    def _build_accepted(self, refusal: StrategyRefusal, error: Exception, left_out: dict[str, str]) -> BuiltRun:
        """Build a run that the strategy does not refuse: without each of the plugins that may be the cause alone, then
        without all of them.

        Args:
            error: The refusal, which is raised if the plugins are not its cause.
        """
        candidates = [[name] for name in refusal.writers]
        if len(candidates) > 1:
            candidates.append(refusal.writers)
        for names in candidates:
            without = left_out | dict.fromkeys(names, refusal.reason)
            try:
                return self._build(self._new(without), without, raises_refusals=True)
            except FastloopError:
                continue
        raise error

    def _new(self, left_out: Collection[str]) -> Run:
        """A run without some of the selected plugins, not built yet."""
        plugins = {name: options for name, options in self.listed.items() if name not in left_out}
        selected = {name: why for name, why in self.selected.items() if name not in left_out}
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

    def _blame(self, run: Run, error: Exception) -> SelectedFailure | StrategyRefusal | None:
        """The failure of the selected plugin whose hook raised an error, or the refusal of the strategy; None for any
        other error."""
        name = ""
        if isinstance(error, PluginCrash):
            name = error.plugin
        else:
            failure = run.plugins.manager.take_failure(error)
            if failure is not None:
                name = failure.plugin.name
        message = clause(error)
        if any(plugin.name == name and self._is_selected(plugin) for plugin in run.plugins):
            return SelectedFailure(name, message.removeprefix(f"{self.recipe.where}: plugins.{name}: "))
        strategy = run.plugins.strategy
        raised = name == strategy.name or method_that_raised(strategy, error) is not None
        if raised and isinstance(error, FastloopError) and not isinstance(error, PluginCrash):
            return StrategyRefusal(message.removeprefix(f"{self.recipe.where}: "), self._writers(run))
        return None

    def _writers(self, run: Run) -> list[str]:
        """The selected plugins that have set a setting."""
        settings = getattr(run, "settings", None)  # missing if the run failed before
        if settings is None:
            return []
        names = set(settings.writers.values())
        return [plugin.name for plugin in run.plugins if plugin.name in names and self._is_selected(plugin)]

    def _finish(self, built: BuiltRun) -> Run:
        """Log the plugins that were left out."""
        model = type(built.run.unwrap_model()).__name__
        for name, reason in built.left_out.items():
            selector, _, _ = self.selected[name].partition(":")  # "auto: why"
            if model not in reason:
                reason = f"{model}: {reason}"
            sentence = f"leaves out {name}: {reason}."
            log.warning(Problem(sentence, code="plugin-left-out", place=selector))
        return built.run


def discard(run: Run, is_torn_down: bool = False) -> None:
    """Tear down a run, and free its model: two may not fit into memory."""
    if not is_torn_down:
        for _, call in run.plugins.each("teardown"):
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
    changed: dict[str, Recommendation | None] = {}
    for name in recipe.selected:
        then = recommend_beside(full, name, machine)
        now = recommend_beside(recipe, name, machine)
        if then is not None and (now is None or now.options != then.options):
            changed[name] = now
    return changed


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
    own_problem = _compute(run) if _has_whole_weights(run) else None
    for problem in run.processes.all_gather_object(own_problem):
        if problem:
            return str(problem)
    return None


def _has_whole_weights(run: Run) -> bool:
    """Whether this process can compute with the model alone: no strategy wraps it, except DDP, or shards its
    weights."""
    is_wrapped = run.model is not run.unwrap_model()
    if is_wrapped and not isinstance(run.model, nn.parallel.DistributedDataParallel):
        return False
    model = run.unwrap_model()
    return has_values(model) and not any(isinstance(weight, DTensor) for weight in model.parameters())


def _compute(run: Run) -> str | None:
    """``try_step`` on this process."""
    inference = run.recipe.inference
    model = run.unwrap_model()
    loader = run.train_loader if inference is None else run.eval_loaders[inference.split]
    try:
        samples = _samples(run, loader)
    except Exception:  # training reports it
        return None
    if not samples or getattr(run.loaders.collators[run.loaders.first_split], "generates", False):
        return None
    restore = remember(model)
    try:
        with run.scalars.paused(), uncompiled():
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
        return _explain_trial(run, error)
    finally:
        for put_back in restore:
            put_back()
    return None


def _explain_trial(run: Run, error: Exception) -> str | None:
    """The error of a trial in one line; None if the selection cannot be its cause."""
    failure = run.plugins.manager.take_failure(error)
    if isinstance(error, torch.OutOfMemoryError):
        return None
    if failure is not None and failure.plugin.slot != "task" and failure.plugin.name not in run.recipe.selected:
        return None
    return typed_clause(error)


def _samples(run: Run, loader: Loader) -> list[Any] | None:
    """The longest samples of the loader's split, the first of the run, or the first ones without ``lengths``. If only
    some are tokenized, those of these. None for an iterable dataset that does not read by position."""
    dataset = run.datasets[run.loaders.first_split]
    count = min(SAMPLES, loader.micro_batch_size)
    encoded = getattr(dataset, "encoded", None)
    if encoded is not None:
        return [encoded[index] for index in (-encoded.lengths).argsort(kind="stable")[:count].tolist()]
    if loader.stream is None:
        reader: Any = loader.loader.dataset
        lengths = getattr(dataset, "lengths", None)
        if lengths is None:
            ids = list(range(min(count, len(dataset))))
        else:
            ids = (-lengths).argsort(kind="stable")[:count].tolist()  # the longest first
        return list(reader.read(ids))
    if not hasattr(dataset, "read_ranges"):
        return None
    return [sample for sample in islice(loader.stream, count) if not isinstance(sample, FillerCandidates)]
