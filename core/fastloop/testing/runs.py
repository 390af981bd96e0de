"""Trains recipes and records the results that tests compare, and runs a plugin's trainings for the conformance suite.

``alone``, ``dies`` and ``together`` run in separate processes, so that settings changed by a plugin end with them.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import traceback
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastloop import Plugin, UsageError, checkpoint, hookimpl
from fastloop.cli.numerics import switch_dropout_off
from fastloop.distributed.tensors import as_bytes, gather_full
from fastloop.errors import FastloopError, ProcessesDisagree, ProcessLost
from fastloop.lifecycle import execute, open_run
from fastloop.plugins.installed import defaults, load
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Recipe, make_recipe
from fastloop.run import Run
from fastloop.runtime.platform_support import KILL
from fastloop.runtime.random_states import cpu_random_states
from fastloop.runtime.tracebacks import user_traceback
from fastloop.state import Batch
from fastloop.testing.settings import changes, snapshot
from fastloop.testing.tasks import with_batch_norm

EVALUATES_EVERY = 2
"""Steps between two evaluations of a training. It has 20 steps: four epochs of five.

A plugin that counts steps, evaluations or epochs without saving the count acts at another time in a resumed run,
whatever number it counts to. This number and the next three see to that."""
STOPS_AT = 9
"""The step after which one training is interrupted."""
SAVES_EVERY = 4
"""Steps between two checkpoints of another training."""
DIES_AT = 14
"""The step in which that training is killed."""
RELEASED_AFTER = 6
"""Steps after which the first step's batch must not be in memory any more."""
PATIENCE = 10.0
"""Seconds to wait for a checkpoint."""
TRAIN: dict[str, Any] = {
    "epochs": 4, "batch_size": 8, "micro_batch_size": 4, "lr": 1e-2, "evaluate_every": EVALUATES_EVERY,
    "save_every": None, "seed": 1
}  # fmt: skip
SEEDS = (2, 3, 4)
"""Seeds of further trainings without the plugin, whose final losses show how much a seed changes."""
TRAININGS = {
    "declared": (),
    "options": (),
    "documented": (),
    "numerics": (),
    "batch_norm": ("batch norm",),
    "saved_and_loaded": ("whole", "resumed"),
    "killed": ("whole", "after the kill"),
    "processes": (),
    "off": ("before", "off"),
    "cost": ("before", "off", "whole"),
}
"""Check of ``Conformance`` -> the trainings of ``alone`` that it reads beside ``ours``. An author's own check may read
each of them."""


@dataclass(kw_only=True)
class Trained:
    """The results of a training, on one process.

    Attributes:
        losses: The mean loss of each step over all processes.
        lrs: Learning rate of each step.
        metrics: Each evaluation's split and metrics.
        gradients: Name -> the full gradient of the first step; empty if a strategy does not expose gradients.
        seconds: Seconds between the ends of successive steps.
        weights: Name -> tensor after training, on the CPU; on the main process only.
        replicas: A checksum of the weights that every process holds in full.
        random: After each step, a checksum of the random states of each generator:
            ``{"torch": ..., "numpy": ..., "python": ...}``.
        kept: Number of tensors of the first step's batches that are in memory ``RELEASED_AFTER`` steps later.
        hooks: The torch hooks of the model's modules after the run that it did not have when it was built.
        states: If the run resumed: the state that the plugin had saved, and the state that it saves after loading it.
        summary: As in ``summary.json``.
    """

    losses: list[float]
    lrs: list[float]
    metrics: list[tuple[str, dict[str, float]]]
    gradients: dict[str, Tensor]
    seconds: list[float]
    weights: dict[str, Tensor]
    replicas: str
    random: list[dict[str, str]]
    kept: int
    hooks: list[str]
    states: tuple[Any, Any]
    summary: dict[str, Any]


@dataclass(kw_only=True)
class Failed:
    """A training that failed.

    Attributes:
        error: Type and message.
        refused: Whether the run was refused with a ``UsageError``. ``ProcessesDisagree`` is a fault, not a refusal.
        lost_connection: Whether another process ended first, which has the cause.
        trace: The traceback, without the frames of fastloop's core around user code.
    """

    error: str
    refused: bool
    lost_connection: bool
    trace: str


