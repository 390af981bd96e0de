"""The arguments of ``Trainer`` that it does not have: other libraries' names, and typing errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from fastloop import UsageError
from fastloop.errors import did_you_mean
from fastloop.recipe import Train

INSTEAD = {
    "args": "Give the training settings as arguments of Trainer, such as epochs=3 and batch_size=16.",
    "callbacks": "Give plugins=[...]: a class with hooks, or transformers-callbacks for callbacks of transformers.",
    "compute_metrics": 'Give metrics={"NAME": metric} with metrics of torchmetrics.',
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


def check_arguments(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise an error for the first argument that is neither one of ``Trainer`` nor a key of ``train``.

    Args:
        given: Names of the keyword arguments that ``Trainer`` does not declare.
        known: Names of those that it declares.

    Raises:
        UsageError: Names what serves instead, or the nearest name.
    """
    keys = [field.name for field in dataclasses.fields(Train)]
    for name in given:
        if name in keys:
            continue
        instead = INSTEAD.get(name)
        if instead is None:
            instead = did_you_mean(name, [*known, *keys]).strip()
        raise UsageError(f"there is no argument {name!r}. {instead}", code="unknown-argument", place="Trainer")


def check_metrics(metrics: Mapping[str, Any] | None) -> None:
    """Raise an error for a metric that torchmetrics cannot update, such as a function of arrays.

    Raises:
        UsageError: Names the metric, and a class that computes a function of all predictions.
    """
    from torchmetrics import Metric

    for name, metric in (metrics or {}).items():
        if not isinstance(metric, Metric):
            raise UsageError(
                code="wrong-type",
                place=f"Trainer: metrics[{name!r}]",
                found=str(type(metric).__name__),
                expected=(
                    "a metric of torchmetrics, such as torchmetrics.classification.MulticlassF1Score(num_classes=3)"
                ),
                remedy=(
                    "For a function of your own, write a subclass of torchmetrics.Metric with update(predictions, "
                    "targets) and compute()."
                ),
            )
