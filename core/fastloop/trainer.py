"""The Python API, for code that already has a model and data loaders.

from fastloop import Trainer
summary = Trainer(model, train_loader, eval_loader, plugins=["amp", {"ema": {"decay": 0.99}}], epochs=3).fit()
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.utils.data import BatchSampler, IterableDataset, default_collate

from fastloop.data.user_loader import UserLoader, read_loader
from fastloop.errors import PluginCrash, UsageError, UserCodeError, did_you_mean
from fastloop.hooks import PluginSet
from fastloop.lifecycle import build, execute
from fastloop.plugin import Plugin, hookimpl
from fastloop.recipe import Recipe, make_recipe
from fastloop.registry import resolve
from fastloop.run import Run
from fastloop.state import DataLoaderDraft, Output

if TYPE_CHECKING:
    from torchmetrics import Metric

log = logging.getLogger("fastloop")


class TrainerTask(Plugin):
    """The task of ``Trainer``: the user's model, data, loss and metrics."""

    name = "trainer"
    slot = "task"
    fallback_hooks: tuple[str, ...] = ("compute_loss",)

    def __init__(
        self,
        model: nn.Module,
        splits: Mapping[str, UserLoader],
        loss: Callable[[Any, Any], Tensor] | None,
        metrics: Mapping[str, Metric] | None,
        processing_class: Any,
    ) -> None:
        super().__init__()
        self.model, self.splits, self.loss, self.metrics, self.processing_class = model, splits, loss, metrics, processing_class
        self.has_warned = False
        if not metrics:
            self.fallback_hooks = (*self.fallback_hooks, "build_metrics")
        if all(loader.sampler is None for loader in splits.values()):  # no loaders, only datasets
            self.fallback_hooks = (*self.fallback_hooks, "build_sampler", "build_collator")

    @hookimpl
    def configure_dataloader(self, draft: DataLoaderDraft) -> None:
        for split, loader in self.splits.items():
            if loader.reading:
                draft.suggest(split, **loader.reading)

    @hookimpl
    def build_datasets(self) -> Mapping[str, Any]:
        return {split: loader.dataset for split, loader in self.splits.items()}

    @hookimpl
    def build_sampler(self, split: str) -> BatchSampler | None:
        return self.splits[split].sampler

    @hookimpl
    def build_collator(self, split: str) -> Callable[[list[Any]], Any]:
        return self.splits[split].collate_fn or self.splits["train"].collate_fn or default_collate

    @hookimpl
    def build_model(self) -> nn.Module:
        return self.model

    @hookimpl
    def build_metrics(self) -> Any:
        from torchmetrics import MetricCollection

        return MetricCollection(dict(self.metrics)) if self.metrics else None

    @hookimpl
    def check_run(self, run: Run) -> None:
        for split, loader in self.splits.items():
            for name, value in loader.reading.items():
                plugin, used = run.loader_settings.writers.get(name), getattr(run.loader_settings, name)
                if plugin is not None and used != value and loader.reading["num_workers"]:
                    log.info("%s: the loader's %s=%r is overridden by plugin %r: %r", split, name, value, plugin, used)
        sampler = run.train_loader.sampler
        if sampler is not None and sampler.arrange is not None and self.splits["train"].sampler is not None:
            log.info("train: plugin %r arranges the samples: the loader's order is not kept", run.loader_settings.writers["arrange"])
        elif sampler is not None and sampler.user_order is not None:
            log.info("train: samples come in the order of the loader's %s", sampler.user_order.name)

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: Any) -> Output:
        output = forward(model, batch, self.loss)
        if self.loss is not None and not self.has_warned and isinstance(batch, Mapping):
            self.has_warned = True
            log.warning(
                "loss= is not used: batches are mappings, and %s returns its own loss. Leave loss out, or let the collator return "
                "(inputs, targets)",
                type(self.model).__name__,
            )
        return output

    @hookimpl(wrapper=True)
    def export_model(self, run: Run, folder: Path) -> Generator[None, Any, Any]:
        result = yield
        if run.is_main and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        return result


