"""The Python API, for someone who has a model and loaders already.

from fastloop import Trainer
summary = Trainer(model, train_loader, eval_loader, plugins=["amp", {"ema": {"decay": 0.99}}], epochs=3).fit()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from fastloop.errors import UsageError
from fastloop.plugin import Plugin, hookimpl
from fastloop.recipe import make_recipe
from fastloop.registry import resolve
from fastloop.run import Run
from fastloop.state import Output

if TYPE_CHECKING:
    from torchmetrics import Metric


class Given(Plugin):
    """The task of ``Trainer``: the model, data, loss and metrics that it was given."""

    name = "given"
    slot = "task"
    fallback_hooks: tuple[str, ...] = ("compute_loss",)

    def __init__(
        self,
        model: nn.Module,
        datasets: Mapping[str, Any],
        collator: Callable[[list[Any]], Any],
        loss: Callable[[Any, Any], Tensor] | None,
        metrics: Mapping[str, Metric] | None,
    ) -> None:
        super().__init__()
        self.model, self.datasets, self.collator, self.loss, self.metrics = model, datasets, collator, loss, metrics
        if not metrics:
            self.fallback_hooks = (*self.fallback_hooks, "build_metrics")

    @hookimpl
    def build_datasets(self) -> Mapping[str, Any]:
        return self.datasets

    @hookimpl
    def build_collator(self) -> Callable[[list[Any]], Any]:
        return self.collator

    @hookimpl
    def build_model(self) -> nn.Module:
        return self.model

    @hookimpl
    def build_metrics(self) -> Any:
        from torchmetrics import MetricCollection

        return MetricCollection(dict(self.metrics)) if self.metrics else None

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: Any) -> Output:
        return forward(model, batch, self.loss)


def forward(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> Output:
    """The two common shapes of a batch.

    * a mapping: ``model(**batch)`` returns an object with ``.loss`` (and ``.logits``), as Hugging Face models do;
    * ``(inputs, targets)``: ``loss(model(inputs), targets)``.

    Raises:
        UsageError: Neither; says what was found.
    """
    if isinstance(batch, Mapping):
        result = model(**batch)
        found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
        if found is None:
            raise UsageError("the model returned no loss. Put the labels into the batch, or return an object with .loss.")
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


class Trainer:
    """Train a model of your own, with plugins.

    Args:
        model: Any module. With a mapping as batch it returns an object with ``.loss``; with ``(inputs, targets)`` give ``loss``.
        train_loader: A ``DataLoader``: its dataset, collator, batch size (that of an optimizer step, over all processes)
            are taken over; the order is fastloop's own, so that a run can resume in it. Or a dataset, with ``batch_size=`` in ``train``.
        eval_loader: Evaluated as ``train.evaluate_every`` says.
        test_loader: Evaluated once, at the end.
        plugins: As a recipe lists them: names, files, one-key mappings; or plugin objects. ``{"progress": False}`` leaves one out.
        loss: ``loss(predictions, targets)``, such as ``torch.nn.functional.cross_entropy``.
        metrics: Name -> torchmetrics metric, updated with ``(predictions, targets)``.
        output: The run folder.
        resume: A run folder or checkpoint to go on from; True means ``output``, and the beginning where that holds no checkpoint yet.
        train: Any key of a recipe's ``train``: ``epochs``, ``lr``, ``seed``, ``clip_norm``, ...

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
        output: str | Path = "runs/run",
        resume: bool | str | Path = False,
        **train: Any,
    ) -> None:
        loaders = {"train": train_loader, "evaluate": eval_loader, "test": test_loader}
        datasets = {split: getattr(loader, "dataset", loader) for split, loader in loaders.items() if loader is not None}
        collator = getattr(train_loader, "collate_fn", torch.utils.data.default_collate)
        if isinstance(train_loader, DataLoader):
            if train_loader.batch_size is None and "batch_size" not in train:
                raise UsageError("train_loader has no batch_size. Give batch_size=, the samples of an optimizer step.")
            if isinstance(train_loader.sampler, torch.utils.data.WeightedRandomSampler | torch.utils.data.SubsetRandomSampler):
                raise UsageError(
                    f"train_loader has a {type(train_loader.sampler).__name__}, which is not kept. Give a dataset of what it draws."
                )
            train.setdefault("batch_size", train_loader.batch_size)
        if eval_loader is not None and isinstance(eval_loader, DataLoader) and eval_loader.batch_size:
            train.setdefault("eval_batch_size", eval_loader.batch_size)
        if isinstance(datasets["train"], IterableDataset) and "max_steps" not in train:
            train.setdefault("epochs", 1)
        named = [plugin for plugin in plugins if not isinstance(plugin, Plugin)]
        self.recipe = make_recipe({"train": train, "plugins": named, "output": str(output)})
        task = Given(model, datasets, collator, loss, metrics)
        self.resolution = resolve(self.recipe, objects=[*(plugin for plugin in plugins if isinstance(plugin, Plugin)), task])
        self.resume = Path(output) if resume is True else Path(resume) if resume else None

    def fit(self) -> dict[str, Any]:
        """Train, test, export. Returns the summary, which is also ``summary.json`` in the run folder."""
        self.run = Run(self.recipe, self.resolution, self.resume)
        return self.run.execute()
