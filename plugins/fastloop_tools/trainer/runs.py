"""The runs of a ``Trainer``: those of ``fit``, one after another on one model, and those that evaluate or predict."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from fastloop import Plugin, PluginCrash, Problem, Run, UsageError, lifecycle
from fastloop.cli.messages import show_messages
from fastloop.distributed import signals
from fastloop.errors import UserCodeError
from fastloop.plugins.resolve import ResolvedRecipe, resolve
from fastloop.problem import counted
from fastloop.recipe import Inference, Recipe
from fastloop.runtime.random_states import preserve_random_states
from fastloop.runtime.step_folders import checkpoints
from fastloop_tools.trainer.task import TrainerTask
from fastloop_tools.trainer.user_loader import UserLoader

log = logging.getLogger("fastloop")

T = TypeVar("T")

_trained = weakref.WeakKeyDictionary[Plugin, "weakref.ref[Fits]"]()
"""Plugin with state that a run has trained with -> the calls of the ``Trainer`` that it was given to."""


class Fits:
    """The calls of ``Trainer.fit``, which share one model object.

    Args:
        task: The task with the model.
        resume: Where the first call resumes from; None: it starts from the beginning.

    Attributes:
        count: Number of calls.
    """

    def __init__(self, task: TrainerTask, resume: Path | None) -> None:
        self.task = task
        self.resume = resume
        self.count = 0
        self._run: Run | None = None
        self._step = 0  # optimizer steps of the earlier calls
        self._modules: dict[str, type] = {}
        self._completed = False
        self._release: weakref.finalize[..., Fits] | None = None  # of the newest run, once the ``Trainer`` is gone

    def start(self) -> Path | None:
        """Begin a call. Returns the run folder or checkpoint to resume from; None: the run starts from the beginning.

        Raises:
            UsageError: The run is complete, its weights have changed and no checkpoint has them, or plugins changed the
                model's structure.
        """
        _import_compiler()
        modules = _modules(self.task.model)
        self.count += 1
        if self._run is None:
            self._modules = modules
            return self.resume
        run = self._run
        step = max(self._step, run.state.step)
        self._step = step
        if self._completed:
            raise UsageError(
                f"an earlier call completed the run after {counted(step, 'step')}.",
                code="run-complete",
                place="fit",
                remedy=(
                    "To train longer, raise epochs or max_steps: Trainer(..., epochs=N, resume=True). For a new run "
                    "with the trained weights, make a new Trainer."
                ),
            )
        if modules != self._modules:
            name = next(name for name in modules | self._modules if modules.get(name) != self._modules.get(name))
            raise UsageError(
                "plugins changed the structure of the model in the earlier call (first at "
                f"{name or 'the model itself'!r}), so a run cannot be built with it again.",
                code="model-changed",
                place="fit",
                remedy="Make the model again, and continue with Trainer(..., resume=True).",
            )
        if step and checkpoints(run.folder):
            return run.folder
        if step and self.resume is None:
            raise UsageError(
                f"the earlier call ended after {counted(step, 'step')} without a checkpoint, and the model's weights "
                "have changed.",
                code="model-changed",
                place="fit",
                remedy="Make the model again for a new run. To have checkpoints more often, set save_every.",
            )
        return self.resume

    @contextmanager
    def open_run(self, resolved: ResolvedRecipe, resume: Path | None) -> Iterator[Run]:
        """Open the run of a call, which trains in the block.

        Raises:
            UsageError: A plugin has the state of another trainer's run.
        """
        self._check_plugins(resolved, resume)
        if self._release is not None:
            self._release()
        with lifecycle.open_run(resolved, resume=resume) as run:
            for plugin, _ in run.plugins.each("save_state"):
                _trained[plugin] = weakref.ref(self)
            self._run = run
            self._release = weakref.finalize(self, lifecycle.release, run)
            self._release.atexit = False
            yield run

    def _check_plugins(self, resolved: ResolvedRecipe, resume: Path | None) -> None:
        """Raise an error for a plugin with the state of another trainer's run. A checkpoint would replace it."""
        if resume is not None and resume.exists():
            return
        for plugin, _ in resolved.plugins.each("save_state"):
            if plugin in _trained and _trained[plugin]() is not self:
                raise UsageError(
                    f"the object of plugin {plugin.name!r} has the state of a run of another Trainer, such as counters "
                    "and averages.",
                    code="plugin-used-before",
                    place="Trainer: plugins",
                    remedy=f"Make an object for each Trainer: {type(plugin).__name__}(...).",
                )

    def finish(self, run: Run) -> None:
        """End a call whose run is closed.

        Raises:
            KeyboardInterrupt: SIGINT stopped the run, after it was saved.
            StoppedAtOnce: Another signal did.
        """
        if run.interrupted:
            saved = (
                "and saved"
                if run.saver.last_saved_step == run.state.step
                else f"(newest checkpoint: {run.saver.last_saved_step})"
            )
            log.warning(
                Problem(f"stopped {saved} at step {run.state.step}: call fit() again to continue.", code="interrupted")
            )
            signals.stop_now(signal.Signals[run.interrupted], None)
        self._completed = True


