"""``Trainer``: train, evaluate and predict with a model and data that exist in Python.

from fastloop import Trainer
trainer = Trainer(model, train_loader, eval_loader, plugins=["amp", {"ema": {"decay": 0.99}}], epochs=3)
summary = trainer.fit()
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import IterableDataset

from fastloop import Plugin, Run, UsageError, lifecycle, loop
from fastloop.plugins.resolve import ResolvedRecipe, resolve
from fastloop.recipe import Recipe, make_recipe
from fastloop.runtime.files import apply_umask
from fastloop.runtime.main_module import stop_in_spawned_process
from fastloop.splits import PREDICT, TEST, TRAIN, VALIDATION
from fastloop_tools.inference.predictions import predict_dataset
from fastloop_tools.trainer import runs
from fastloop_tools.trainer.arguments import as_metrics, check_arguments, check_plugins
from fastloop_tools.trainer.optimizers import UserOptimizer
from fastloop_tools.trainer.task import TrainerTask
from fastloop_tools.trainer.user_loader import read_loader

if TYPE_CHECKING:
    from torchmetrics import Metric


class Trainer:
    """Train, evaluate and predict with your own model, and with plugins.

    Args:
        model: Any module. For batches that are mappings, it must return an object with ``.loss``. For
            ``(inputs, targets)``, pass ``loss``.
        train_loader: A ``DataLoader``, or a dataset together with ``batch_size=``. Without ``batch_size=``, a list of
            batches is taken as such: each is an optimizer step. The loader's batch size is that of
            an optimizer step, over all processes. fastloop keeps the loader's collator, order, ``drop_last`` and
            workers, and refuses settings that it cannot keep: docs/checks/python.md has a table. ``shuffle=True``
            without a generator shuffles by ``seed`` and epoch.
        eval_loader: Likewise; evaluated according to ``train.evaluate_every``. A dataset uses the collator of
            ``train_loader``.
        test_loader: Likewise; evaluated once, at the end.
        plugins: Names, files or one-key mappings as in a recipe, or plugin objects. ``{"progress": False}`` disables a
            default plugin.
        loss: ``loss(predictions, targets)``, such as ``torch.nn.functional.cross_entropy``. For batches that are
            mappings with ``labels``, it replaces the model's own loss, and gets ``logits`` and ``labels``.
        metrics: Name -> torchmetrics metric, updated with ``(predictions, targets)``; or a function of the predictions
            and targets of the whole split, as numpy arrays, that returns a number.
        optimizer: A torch optimizer of the model's parameters, or a function of the model that returns one. A class, or
            a ``functools.partial`` of one, gets the trained parameters. Plugins that replace parameters (``lora``,
            ``fsdp``) need a function. A name or a mapping is ``train.optimizer`` of a recipe, which ``lr`` and
            ``weight_decay`` belong to.
        scheduler: A torch scheduler of that optimizer, or a function of the optimizer. It steps after each optimizer
            step.
        processing_class: A tokenizer, image processor or the like, saved beside the exported model by its
            ``save_pretrained``. A tokenizer also pads token ids of different lengths, if there is no collator:
            (samples, longest) int64, with an attention mask. If the model reads ``labels``, a column ``label`` or
            ``label_ids`` gets this name, as in transformers.
        pad_to_multiple_of: The collator pads lengths to a multiple of this many tokens. Plugins that count tokens need
            to know.
        output: The run folder.
        resume: A run folder or checkpoint to resume from. True: resume from ``output`` if it holds a checkpoint, else
            start a new run.
        train: Keys of a recipe's ``train``: ``epochs``, ``lr``, ``seed``, ``max_grad_norm``, ...

    Raises:
        UsageError: An argument is wrong.
    """

    run: Run
    """The run of ``fit``, once it is built."""

    def __init__(
        self,
        model: nn.Module,
        train_loader: Any,
        eval_loader: Any = None,
        test_loader: Any = None,
        *,
        plugins: Sequence[str | dict[str, Any] | Plugin] = (),
        loss: Callable[[Any, Any], Tensor] | None = None,
        metrics: Mapping[str, Metric | Callable[[Any, Any], SupportsFloat]] | None = None,
        optimizer: str | Mapping[str, Any] | Optimizer | Callable[..., Optimizer] | None = None,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        processing_class: Any = None,
        pad_to_multiple_of: int | None = None,
        output: str | Path = "runs/run",
        resume: bool | str | Path = False,
        **train: Any,
    ) -> None:
        stop_in_spawned_process()
        runs.show_log()
        check_arguments(train, inspect.signature(Trainer).parameters)
        check_plugins(plugins)
        self._has_batch_size = "batch_size" in train
        splits = {}
        for split, name, loader in (
            (TRAIN, "train_loader", train_loader),
            (VALIDATION, "eval_loader", eval_loader),
            (TEST, "test_loader", test_loader),
        ):
            if loader is not None:
                splits[split] = read_loader(name, loader, self._has_batch_size)
        if isinstance(optimizer, str | Mapping):
            train["optimizer"] = optimizer if isinstance(optimizer, str) else dict(optimizer)
            optimizer = None
        own = UserOptimizer(model, optimizer, scheduler, train)
        sampler = splits[TRAIN].sampler
        if sampler is not None:
            train.setdefault("batch_size", sampler.batch_size)
        if isinstance(splits[TRAIN].dataset, IterableDataset) and "max_steps" not in train:
            train.setdefault("epochs", 1)
        named = [plugin for plugin in plugins if not isinstance(plugin, Plugin)]
        self._objects = [plugin for plugin in plugins if isinstance(plugin, Plugin)]
        data = {} if pad_to_multiple_of is None else {"pad_to_multiple_of": pad_to_multiple_of}
        recipe = make_recipe({"data": data, "train": train, "plugins": named, "output": str(output)})
        self._train = recipe.train  # as given: the task writes the settings of the user's optimizer into that of a run
        self.task = TrainerTask(model, splits, loss, as_metrics(metrics), processing_class, own)
        self.resolved: ResolvedRecipe = resolve(recipe, objects=[*self._objects, self.task])
        self.resume: Path | None = None
        if resume is True:
            self.resume = Path(output)
        elif resume:
            self.resume = Path(resume)
        self._fits = runs.Fits(self.task, self.resume)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the newest run, or of the first one, if there was none."""
        return self.resolved.recipe

    def fit(self) -> dict[str, Any]:
        """Train, test and export. Returns the summary, which is also ``summary.json`` in the run folder.

        Ctrl-C, or the interrupt of a notebook, saves at the step's end, and then raises ``KeyboardInterrupt``; a second
        one stops at once. SIGTERM, SIGUSR1 and SIGHUP save, too, and end the process with exit code 75. After an
        interrupt or an error, another call continues from the newest checkpoint, to the numbers of an uninterrupted
        run.

        Raises:
            UsageError: An earlier call completed the run, or the run cannot continue with this model object.
            FastloopError: The run failed.
            Exception: The original exception of the model, the loss, a metric or other user code.
        """
        resume = self._fits.start()
        if self._fits.count > 1:  # plugins have the state of an earlier run
            self.resolved = resolve(replace(self.recipe, train=self._train), objects=[*self._objects, self.task])

        def execute() -> dict[str, Any]:
            with self._fits.open_run(self.resolved, resume) as self.run:
                # later runs leave out the same selected plugins
                self.resolved = replace(self.resolved, recipe=self.run.recipe, plugins=self.run.plugins)
                summary = lifecycle.execute(self.run)
            self._fits.finish(self.run)
            return summary

        return runs.call(self.task, execute)

    def validate(self, data: Any = None) -> dict[str, float]:
        """Evaluate the model as it is, without training: ``{"loss": ..., "accuracy": ...}``. Every process must call
        it.

        It works before and after ``fit``, with the plugins that `fastloop evaluate` uses, such as ``amp``.

        Args:
            data: A ``DataLoader`` or a dataset; None: ``eval_loader``.

        Raises:
            UsageError: There is nothing to evaluate.
            Exception: The original exception of user code, as in ``fit``.
        """
        if data is None and VALIDATION not in self.task.splits:
            raise UsageError(
                "found no data.",
                code="no-dataset",
                place="validate",
                remedy="Pass a loader or a dataset, or eval_loader= to Trainer.",
            )
        task = self.task if data is None else self._with_split(VALIDATION, data)

        def evaluate() -> dict[str, float]:
            with self._inference(task, VALIDATION) as run:
                loop.evaluate(run, VALIDATION)
                return run.state.metrics[VALIDATION]

        return runs.call(task, evaluate)

    def predict(self, data: Any) -> dict[str, Any]:
        """The model's outputs for each sample, in the order of the dataset, without training. Every process must call
        it.

        A model that returns a tensor gives ``{"output": tensor}``. An object or mapping gives its tensors by name, such
        as ``logits``, without the loss. Samples need no labels: of ``(inputs, targets)``, only the inputs are used.

        Args:
            data: A dataset, or a ``DataLoader``, whose batch size, collator and workers are used. Its order must be
                that of the dataset, or shuffled.

        Returns:
            Name -> (samples, ...) tensor on the CPU; a list of tensors, if the samples' shapes differ.

        Raises:
            UsageError: The loader's sampler leaves samples out or repeats them, or the model returned no outputs.
            Exception: The original exception of user code, as in ``fit``.
        """
        task = self._with_split(PREDICT, data, keeps_order=True)

        def predict() -> dict[str, Any]:
            with self._inference(task, PREDICT) as run:
                return runs.stack(predict_dataset(run, run.eval_loaders[PREDICT]))

        return runs.call(task, predict)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the model, and ``processing_class``, as ``fit`` writes them into the run folder's ``model/``. Every
        process must call it.

        A model with ``save_pretrained`` is written by it; another one as ``model.safetensors``.

        Raises:
            OSError: The folder cannot be written.
        """
        path = Path(folder)

        def save() -> Path:
            with nullcontext(self.run) if hasattr(self, "run") else self._inference(self.task, TRAIN) as run:
                run.hooks.export_model(run=run, folder=path)
                if run.is_main:
                    apply_umask(path)
                run.processes.barrier()
            return path

        return runs.call(self.task, save)

    def _with_split(self, split: str, data: Any, keeps_order: bool = False) -> TrainerTask:
        loader = read_loader("data", data, self._has_batch_size)
        return self.task.with_split(split, runs.in_order(loader) if keeps_order else loader)

    def _inference(self, task: TrainerTask, split: str) -> AbstractContextManager[Run]:
        recipe = replace(self.recipe, train=self._train)
        return runs.inference(recipe, [plugin for plugin in self._objects if plugin.for_inference], task, split)
