"""The Python API, for someone who has a model and loaders already.

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

from fastloop.data.loader_settings import LoaderSettings, read_loader
from fastloop.errors import PluginCrash, UsageError, UserCodeError, did_you_mean
from fastloop.lifecycle import build, execute
from fastloop.plugin import Plugin, hookimpl
from fastloop.recipe import make_recipe
from fastloop.registry import resolve
from fastloop.run import Run
from fastloop.state import DataLoaderDraft, Output

if TYPE_CHECKING:
    from torchmetrics import Metric

log = logging.getLogger("fastloop")


class TrainerTask(Plugin):
    """The task of ``Trainer``: the model, data, loss and metrics that it was given."""

    name = "trainer"
    slot = "task"
    fallback_hooks: tuple[str, ...] = ("compute_loss",)

    def __init__(
        self,
        model: nn.Module,
        splits: Mapping[str, LoaderSettings],
        loss: Callable[[Any, Any], Tensor] | None,
        metrics: Mapping[str, Metric] | None,
        processing_class: Any,
    ) -> None:
        super().__init__()
        self.model, self.splits, self.loss, self.metrics, self.processing_class = model, splits, loss, metrics, processing_class
        self.warned = False
        if not metrics:
            self.fallback_hooks = (*self.fallback_hooks, "build_metrics")
        if all(settings.sampler is None for settings in splits.values()):  # datasets alone
            self.fallback_hooks = (*self.fallback_hooks, "build_sampler", "build_collator")

    @hookimpl
    def configure_dataloader(self, draft: DataLoaderDraft) -> None:
        for split, settings in self.splits.items():
            if settings.reading:
                draft.suggest(split, **settings.reading)

    @hookimpl
    def build_datasets(self) -> Mapping[str, Any]:
        return {split: settings.dataset for split, settings in self.splits.items()}

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
        for split, settings in self.splits.items():
            for name, value in settings.reading.items():
                plugin, used = run.loader_settings.writers.get(name), getattr(run.loader_settings, name)
                if plugin is not None and used != value and settings.reading["num_workers"]:
                    log.info("%s: the loader's %s=%r is overridden by plugin %r: %r", split, name, value, plugin, used)
        given, used = self.splits["train"].sampler, run.train_loader.sampler
        if given is not None and used is not None and used.arrange is not None:
            log.info("train: plugin %r arranges the samples: the loader's order is not kept", run.loader_settings.writers["arrange"])
        elif used is not None and used.draw is not None:
            log.info("train: samples come in the order of the loader's %s", used.draw.name)

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: Any) -> Output:
        output = forward(model, batch, self.loss)
        if self.loss is not None and not self.warned and isinstance(batch, Mapping):
            self.warned = True
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
    """The two common shapes of a batch.

    * a mapping: ``model(**batch)`` returns an object with ``.loss`` (and ``.logits``), as Hugging Face models do;
    * ``(inputs, targets)``: ``loss(model(inputs), targets)``.

    Raises:
        UsageError: Neither; says what was found.
    """
    if isinstance(batch, Mapping):
        try:
            result = model(**batch)
        except TypeError as error:
            _check_arguments(model, batch, error)
            raise
        found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
        if found is None:
            raise UsageError(
                f"the model returned no loss for a batch with the keys {', '.join(map(str, batch))}.{_label_hint(batch)} "
                "Put the labels into the batch, or return an object with .loss."
            )
        logits = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
        return Output(found, logits, batch.get("labels"))
    if isinstance(batch, Sequence) and len(batch) == 2 and loss is not None:
        inputs, targets = batch
        predictions = model(inputs)
        return Output(loss(predictions, targets), predictions, targets)
    raise UsageError(
        f"cannot tell how to compute a loss from a batch of type {type(batch).__name__}. "
        "Expected a mapping for model(**batch), or (inputs, targets) and a loss function."
    )


def _label_hint(batch: Mapping[str, Any]) -> str:
    """What to do about labels under a name that Hugging Face models do not read."""
    near = [name for name in ("label", "label_ids", "target", "targets") if name in batch]
    if "labels" in batch or not near:
        return ""
    return f" Hugging Face models compute a loss from 'labels': rename {near[0]!r} to 'labels' in the dataset or the collator."


def _check_arguments(model: nn.Module, batch: Mapping[str, Any], error: TypeError) -> None:
    """Say so where a batch's keys are not the arguments of the model's ``forward``.

    Raises:
        UsageError: They are not; names them.
    """
    signature = inspect.signature(extract_model_from_parallel(model).forward)
    try:
        signature.bind(**batch)
    except TypeError:
        unknown = [name for name in batch if name not in signature.parameters]
        hint = _label_hint(batch) or (did_you_mean(unknown[0], signature.parameters) if unknown else "")
        raise UsageError(f"the model's forward does not take a batch with the keys {', '.join(map(str, batch))}: {error}.{hint}") from error


class Trainer:
    """Train a model of your own, with plugins.

    Args:
        model: Any module. With a mapping as batch it returns an object with ``.loss``; with ``(inputs, targets)`` give ``loss``.
        train_loader: A ``DataLoader``, or a dataset, with ``batch_size=`` in ``train``. Of a loader, everything is kept or refused by name:
            its dataset, collator, batch size (that of an optimizer step, over all processes), order (``shuffle=False`` or a sampler),
            ``drop_last`` and workers. ``shuffle=True`` without a generator draws the order from ``seed`` and the epoch. Where a plugin
            sets the workers, its options count instead of the loader's. The table is in docs/checks/python.md.
        eval_loader: Likewise; evaluated as ``train.evaluate_every`` says. A dataset is collated as ``train_loader`` is.
        test_loader: Likewise; evaluated once, at the end.
        plugins: As a recipe lists them: names, files, one-key mappings; or plugin objects. ``{"progress": False}`` leaves one out.
        loss: ``loss(predictions, targets)``, such as ``torch.nn.functional.cross_entropy``.
        metrics: Name -> torchmetrics metric, updated with ``(predictions, targets)``.
        processing_class: A tokenizer, image processor or the like, written beside the model by its ``save_pretrained``. A model that has
            ``save_pretrained`` is exported by it, so that ``from_pretrained`` loads the run folder's ``model/``.
        pad_to_multiple_of: Tokens: the collator pads lengths to a multiple of this. Plugins that count tokens need to know.
        output: The run folder.
        resume: A run folder or checkpoint to go on from; True means ``output``, and the beginning where that holds no checkpoint yet.
        train: Any key of a recipe's ``train``: ``epochs``, ``lr``, ``seed``, ``max_grad_norm``, ...

    Raises:
        UsageError: Anything wrong with what was asked.
    """

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
        loaders = {"train": train_loader, "validation": eval_loader, "test": test_loader}
        names = {"train": "train_loader", "validation": "eval_loader", "test": "test_loader"}
        splits = {split: read_loader(names[split], loader) for split, loader in loaders.items() if loader is not None}
        if processing_class is not None and not hasattr(processing_class, "save_pretrained"):
            raise UsageError(
                f"processing_class: {type(processing_class).__name__} has no save_pretrained. Expected a tokenizer or the like."
            )
        if (sampler := splits["train"].sampler) is not None:
            train.setdefault("batch_size", sampler.batch_size)
        if isinstance(splits["train"].dataset, IterableDataset) and "max_steps" not in train:
            train.setdefault("epochs", 1)
        named = [plugin for plugin in plugins if not isinstance(plugin, Plugin)]
        data = {} if pad_to_multiple_of is None else {"pad_to_multiple_of": pad_to_multiple_of}
        self.recipe = make_recipe({"data": data, "train": train, "plugins": named, "output": str(output)})
        self.task = TrainerTask(model, splits, loss, metrics, processing_class)
        self.resolution = resolve(self.recipe, objects=[*(plugin for plugin in plugins if isinstance(plugin, Plugin)), self.task])
        self.resume = Path(output) if resume is True else Path(resume) if resume else None

    def fit(self) -> dict[str, Any]:
        """Train, test, export. Returns the summary, which is also ``summary.json`` in the run folder.

        Raises:
            FastloopError: The run failed.
            Exception: What the model, the loss, a metric or other code of the user's raised, as it was raised.
        """
        try:
            self.run = build(self.recipe, self.resolution, self.resume)
            return execute(self.run)
        except (PluginCrash, UserCodeError) as error:
            failure = error
        cause = failure.__cause__
        if cause is None or (isinstance(failure, PluginCrash) and failure.plugin != self.task.name):
            raise failure
        if isinstance(failure, UserCodeError):
            cause.add_note(f"fastloop: your code failed at {str(failure).partition(': ')[0]}")
        raise cause
