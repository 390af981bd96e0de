"""The names that other trainers give to settings, and what a recipe has in their place: for messages."""

from __future__ import annotations

from collections.abc import Mapping

SCHEDULE = "List the plugin lr-scheduler, such as {lr-scheduler: {schedule: linear, warmup: 0.06}}."
PRECISION = "List the plugin amp, such as {amp: {dtype: bf16}}."
BATCH = (
    "Set train.batch_size, the samples of an optimizer step over all processes, and train.micro_batch_size, those that "
    "a process computes at once."
)
EVALUATION = "Set train.evaluate_every: epoch, or a number of steps."
SAVING = "Set train.save_every: epoch, or a number of steps."
BEST = "List the plugin checkpoint-best, such as {checkpoint-best: {monitor: accuracy}}."
TRACKER = "List a tracker in plugins, such as tensorboard, mlflow or wandb."

IN_TRAIN: Mapping[str, str] = {
    "accumulate_grad_batches": BATCH,
    "bf16": PRECISION,
    "dataloader_drop_last": "Set train.drop_last.",
    "dataloader_num_workers": "List the plugin dataloader-workers.",
    "ddp_timeout": "Set the option timeout of the strategy, such as {ddp: {timeout: 2h}}.",
    "eval_steps": EVALUATION,
    "eval_strategy": EVALUATION,
    "evaluation_strategy": EVALUATION,
    "fp16": PRECISION,
    "gradient_accumulation_steps": BATCH,
    "gradient_checkpointing": "List the plugin activation-checkpointing.",
    "gradient_clip_val": "Set train.max_grad_norm.",
    "group_by_length": "List the plugin length-bucketing.",
    "label_smoothing_factor": (
        "Set the option loss of a classifier or of the task module, such as {name: cross_entropy, label_smoothing: "
        "0.1}. Tasks that generate text have none."
    ),
    "learning_rate": "Set train.lr.",
    "load_best_model_at_end": BEST,
    "logging_steps": "Set train.log_every, in steps.",
    "lr_scheduler_type": SCHEDULE,
    "max_epochs": "Set train.epochs.",
    "metric_for_best_model": BEST,
    "num_epochs": "Set train.epochs.",
    "num_train_epochs": "Set train.epochs.",
    "optim": "Set train.optimizer, such as SGD.",
    "output_dir": "Set output, beside train.",
    "per_device_eval_batch_size": "Set train.eval_batch_size.",
    "per_device_train_batch_size": BATCH,
    "precision": PRECISION,
    "report_to": TRACKER,
    "save_steps": SAVING,
    "save_strategy": SAVING,
    "save_total_limit": "Set train.keep_checkpoints.",
    "torch_compile": "List the plugin compile.",
    "warmup_ratio": SCHEDULE,
    "warmup_steps": SCHEDULE,
}
"""Argument of transformers' ``TrainingArguments`` or of Lightning's ``Trainer`` -> the remedy for it as a key of
``train``."""
