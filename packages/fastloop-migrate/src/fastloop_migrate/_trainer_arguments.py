"""A recipe as ``TrainingArguments``, and the callbacks that it lists."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accelerate.state import PartialState
from fastloop import RecipeError, UsageError
from fastloop_plugins.toolkit import clause, did_you_mean, import_object, metric_modes
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import SchedulerType

if TYPE_CHECKING:
    from fastloop import Recipe, Run

ENGINE = ("accelerator_config", "deepspeed", "fsdp", "fsdp_config", "parallelism_config", "tf32", "use_cpu")
"""Fields with effects on the process when ``TrainingArguments`` are made, and prefixes of such fields."""


def find_callbacks(
    listed: Iterable[str | Mapping[str, Mapping[str, Any]]], recipe: Recipe, key: str
) -> list[tuple[type[TrainerCallback], Mapping[str, Any]]]:
    """The class and the arguments of each listed callback.

    Raises:
        RecipeError: A reference is wrong, names no ``TrainerCallback``, or has arguments that the class does not take.
    """
    callbacks: list[tuple[type[TrainerCallback], Mapping[str, Any]]] = []
    for entry in listed:
        named = {entry: {}} if isinstance(entry, str) else entry
        if len(named) != 1:
            raise RecipeError(
                code="wrong-type",
                place=f"{recipe.where}: {key}",
                found=repr(dict(named)),
                expected="one {CALLBACK: arguments}",
            )
        ((reference, arguments),) = named.items()
        cls = import_object(reference, recipe, key)
        where = f"{recipe.where}: {key}: {reference}"
        if not (isinstance(cls, type) and issubclass(cls, TrainerCallback)):
            raise RecipeError(
                f"{where} is no class of transformers' TrainerCallback.",
                code="wrong-type",
                remedy="List a class, not an object.",
            )
        try:
            inspect.signature(cls).bind(**arguments)
        except TypeError as error:
            known = ", ".join(inspect.signature(cls).parameters) or "none"
            raise RecipeError(
                f"{clause(error)}. Arguments of the class: {known}.", code="call-failed", place=where
            ) from None
        callbacks.append((cls, arguments))
    return callbacks


def check_arguments(arguments: Mapping[str, Any], recipe: Recipe, key: str) -> None:
    """Check the names of additional ``TrainingArguments``.

    Raises:
        RecipeError: There is no such field, or fastloop sets it.
    """
    known = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    for name in arguments:
        if name not in known:
            raise RecipeError(
                "no such field.",
                code="unknown-option",
                place=f"{recipe.where}: {key}.{name}",
                remedy=did_you_mean(name, known),
            )
        if name in ENGINE or name.startswith("torch_compile"):
            raise RecipeError(
                "fastloop does not take it.",
                code="unknown-option",
                place=f"{recipe.where}: {key}.{name}",
                remedy="List a plugin for it instead.",
            )


def training_arguments(run: Run, extra: Mapping[str, Any]) -> TrainingArguments:
    """The run's ``TrainingArguments``. Accelerate's shared state stays as it is.

    Args:
        extra: Fields that callbacks read and that no key of the recipe sets. They do not change the run.
    """
    train = run.recipe.train
    loader = run.train_loader
    plugins = run.recipe.plugins
    evaluation = run.eval_loaders.get("validation")
    best = plugins.get("checkpoint-best") or plugins.get("early-stopping") or {}
    schedule = (plugins.get("lr-scheduler") or {}).get("schedule", "linear")
    known = [kind.value for kind in SchedulerType]
    fields: dict[str, Any] = {
        "output_dir": str(run.folder),
        "run_name": run.folder.name,
        "report_to": "none",
        "per_device_train_batch_size": loader.micro_batch_size,
        "per_device_eval_batch_size": (evaluation or loader).micro_batch_size,
        "gradient_accumulation_steps": loader.micro_steps,
        "num_train_epochs": run.schedule.epochs or sys.maxsize,  # as Trainer has it for a stream
        "max_steps": train.max_steps or -1,
        "learning_rate": train.lr,
        "lr_scheduler_type": schedule if run.recipe.has_plugin("lr-scheduler") and schedule in known else "constant",
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm or 0.0,
        "seed": train.seed,
        "logging_steps": train.log_every,
        "save_total_limit": train.keep_checkpoints,
        "bf16": run.settings.mixed_precision == "bf16",
        "fp16": run.settings.mixed_precision == "fp16",
        "dataloader_num_workers": run.settings.num_workers,
        "metric_for_best_model": best.get("monitor", "loss"),
        "use_cpu": run.device.type == "cpu",
        "accelerator_config": {"use_configured_state": True},  # otherwise it resets the state that all share
    }
    for name, every in (("eval", train.evaluate_every if evaluation else None), ("save", train.save_every)):
        fields[f"{name}_strategy"] = "steps" if isinstance(every, int) else every or "no"
        if isinstance(every, int):
            fields[f"{name}_steps"] = every
    if "greater_is_better" not in extra:
        name = str(extra.get("metric_for_best_model") or fields["metric_for_best_model"]).removeprefix("eval_")
        fields["greater_is_better"] = _greater_is_better(run, name, best)
    PartialState(cpu=fields["use_cpu"])  # user code may have reset it
    arguments = TrainingArguments(**{**fields, **extra})
    if "load_best_model_at_end" not in extra:  # afterwards: it refuses schedules that fastloop takes
        arguments.load_best_model_at_end = run.recipe.has_plugin("checkpoint-best")
    return arguments


def _greater_is_better(run: Run, name: str, best: Mapping[str, Any]) -> bool:
    """Whether a higher value of a metric is better. Transformers would guess it by the name.

    Args:
        best: The options of the plugin that keeps the best checkpoint or stops early.

    Raises:
        UsageError: It is unknown.
    """
    mode = best.get("mode", "auto") if best.get("monitor", "loss") == name else "auto"
    if mode == "auto":
        mode = metric_modes(run).get(name)
    if mode is None:
        key = f"{run.recipe.where}: plugins.transformers-callbacks.arguments.greater_is_better"
        raise UsageError(
            f"neither the class of the metric {name!r} nor a plugin declares whether a lower or a higher value is "
            "better.",
            code="unknown-direction",
            place=key,
            remedy="Set it to true or false.",
        )
    return bool(mode == "max")
