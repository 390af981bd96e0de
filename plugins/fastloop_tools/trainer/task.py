"""The task of ``Trainer``: the user's model, data, loss, metrics and optimizer."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, default_collate

from fastloop import Batch, Output, Plugin, Run, UsageError, hookimpl
from fastloop.splits import PREDICT, TRAIN
from fastloop_plugins.tasks.shared.broadcasts import BroadcastCheck
from fastloop_plugins.tasks.shared.collate import DefaultCollator, TargetCounter, target_rule
from fastloop_plugins.tasks.shared.forward import compute_output, outputs, warn_of_unused_loss
from fastloop_plugins.tasks.shared.losses import check_mean, warn_of_untrained
from fastloop_plugins.tasks.shared.micro_batches import warn_of_other_means
from fastloop_plugins.tasks.shared.user_losses import loss_for_model
from fastloop_tools.trainer.optimizers import UserOptimizer
from fastloop_tools.trainer.user_loader import UserLoader

if TYPE_CHECKING:
    from torchmetrics import Metric

log = logging.getLogger("fastloop")


class TrainerTask(Plugin):
    """The task of ``Trainer``.

    Raises:
        UsageError: ``processing_class`` cannot be saved, or ``loss`` is no mean.
    """

    name = "trainer"
    slot = "task"

    def __init__(
        self,
        model: nn.Module,
        splits: Mapping[str, UserLoader],
        loss: Callable[[Any, Any], Tensor] | None,
        metrics: Mapping[str, Metric] | None,
        processing_class: Any,
        optimizer: UserOptimizer,
    ) -> None:
        super().__init__()
        if processing_class is not None and not hasattr(processing_class, "save_pretrained"):
            raise UsageError(
                f"{type(processing_class).__name__} has no save_pretrained.",
                code="wrong-type",
                place="processing_class",
                expected="a tokenizer or image processor",
            )
        check_mean(loss, "loss")
        self.model = model
        self.splits = splits
        self.loss = loss
        self.criterion = loss_for_model(loss, model, "loss")
        self.metrics = metrics
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.broadcasts = BroadcastCheck()
        self.has_warned = False
        has_samplers = any(loader.sampler is not None for loader in splits.values())  # otherwise only datasets
        is_given = {
            "compute_loss": False,
            PREDICT: False,
            "build_metrics": bool(metrics),
            "build_optimizer": optimizer.optimizer is not None,
            "build_scheduler": optimizer.scheduler is not None,
            "build_sampler": has_samplers,
            "build_collator": has_samplers,
        }
        self.fallback_hooks = tuple(hook for hook in is_given if not is_given[hook])

    def with_split(self, split: str, loader: UserLoader) -> TrainerTask:
        """The same task with another loader for a split."""
        splits = {**self.splits, split: loader}
        return TrainerTask(self.model, splits, self.loss, self.metrics, self.processing_class, self.optimizer)

    @hookimpl
    def configure(self) -> Mapping[str, Any]:
        return {"by_split": {split: loader.reading for split, loader in self.splits.items() if loader.reading}}

    @hookimpl
    def build_datasets(self) -> Mapping[str, Any]:
        return {split: loader.dataset for split, loader in self.splits.items()}

    @hookimpl
    def build_sampler(self, split: str) -> BatchSampler | None:
        return self.splits[split].sampler

    @hookimpl
    def build_collator(self, run: Run, split: str) -> Callable[[list[Any]], Any]:
        collate = self.splits[split].collate_fn or self.splits[TRAIN].collate_fn
        if collate in (None, default_collate):
            tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
            if not hasattr(tokenizer, "pad_token"):  # an image processor
                tokenizer = None
            remedy = (
                "Give processing_class=tokenizer, which pads token ids, or DataLoader(collate_fn=...), or let "
                "the dataset pad them."
            )
            names = inspect.signature(self.model.forward).parameters
            rule = target_rule(self.model)
            is_causal = rule is not None and rule.shifted
            if is_causal and getattr(tokenizer, "padding_side", "right") == "left":
                log.info(
                    "%s: rows are padded on the right, and not on the tokenizer's side: padding before a row would "
                    "change the loss of a causal language model",
                    split,
                )
            collate = DefaultCollator(
                tokenizer,
                remedy,
                run.settings.pad_to_multiple_of,
                names_labels=tokenizer is not None and "labels" in names and not {"label", "label_ids"} & names.keys(),
                pads_right=is_causal,
            )
        return TargetCounter(collate, self.loss, self.model)

    @hookimpl
    def build_model(self) -> nn.Module:
        _undo_preparation(self.model)
        return self.model

    @hookimpl
    def build_optimizer(self, run: Run, model: nn.Module) -> Optimizer | None:
        return self.optimizer.build(run, model)

    @hookimpl
    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        return self.optimizer.build_scheduler(optimizer)

    @hookimpl
    def build_metrics(self) -> Any:
        from torchmetrics import MetricCollection

        if not self.metrics:
            return None
        updated_by_model = {id(module) for module in self.model.modules()}
        metrics: dict[str, Metric | MetricCollection] = {}
        for name, metric in self.metrics.items():
            metrics[name] = copy.deepcopy(metric) if id(metric) in updated_by_model else metric
        return MetricCollection(metrics)

    @hookimpl
    def check_run(self, run: Run) -> None:
        warn_of_untrained(self.loss, run, "loss")
        for split, loader in self.splits.items():
            for name, value in loader.reading.items():
                plugin = run.settings.writers.get(name)
                used = getattr(run.settings, name)
                if plugin is not None and used != value and loader.reading["num_workers"]:
                    log.info("%s: the loader's %s=%r is overridden by plugin %r: %r", split, name, value, plugin, used)
        sampler = run.train_loader.sampler
        if sampler is not None and sampler.arrange is not None and self.splits[TRAIN].sampler is not None:
            log.info(
                "train: plugin %r arranges the samples: the loader's order is not kept",
                run.settings.writers["arrange"],
            )
        elif sampler is not None and sampler.user_order is not None:
            log.info(
                "train: samples come in the order of the loader's %s", getattr(sampler.user_order, "name", "sampler")
            )

    @hookimpl
    def before_step(self, run: Run, batches: list[Batch]) -> None:
        run.plugins.unsubscribe(self, "before_step")
        warn_of_other_means(run, batches, self)

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: Any) -> Output:
        output = compute_output(model, batch, self.criterion, self.broadcasts)
        if self.loss is not None and not self.has_warned:
            self.has_warned = warn_of_unused_loss(batch, output, self.model, "loss")
        return output

    @hookimpl
    def predict(self, run: Run, batch: Any) -> Mapping[str, Any]:
        return outputs(run.model, batch)

    @hookimpl(wrapper=True)
    def export_model(self, run: Run, folder: Path) -> Generator[None, Any, Any]:
        result = yield
        if run.is_main and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        return result

    @hookimpl
    def teardown(self) -> None:
        _undo_preparation(self.model)


def _undo_preparation(model: nn.Module) -> None:
    """Remove the traces of a run from the user's model.

    Accelerate prepares no model twice: without autocast or DDP, a new run would train wrongly. A prepared forward also
    refers to the model, which would keep it until Python's garbage collector happens to run.
    """
    traces = vars(model)
    traces.pop("_is_accelerate_prepared", None)
    original = traces.pop("_original_forward", None)  # before autocast
    if original is not None:
        del model.forward
        if getattr(original, "__func__", None) is not type(model).forward:
            model.forward = original