def forward(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> Output:
    """Compute the loss of a batch in one of two common forms.

    * a mapping: ``model(**batch)`` returns an object or mapping with ``loss`` (and ``logits``), like Hugging Face models;
    * ``(inputs, targets)``: ``loss(model(inputs), targets)``.

    Raises:
        UsageError: The batch has another form, or the model returned no loss.
    """
    if isinstance(batch, Mapping):
        try:
            result = model(**batch)
        except TypeError as error:
            _check_arguments(model, batch, error)
            raise
        read: Callable[[str], Any] = result.get if isinstance(result, Mapping) else lambda name: getattr(result, name, None)
        batch_loss = read("loss")
        if batch_loss is None:
            raise UsageError(
                f"the model returned no loss for a batch with the keys {', '.join(map(str, batch))}.{_label_hint(batch)} "
                "Put the labels into the batch, or return an object with .loss."
            )
        return Output(batch_loss, read("logits"), batch.get("labels"))
    if isinstance(batch, Sequence) and len(batch) == 2 and loss is not None:
        inputs, targets = batch
        predictions = model(inputs)
        return Output(loss(predictions, targets), predictions, targets)
    raise UsageError(
        f"cannot tell how to compute a loss from a batch of type {type(batch).__name__}. "
        "Expected a mapping for model(**batch), or (inputs, targets) and a loss function."
    )


def _label_hint(batch: Mapping[str, Any]) -> str:
    """Advice to rename labels whose name Hugging Face models do not read."""
    similar = [name for name in ("label", "label_ids", "target", "targets") if name in batch]
    if "labels" in batch or not similar:
        return ""
    return f" Hugging Face models compute a loss from 'labels': rename {similar[0]!r} to 'labels' in the dataset or the collator."


def _check_arguments(model: nn.Module, batch: Mapping[str, Any], error: TypeError) -> None:
    """Raise a clearer error if the batch's keys do not match the arguments of the model's ``forward``.

    Raises:
        UsageError: They do not match.
    """
    signature = inspect.signature(extract_model_from_parallel(model).forward)
    try:
        signature.bind(**batch)
    except TypeError:
        unknown = [name for name in batch if name not in signature.parameters]
        hint = _label_hint(batch) or (did_you_mean(unknown[0], signature.parameters) if unknown else "")
        raise UsageError(f"the model's forward does not take a batch with the keys {', '.join(map(str, batch))}: {error}.{hint}") from error


class Trainer:
    """Train your own model, with plugins.

    Args:
        model: Any module. For batches that are mappings, it must return an object with ``.loss``. For ``(inputs, targets)``, pass ``loss``.
        train_loader: A ``DataLoader``, or a dataset together with ``batch_size=``. The loader's batch size is that of an optimizer step,
            over all processes. fastloop keeps the loader's collator, order, ``drop_last`` and workers, and refuses settings that it
            cannot keep: docs/checks/python.md has a table. ``shuffle=True`` without a generator shuffles by ``seed`` and epoch.
        eval_loader: Likewise; evaluated according to ``train.evaluate_every``. A dataset uses the collator of ``train_loader``.
        test_loader: Likewise; evaluated once, at the end.
        plugins: Names, files or one-key mappings as in a recipe, or plugin objects. ``{"progress": False}`` disables a default plugin.
        loss: ``loss(predictions, targets)``, such as ``torch.nn.functional.cross_entropy``.
        metrics: Name -> torchmetrics metric, updated with ``(predictions, targets)``.
        processing_class: A tokenizer, image processor or the like, saved beside the exported model by its ``save_pretrained``.
        pad_to_multiple_of: The collator pads lengths to a multiple of this many tokens. Plugins that count tokens need to know.
        output: The run folder.
        resume: A run folder or checkpoint to resume from. True: resume from ``output`` if it holds a checkpoint, else start a new run.
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
        metrics: Mapping[str, Metric] | None = None,
        processing_class: Any = None,
        pad_to_multiple_of: int | None = None,
        output: str | Path = "runs/run",
        resume: bool | str | Path = False,
        **train: Any,
    ) -> None:
        given = {
            "train": ("train_loader", train_loader),
            "validation": ("eval_loader", eval_loader),
            "test": ("test_loader", test_loader),
        }
        splits = {split: read_loader(name, loader) for split, (name, loader) in given.items() if loader is not None}
        if processing_class is not None and not hasattr(processing_class, "save_pretrained"):
            raise UsageError(
                f"processing_class: {type(processing_class).__name__} has no save_pretrained. Expected a tokenizer or image processor."
            )
        if (sampler := splits["train"].sampler) is not None:
            train.setdefault("batch_size", sampler.batch_size)
        if isinstance(splits["train"].dataset, IterableDataset) and "max_steps" not in train:
            train.setdefault("epochs", 1)
        named = [plugin for plugin in plugins if not isinstance(plugin, Plugin)]
        objects = [plugin for plugin in plugins if isinstance(plugin, Plugin)]
        data = {} if pad_to_multiple_of is None else {"pad_to_multiple_of": pad_to_multiple_of}
        self.recipe: Recipe = make_recipe({"data": data, "train": train, "plugins": named, "output": str(output)})
        self.task = TrainerTask(model, splits, loss, metrics, processing_class)
        self.resolution: PluginSet = resolve(self.recipe, objects=[*objects, self.task])
        self.resume: Path | None = Path(output) if resume is True else Path(resume) if resume else None

    def fit(self) -> dict[str, Any]:
        """Train, test and export. Returns the summary, which is also ``summary.json`` in the run folder.

        Raises:
            FastloopError: The run failed.
            Exception: The original exception of the model, the loss, a metric or other user code.
        """
        try:
            self.run = build(self.recipe, self.resolution, self.resume)
            return execute(self.run)
        except (PluginCrash, UserCodeError) as error:
            failure = error  # raise outside of the handler, so that the cause has no context
        cause = failure.__cause__
        if cause is None or (isinstance(failure, PluginCrash) and failure.plugin != self.task.name):
            raise failure
        if isinstance(failure, UserCodeError):
            cause.add_note(f"fastloop: your code failed at {str(failure).partition(': ')[0]}")
        raise cause
