"""Quick checks of recipes: ``fastloop train --fast-dev-run``, ``--overfit N``. Each is some settings and a plugin."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Generator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from fastloop.cli.ending import end_process_group
from fastloop.cli.messages import filtered_messages, without_repeated_messages
from fastloop.cli.startup import start_run
from fastloop.distributed import ranks
from fastloop.errors import UsageError
from fastloop.plugins.plugin import Plugin, hookimpl
from fastloop.plugins.resolve import ResolvedRecipe, load_listed, resolve
from fastloop.problem import counted
from fastloop.runtime.step_folders import step_folder
from fastloop.splits import TRAIN

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop.recipe import Recipe
    from fastloop.run import Run

OVERFIT_STEPS = 500
"""Optimizer steps of ``--overfit`` without ``train.max_steps``: enough for most models to memorize a few batches."""
NEAR_ZERO = 0.05
"""A loss is near zero below this share of the loss of the first pass. Dropout keeps the loss of most models above
zero."""
DEV_RUN_DONE = "fast-dev-run"
"""Why the first run of ``--fast-dev-run`` stops."""
OVERFIT_DONE = "overfit: the loss is near zero"
"""Why ``--overfit`` stops early."""


class WithoutEndOfCheck(logging.Filter):
    """Drops the message that training stopped because the check is done: the check prints its result."""

    def filter(self, record: logging.LogRecord) -> bool:
        return getattr(record, "stop_reason", None) not in (DEV_RUN_DONE, OVERFIT_DONE)


class FastDevRun(Plugin):
    """Reduces each evaluation to its first batch, and lets tasks prepare the first samples only.

    Args:
        stops: Whether training stops after its first step, for another run to resume.
    """

    name = "fast-dev-run"

    def __init__(self, stops: bool) -> None:
        super().__init__()
        self.stops = stops

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"max_evaluation_batches": 1, "only_checks": True}

    @hookimpl
    def before_fit(self, run: Run) -> None:
        run.state.stop_reason = None  # the checkpoint has that of the first run

    @hookimpl
    def after_step(self, run: Run) -> None:
        if self.stops:
            run.state.request_stop(DEV_RUN_DONE)


class Overfit(Plugin):
    """Trains on the first samples of the training split, without evaluation, until the loss is near zero.

    Attributes:
        samples: Number of samples; at most those of the split.
        first: Mean loss of the first pass over the samples; None: no pass is complete.
        last: Mean loss of the newest complete pass.
    """

    name = "overfit"

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples
        self.first: float | None = None
        self.last = math.nan
        self._losses: list[Tensor] = []

    @hookimpl(wrapper=True)
    def build_datasets(self) -> Generator[None, Any, Any]:
        from torch.utils.data import IterableDataset

        datasets = yield
        if datasets is None or TRAIN not in datasets:
            return datasets
        dataset = datasets[TRAIN]
        if isinstance(dataset, IterableDataset):
            samples = list(islice(dataset, self.samples))
        else:
            samples = [dataset[index] for index in range(min(len(dataset), self.samples))]
        self.samples = len(samples)
        return {**datasets, TRAIN: samples}

    @hookimpl(wrapper=True)
    def build_sampler(self, split: str) -> Generator[None, Any, Any]:
        sampler = yield
        return None if split == TRAIN else sampler  # a sampler's order may be one of the whole split

    @hookimpl(trylast=True)  # after the checks of plugins that read an evaluation
    def check_run(self, run: Run) -> None:
        run.eval_loaders.clear()

    @hookimpl
    def after_step(self, loss: Tensor) -> None:
        self._losses.append(loss.detach().clone())  # a CUDA graph overwrites its output

    @hookimpl
    def after_epoch(self, run: Run) -> None:
        self.last = sum(loss.item() for loss in self._losses) / len(self._losses)
        self._losses.clear()
        if self.first is None:
            self.first = self.last
        elif self.is_near_zero():
            run.state.request_stop(OVERFIT_DONE)

    @hookimpl
    def export_model(self, folder: Path) -> Path:
        return folder  # nothing is exported

    def is_near_zero(self) -> bool:
        """Whether the loss of the newest pass is near zero, compared with the first one."""
        return self.first is not None and self.last <= NEAR_ZERO * self.first

    def result(self, steps: int) -> str:
        """The result as a sentence."""
        if self.first is None:
            return (
                f"overfit: a pass over {counted(self.samples, 'sample')} takes more than {counted(steps, 'step')}. "
                "Raise train.max_steps, or take fewer samples."
            )
        losses = (
            f"{self.first:.4g} in the first pass over {counted(self.samples, 'sample')}, {self.last:.4g} in the last "
            f"one, after {counted(steps, 'step')}."
        )
        if self.is_near_zero():
            return f"overfit: the loss fell to near zero: {losses}"
        return (
            f"overfit: the loss did not fall to near zero: {losses} Check the labels, the loss and train.lr, or raise "
            "train.max_steps."
        )


def prepare(recipe: Recipe, samples: int | None) -> None:
    """Set the schedule and the output folder of a quick check, and leave out plugins that publish results.

    The folder is beside the recipe's own, which stays as it is.

    Args:
        samples: Those of ``--overfit``; None: for ``--fast-dev-run``.
    """
    if samples is None:
        changes: dict[str, Any] = {
            "epochs": 2,
            "max_steps": 2,
            "save_every": 1,
            "log_every": 1,
            "on_save_error": "stop",
        }
        recipe.output += ".fast-dev-run"
    else:
        recipe.output += ".overfit"
        changes = {"epochs": None, "max_steps": recipe.train.max_steps or OVERFIT_STEPS, "save_every": None}
    recipe.train = replace(recipe.train, evaluate_every=None, **changes)
    recipe.plugins |= without_publishers(recipe)


def without_publishers(recipe: Recipe) -> dict[str, dict[str, Any] | Literal[False]]:
    """Turn off the plugins that send results out of the run folder (``Plugin.publishes``): nobody keeps those of a
    check or a measurement.

    Returns:
        Name -> False, to update ``recipe.plugins`` with.
    """
    turned_off: dict[str, dict[str, Any] | Literal[False]] = {}
    for name, options in recipe.plugins.items():
        if options is not False and load_listed(recipe, name).publishes:
            turned_off[name] = False
    return turned_off


def check_options(fast_dev_run: bool, overfit: int | None, resume: str | None, nproc: int | None) -> None:
    """Check that the options of ``fastloop train`` agree.

    Raises:
        UsageError: Two of them exclude each other, or ``--overfit`` is used with several processes.
    """
    if overfit is not None and max(nproc or 1, ranks.world_size()) > 1:
        raise UsageError(
            code="several-processes",
            place="--overfit",
            expected="one process",
            remedy="Leave out --nproc or the launcher.",
        )
    given = []
    if fast_dev_run:
        given.append("--fast-dev-run")
    if overfit is not None:
        given.append("--overfit")
    if resume is not None:
        given.append("--resume")
    if len(given) > 1:
        raise UsageError(
            f"{' and '.join(given)} exclude each other.", code="exclusive-options", remedy="Leave out one of them."
        )


def run_fast_dev_run(resolved: ResolvedRecipe) -> int:
    """Train one step, evaluate, save and export; then resume from the checkpoint and do it again. Removes the output
    folder.

    Returns:
        The exit code.
    """
    folder = Path(resolved.recipe.output)
    remove(folder)  # an earlier check was killed
    try:
        with without_repeated_messages():
            first = _train(resolved, FastDevRun(stops=True))
            run = first
            if not first.interrupted:
                run = _train(resolve(resolved.recipe), FastDevRun(stops=False), step_folder(folder, 1))
        if not run.interrupted and run.is_main:
            done = [f"{counted(run.state.step, 'step')}, saved and resumed after step {first.state.step}"]
            done += [f"one batch of {split}" for split in run.state.metrics]
            if (folder / "model").is_dir():
                done.append("export")
            typer.echo(f"fast-dev-run: {'; '.join(done)}. Removed {folder}.")
    finally:
        remove(folder)
    return end_process_group(run)


def run_overfit(resolved: ResolvedRecipe, samples: int) -> int:
    """Train on ``samples`` samples, and print whether the loss fell to near zero.

    Returns:
        The exit code: 1 if the loss did not fall.
    """
    plugin = Overfit(samples)
    run = _train(resolved, plugin)
    if run.is_main and not run.interrupted:
        typer.echo(plugin.result(run.state.step))
    return end_process_group(run, 0 if plugin.is_near_zero() else 1)


def remove(folder: Path) -> None:
    """Remove a run folder, on the main process."""
    if ranks.rank() == 0 and folder.is_dir():
        shutil.rmtree(folder)


def _train(resolved: ResolvedRecipe, plugin: Plugin, resume: Path | None = None) -> Run:
    """Train a recipe with one more plugin."""
    with start_run(resolved, [plugin], resume) as run, filtered_messages(WithoutEndOfCheck()):
        from fastloop.lifecycle import execute  # only here: it imports torch, and errors of the recipe come before

        execute(run)
    return run