class RunRecorder(Plugin):
    """Records a run. Its hooks come after those of other plugins; ``of`` is the plugin whose state is recorded."""

    name = "watch"
    recordable = True  # it acts within the first step alone

    def __init__(self, of: str = "") -> None:
        super().__init__()
        self.of = of
        self.states: tuple[Any, Any] = (None, None)
        self.losses: list[float] = []
        self.lrs: list[float] = []
        self.metrics: list[tuple[str, dict[str, float]]] = []
        self.gradients: dict[str, Tensor] = {}
        self.random: list[dict[str, str]] = []
        self.kept = 0
        self.ends: list[float] = []  # of each step, in seconds
        self.first_batch: list[weakref.ref[Tensor]] = []
        self.built: Counter[Any]  # hooks of the model as built

    @hookimpl(trylast=True)
    def check_run(self, run: Run) -> None:
        self.built = Counter(_hooks(run.unwrap_model()))

    @hookimpl(trylast=True)
    def before_fit(self, run: Run) -> None:
        if run.resume_point is not None and run.world_size == 1:
            saved = checkpoint.read(run.resume_point.checkpoint)[1]["plugins"].get(self.of)
            saved_again = None
            for plugin, call in run.plugins.each("save_state"):
                if plugin.name == self.of:
                    saved_again = copy.deepcopy(call(run=run))
            self.states = (saved, saved_again)

    @hookimpl(trylast=True)
    def before_step(self, batches: list[Batch]) -> None:
        if not self.losses:
            leaves = tree_leaves([batch.inputs for batch in batches])
            self.first_batch = [weakref.ref(leaf) for leaf in leaves if isinstance(leaf, Tensor)]

    @hookimpl(trylast=True)
    def before_optimizer_step(self, run: Run) -> None:
        if self.losses:
            return
        scale = run.accelerator.scaler.get_scale() if run.accelerator.scaler is not None else 1.0
        for name, parameter in run.unwrap_model().named_parameters():
            if parameter.grad is not None:
                self.gradients[name] = gather_full(parameter.grad).detach().cpu().clone() / scale

    @hookimpl(trylast=True)
    def after_step(self, run: Run, loss: Tensor) -> None:
        self.ends.append(perf_counter())
        self.losses.append(loss.item())
        self.lrs.append(run.optimizer.param_groups[0]["lr"])
        self.random.append(_random())
        if len(self.ends) == 1 + RELEASED_AFTER and self._count_kept():
            gc.collect()  # a tensor in a reference cycle is not kept
            self.kept = self._count_kept()

    def _count_kept(self) -> int:
        """Tensors of the first batch that are still in memory."""
        return sum(leaf() is not None for leaf in self.first_batch)

    @hookimpl(trylast=True)
    def after_evaluate(self, split: str, metrics: dict[str, float]) -> None:
        self.metrics.append((split, dict(metrics)))

    def result(self, run: Run, summary: dict[str, Any]) -> Trained:
        """The recorded results. Every process must call it."""
        seconds = [after - before for before, after in pairwise(self.ends)]
        weights = {name: tensor.clone() for name, tensor in run.full_state_dict().items()}
        return Trained(
            losses=self.losses,
            lrs=self.lrs,
            metrics=self.metrics,
            gradients=self.gradients,
            random=self.random,
            kept=self.kept,
            seconds=seconds,
            weights=weights,
            replicas=_replicas(run),
            hooks=[*(Counter(_hooks(run.unwrap_model())) - self.built)],
            states=self.states,
            summary=summary,
        )


class DisableDropout(Plugin):
    """Turns dropout off, like `fastloop bench`, so that random numbers do not hide other differences."""

    name = "still"

    @hookimpl
    def before_prepare(self, model: nn.Module) -> None:
        switch_dropout_off(model)


class InterruptAtStep(Plugin):
    """Requests a stop at a step, as Ctrl-C does."""

    name = "stops"

    @hookimpl
    def after_step(self, run: Run) -> None:
        if run.state.step == STOPS_AT:
            run.signals.record("SIGINT")