def show_log() -> None:
    """Show log messages as the command line does, such as the metrics of each evaluation. A program that has set up
    logging, or the level of ``fastloop``, shows them as it wants."""
    logger = logging.getLogger("fastloop")
    if logger.hasHandlers() or logger.level != logging.NOTSET:
        return
    show_messages()


def _import_compiler() -> None:
    """Import torch's compiler, as the first optimizer of a process does, but in a thread.

    ``torch.fx.wrap`` keeps the frames that lead to the first import, in a reference cycle. Those of a run refer to its
    model.
    """
    if "torch._dynamo" not in sys.modules:
        thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
        thread.start()
        thread.join()


@contextmanager
def inference(recipe: Recipe, objects: Iterable[Plugin], task: TrainerTask, split: str) -> Iterator[Run]:
    """A run of a split with the task's model, without training. It leaves the random states as they are."""
    resolved = resolve(dataclasses.replace(recipe, inference=Inference(None, split)), objects=[*objects, task])
    with preserve_random_states():
        with lifecycle.open_run(resolved) as run:
            yield run
        lifecycle.release(run)


def call(task: TrainerTask, function: Callable[[], T]) -> T:
    """Call a function. An exception of user code is raised as it is, with a note that names its line."""
    try:
        return function()
    except (PluginCrash, UserCodeError) as error:
        failure = error  # raise outside of the handler, so that the cause has no context
    cause = failure.__cause__
    if cause is None or isinstance(cause, SystemExit):
        raise failure
    if isinstance(failure, PluginCrash) and failure.plugin != task.name:
        raise failure
    if isinstance(failure, UserCodeError):
        cause.add_note(f"fastloop: your code failed at {str(failure).partition(': ')[0]}")
    raise cause


def in_order(loader: UserLoader) -> UserLoader:
    """A loader in the order of its dataset.

    Raises:
        UsageError: Its sampler may leave samples out or repeat them.
    """
    if loader.sampler is None or isinstance(loader.dataset, IterableDataset):
        return loader
    order: Any = loader.sampler.sampler
    order = getattr(order, "user_sampler", order)  # without the wrapper for a shared generator
    takes_each = isinstance(order, SequentialSampler)
    if isinstance(order, RandomSampler):
        takes_each = not order.replacement
    if not takes_each or len(order) != len(loader.dataset):
        raise UsageError(
            f"the loader's sampler ({type(order).__name__}) may leave samples out or repeat them. Predictions are in "
            "the order of the dataset.",
            code="samples-left-out",
            place="data",
            remedy="Give a dataset, such as torch.utils.data.Subset, or a loader without a sampler.",
        )
    sampler = BatchSampler(SequentialSampler(loader.dataset), loader.sampler.batch_size, drop_last=False)
    return dataclasses.replace(loader, sampler=sampler)


def stack(columns: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Each column as one tensor, if its values are tensors of one shape and dtype."""
    return {name: torch.stack(values) if _same_shape(values) else values for name, values in columns.items()}


def _same_shape(values: list[Any]) -> bool:
    return (
        all(isinstance(value, torch.Tensor) for value in values)
        and len({(value.shape, value.dtype) for value in values}) == 1
    )


def _modules(model: nn.Module) -> dict[str, type]:
    """Name -> class of a model's modules and parameters. Adapters and shards change it."""
    return {name: type(part) for name, part in (*model.named_modules(), *model.named_parameters())}
