"""The arguments of ``Trainer`` that it does not have: other libraries' names, and typing errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, UsageError
from fastloop.errors import did_you_mean
from fastloop.recipe import Train

if TYPE_CHECKING:
    from torchmetrics import Metric

INSTEAD = {
    "args": "Give the training settings as arguments of Trainer, such as epochs=3 and batch_size=16.",
    "callbacks": (
        "Give plugins=[...] with an object of a class with hooks. For callbacks of transformers, that is "
        "TransformersCallbacks(callback, ...) of the package fastloop-migrate."
    ),
    "collate_fn": "Give a DataLoader with this collate_fn as train_loader.",
    "compute_metrics": (
        'Give metrics={"NAME": function}, where function(predictions, targets) computes a number from numpy arrays, '
        "or metrics of torchmetrics."
    ),
    "criterion": "Give loss=function(predictions, targets).",
    "data_collator": "Give a DataLoader with this collate_fn as train_loader.",
    "dataloader_num_workers": "Give a DataLoader with num_workers as train_loader.",
    "devices": 'Start the script by `accelerate launch`, or give device="cpu" for one device.',
    "eval_dataset": "Give it as eval_loader.",
    "eval_steps": "Give evaluate_every, in steps.",
    "eval_strategy": 'Give evaluate_every: "epoch", or a number of steps.',
    "fp16": 'Give plugins=[{"amp": {"dtype": "fp16"}}].',
    "bf16": 'Give plugins=[{"amp": {"dtype": "bf16"}}].',
    "gradient_accumulation_steps": "Give batch_size, the samples of an optimizer step, and micro_batch_size.",
    "gradient_checkpointing": 'Give plugins=["activation-checkpointing"].',
    "label_smoothing_factor": "Give loss=torch.nn.CrossEntropyLoss(label_smoothing=0.1).",
    "learning_rate": "Give lr.",
    "load_best_model_at_end": 'Give plugins=["checkpoint-best"].',
    "logger": "Give plugins=[...] with a tracker, such as tensorboard, mlflow or wandb.",
    "logging_steps": "Give log_every, in steps.",
    "lr_scheduler_type": 'Give plugins=[{"lr-scheduler": {"schedule": "cosine"}}].',
    "max_epochs": "Give epochs.",
    "metric_for_best_model": 'Give plugins=[{"checkpoint-best": {"monitor": "accuracy"}}].',
    "num_train_epochs": "Give epochs.",
    "optim": 'Give optimizer, such as "SGD".',
    "optimizers": "Give optimizer and scheduler.",
    "output_dir": "Give output.",
    "per_device_train_batch_size": "Give batch_size, the samples of an optimizer step over all processes.",
    "precision": 'Give plugins=[{"amp": {"dtype": "bf16"}}].',
    "report_to": "Give plugins=[...] with a tracker, such as tensorboard, mlflow or wandb.",
    "resume_from_checkpoint": "Give resume.",
    "save_steps": "Give save_every, in steps.",
    "save_strategy": 'Give save_every: "epoch", or a number of steps.',
    "save_total_limit": "Give keep_checkpoints.",
    "strategy": "Give plugins=[...] with ddp, fsdp or deepspeed.",
    "tokenizer": "Give it as processing_class.",
    "torch_compile": 'Give plugins=["compile"].',
    "train_dataset": "Give it as train_loader, with batch_size.",
    "warmup_ratio": 'Give plugins=[{"lr-scheduler": {"schedule": "cosine", "warmup": 0.06}}].',
    "warmup_steps": 'Give plugins=[{"lr-scheduler": {"schedule": "cosine", "warmup": 100}}].',
}
"""Argument of another trainer -> what fastloop has in its place."""


def check_arguments(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise an error for the arguments that are neither those of ``Trainer`` nor keys of ``train``.

    Args:
        names: Names of the keyword arguments that ``Trainer`` does not declare.
        known: Names of those that it declares.

    Raises:
        UsageError: Names what serves instead of each, or the nearest name.
    """
    keys = [field.name for field in dataclasses.fields(Train)]
    problems = []
    for name in names:
        if name in keys:
            continue
        instead = INSTEAD.get(name)
        if instead is None:
            instead = did_you_mean(name, [*known, *keys]).strip()
        problems.append(f"there is no argument {name!r}. {instead}")
    if problems:
        text = problems[0] if len(problems) == 1 else "\n  ".join(["several arguments are wrong.", *problems])
        raise UsageError(text, code="unknown-argument", place="Trainer")


def check_plugins(plugins: Iterable[Any]) -> None:
    """Raise an error for a plugin that is neither named nor an object.

    Raises:
        UsageError: Names its place, and how to give a class or a callback of transformers.
    """
    for number, plugin in enumerate(plugins):
        if isinstance(plugin, str | Mapping | Plugin):
            continue
        if isinstance(plugin, type) and issubclass(plugin, Plugin):
            kind = f"the class {plugin.__name__}"
            remedy = f"Give an object of it: {plugin.__name__}()."
        else:
            kind = f"an object of {type(plugin).__name__}"
            remedy = (
                "A callback of transformers is run by a plugin of the package fastloop-migrate: from fastloop_migrate "
                "import TransformersCallbacks; plugins=[TransformersCallbacks(callback)]."
            )
        raise UsageError(
            code="wrong-type",
            place=f"Trainer: plugins[{number}]",
            found=kind,
            expected="a name, one {name: {option: value}}, or an object of a subclass of fastloop.Plugin",
            remedy=remedy,
        )


def as_metrics(metrics: Any) -> dict[str, Metric] | None:
    """The metrics of ``Trainer``, a mapping or a collection, with functions of arrays as metrics of torchmetrics.

    Raises:
        UsageError: ``metrics`` is no mapping of names, or one of its values is neither a metric nor a function.
    """
    from torchmetrics import Metric, MetricCollection

    from fastloop_tools.trainer.function_metric import FunctionMetric

    if metrics is None:
        return None
    if isinstance(metrics, MetricCollection):
        metrics = dict(metrics.items())
    if not isinstance(metrics, Mapping):
        raise UsageError(
            code="wrong-type",
            place="Trainer: metrics",
            found=type(metrics).__name__,
            expected="{NAME: metric}",
            remedy='Give each a name: metrics={"f1": function}, where function(predictions, targets) returns a number.',
        )
    made: dict[str, Metric] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Metric):
            made[name] = metric
        elif callable(metric) and not isinstance(metric, type):
            made[name] = FunctionMetric(metric)
        else:
            raise UsageError(
                code="wrong-type",
                place=f"Trainer: metrics[{name!r}]",
                found=f"the class {metric.__name__}" if isinstance(metric, type) else type(metric).__name__,
                expected="a metric of torchmetrics, or a function(predictions, targets) of numpy arrays",
                remedy="Give an object, such as torchmetrics.classification.MulticlassF1Score(num_classes=3).",
            )
    return made