class KillAtStep(Plugin):
    """Kills its own process within a step, as ``kill -9`` would; after it, if the step was replayed."""

    name = "dies"
    recordable = True

    @hookimpl
    def after_backward(self, run: Run) -> None:
        if run.state.step == DIES_AT - 1:
            self.kill(run, run.state.step)

    @hookimpl
    def after_step(self, run: Run) -> None:
        if run.state.step == DIES_AT:
            self.kill(run, DIES_AT - 1)

    def kill(self, run: Run, step: int) -> None:
        """Kill the process once the newest checkpoint up to a step is there: it may be written in the background."""
        newest = checkpoint.step_folder(run.folder, step // SAVES_EVERY * SAVES_EVERY)
        deadline = perf_counter() + PATIENCE
        while not newest.exists() and perf_counter() < deadline:
            sleep(0.01)
        os.kill(os.getpid(), KILL)


def _replicas(run: Run) -> str:
    from torch.distributed.tensor import DTensor

    digest = hashlib.sha256()
    for name, parameter in run.unwrap_model().named_parameters():
        if not isinstance(parameter, DTensor):
            digest.update(name.encode() + as_bytes(parameter).cpu().numpy().tobytes())
    return digest.hexdigest()


def _random() -> dict[str, str]:
    """Generator -> a checksum of its state."""
    states = cpu_random_states()
    parts = {
        "torch": states["torch"].numpy().tobytes(),
        "numpy": states["numpy"][1].tobytes() + repr(states["numpy"][2:]).encode(),
        "python": repr(states["python"]).encode(),
    }
    return {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}


def _hooks(model: nn.Module) -> list[str]:
    """Module and kind of each torch hook of a model."""
    hooks = []
    for name, module in model.named_modules():
        for kind in ("forward_pre_hook", "forward_hook", "backward_pre_hook", "backward_hook"):
            for _ in getattr(module, f"_{kind}s"):
                hooks.append(f"{kind.replace('_', ' ')} of {name or 'the model'}")
    return hooks


def train(recipe: Mapping[str, Any] | Recipe, *objects: Plugin, resume: Path | None = None, of: str = "") -> Trained:
    """Train a recipe, given as a dict, in this process, which may be one of several ranks.

    Args:
        objects: Further plugins, given in Python.
        resume: A run folder to resume from.
        of: The plugin whose state the result contains.
    """
    watch = RunRecorder(of)
    recipe = recipe if isinstance(recipe, Recipe) else make_recipe(recipe)
    first: list[Plugin] = []  # before plugins that look for dropout
    others: list[Plugin] = []
    for plugin in objects:
        if isinstance(plugin, DisableDropout):
            first.append(plugin)
        else:
            others.append(plugin)
    with open_run(resolve(recipe, objects=others), [*first, watch], resume) as run:
        summary = execute(run)
    return watch.result(run, summary)


@cache
def _idle() -> dict[str, Literal[False]]:
    """Entries of a recipe that turn off the default observers. Tasks and guards stay."""
    return {name: False for name in sorted(defaults()) if load(name).read_only}


@dataclass(frozen=True, kw_only=True)
class Study:
    """A plugin, and the setup of its tests: see ``Conformance``.

    Attributes:
        plugin: Its name; empty: the control run without a plugin.
        without: The task without the plugin: the same one, or another one if the plugin is the task.
        still: Whether the comparison runs without dropout.
        strategy_options: Strategy -> its options.
    """

    plugin: str
    options: Mapping[str, Any]
    requires: tuple[Any, ...]
    task: Mapping[str, Any]
    without: Mapping[str, Any]
    device: str
    still: bool
    strategy_options: Mapping[str, Mapping[str, Any]]

    def recipe(
        self, output: str, *, on: bool = True, strategy: str | None = None, batch_norm: bool = False, **settings: Any
    ) -> Recipe:
        """The recipe with or without the plugin, without default observers."""
        task = dict(self.task if on else self.without)
        if batch_norm:
            task |= with_batch_norm(task) or {}
        plugins: dict[str, Any] = {}
        for entry in (*task.pop("plugins", ()), *self.requires):
            plugins |= {entry: {}} if isinstance(entry, str) else entry
        if strategy:
            plugins[strategy] = dict(self.strategy_options.get(strategy, {}))
        if on:
            plugins[self.plugin] = plugins.get(self.plugin, {}) | dict(self.options)
        elif self.plugin:
            plugins[self.plugin] = False
        train = TRAIN | {"device": self.device} | task.pop("train", {}) | settings
        return make_recipe(task | {"plugins": _idle() | plugins, "train": train, "output": output})

    def train(
        self, output: str, *objects: Plugin, resume: bool = False, still: bool = False, **settings: Any
    ) -> Trained | Failed:
        """One training, or its error."""
        try:
            quiet = [DisableDropout()] if still and self.still else []
            recipe = self.recipe(output, **settings)
            return train(recipe, *objects, *quiet, resume=Path(output) if resume else None, of=self.plugin)
        except Exception as error:
            return Failed(
                error=f"{type(error).__name__}: {error}",
                refused=isinstance(error, UsageError) and not isinstance(error, ProcessesDisagree),
                lost_connection=isinstance(error, ProcessLost),
                trace=_trace_of(error),
            )


def _trace_of(error: Exception) -> str:
    """The traceback of an error: of user code, if it raised the error; else whole, unless fastloop refused the run."""
    if isinstance(error, FastloopError):
        return user_traceback(error.__cause__ or error)
    return user_traceback(error) or "".join(traceback.format_exception(error))


def without(study: Study) -> dict[str, Any]:
    """The trainings of a process that has not imported the plugin."""
    results = {}
    for name in ("plain", "plain again"):
        results[name] = study.train(name, on=False, still=True)
    if with_batch_norm(study.task):
        results["batch norm"] = study.train("batch norm", on=False, still=True, batch_norm=True)
    if study.still:  # a reassociated plugin, or one of reduced precision, must differ less than another seed
        for seed in SEEDS:
            results[f"seed {seed}"] = study.train(f"seed {seed}", on=False, still=True, seed=seed)
    return results


def dies(study: Study) -> Trained | Failed:
    """Train with the plugin until killed. If the function returns, the process was not killed."""
    return study.train("killed", KillAtStep(), save_every=SAVES_EVERY)


def alone(study: Study, names: Collection[str]) -> dict[str, Any]:
    """The trainings of one process with the plugin, after that of ``dies``: ``ours``, and those of ``names``.
    ``changed``: settings that it did not restore."""
    results: dict[str, Any] = {}
    if "before" in names:  # imports, which the plugin need not undo
        results["before"] = study.train("before", on=study.task != study.without)
    gc.unfreeze()  # the number of frozen objects is a setting, and modules that a run replaces would change it
    before = snapshot()
    results["ours"] = study.train("ours", still=True)
    results["changed"] = changes(before, snapshot())
    gc.freeze()
    if "off" in names:
        results["off"] = study.train("off", on=False, still=True)
    if isinstance(results["ours"], Failed):
        return results
    if "batch norm" in names and with_batch_norm(study.task):
        results["batch norm"] = study.train("batch norm", still=True, batch_norm=True)
    if "whole" in names:
        results["whole"] = study.train("whole") if study.still else results["ours"]
    if "resumed" in names:
        results["interrupted"] = study.train("resumed", InterruptAtStep())
        results["resumed"] = study.train("resumed", resume=True)
    if "after the kill" in names:
        results["after the kill"] = study.train("killed", resume=True, save_every=SAVES_EVERY)
    return results


def together(study: Study, strategy: str) -> Trained | Failed:
    """The training of one of several processes under a strategy, without a plugin if the study has none."""
    return study.train(strategy, on=bool(study.plugin), strategy=strategy, still=True)


def resumed_together(study: Study) -> dict[str, Trained | Failed]:
    """The trainings of one of several processes under the strategy of the study: one without a break, and one that is
    interrupted and resumed."""
    return {
        "whole": study.train("whole on each", strategy=study.plugin),
        "interrupted": study.train("resumed on each", InterruptAtStep(), strategy=study.plugin),
        "resumed": study.train("resumed on each", strategy=study.plugin, resume=True),
    }
