"""DeepSpeed's configuration, built from the user's JSON file and the recipe."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import PluginError, Problem, no_code
from fastloop.errors import did_you_mean
from fastloop.problem import clause
from fastloop_plugins.strategies._launcher import Launcher

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Plugin, Run
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")

KEYS = """
activation_checkpointing aio amp autotuning bf16 bfloat16 check_overflow checkpoint comms_logger
communication_data_type compile compression_training csv_monitor data_efficiency data_types dataloader_drop_last
disable_allgather dump_state elasticity flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op
gradient_clipping gradient_predivide_factor graph_harvesting hybrid_engine load_universal_checkpoint memory_breakdown
nebula optimizer prescale_gradients scheduler seq_parallel_communication_data_type sequence_parallel_size
sparse_gradients steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size
train_micro_batch_size_per_gpu use_data_before_expert_parallelism wall_clock_breakdown wandb
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
"""Keys of DeepSpeed's JSON. DeepSpeed ignores unknown keys without a warning."""

WHOLE_TENSORS = ("Adafactor", "Adagrad", "LBFGS", "Muon", "SparseAdam")
"""Torch optimizers that need full tensors, or that DeepSpeed rebuilds without the scheduler's knowledge."""

OFFLOADS = {"offload_optimizer": "offload_optimizer", "offload_parameters": "offload_param"}
"""Option -> its section in the JSON's ``zero_optimization``."""


class Configuration:
    """The user's JSON file, if any, checked against the recipe.

    Attributes:
        file: Its name in messages: the path of the JSON file, or the recipe's.
        stage: ZeRO's stage, 0 to 3.
        half: Whether the weights themselves are in half precision; False until ``build``.

    Raises:
        PluginError: The file cannot be read, or contradicts the recipe.
    """

    def __init__(self, recipe: Recipe, plugin: Plugin) -> None:
        launcher = Launcher(recipe, plugin)
        take_over(launcher)
        self.half = False
        options: Any = plugin  # the plugin `deepspeed`
        self.options: Any = options
        self.json: dict[str, Any] = {}
        self.file = recipe.where
        if options.config is not None:
            path = recipe.find(options.config)
            self.json = read(path)
            self.file = str(path)
            if lookup(self.json, "torch_autocast.lower_precision_safe_modules"):
                no_code.refuse(f"{self.file}: torch_autocast.lower_precision_safe_modules", "it imports the classes")
        stage = options.stage
        if stage is None:
            stage = lookup(self.json, "zero_optimization.stage")
        self.stage: int = 2 if stage is None else stage
        self._compare_options()
        self._compare_training(recipe)
        self._check_stage(recipe, launcher)

    def _compare_options(self) -> None:
        """Check that the JSON has the values of the plugin's options."""
        options = self.options
        self._check_same("zero_optimization.stage", "plugins.deepspeed.stage", options.stage)
        for name, section in OFFLOADS.items():
            offloads: bool | None = getattr(options, name)
            device = None  # as the JSON has it
            if offloads is not None:
                device = "cpu" if offloads else "none"
            key = f"zero_optimization.{section}.device"
            self._check_same(key, f"plugins.deepspeed.{name} (here the device)", device)
        self._check_same("zero_optimization.overlap_comm", "plugins.deepspeed.overlap_comm", options.overlap_comm)
        for key in ("zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size"):
            self._check_same(key, "plugins.deepspeed.bucket_size", options.bucket_size)

    def _compare_training(self, recipe: Recipe) -> None:
        """Check that the JSON has the values of the recipe's training, optimizer, schedule and loss scale."""
        train = recipe.train
        self._check_same("train_batch_size", "train.batch_size", train.batch_size)
        self._check_same("train_micro_batch_size_per_gpu", "train.micro_batch_size", train.micro_batch_size)
        self._check_same("gradient_clipping", "train.max_grad_norm", train.max_grad_norm or 0.0)
        self._check_same("optimizer.type", "train.optimizer", train.optimizer_name)
        own = {"lr": train.lr, "weight_decay": train.weight_decay, **train.optimizer_arguments}
        for key in lookup(self.json, "optimizer.params") or {}:
            self._check_same(
                f"optimizer.params.{key}",
                f"train.{key}" if key in own else "the recipe's optimizer",
                own.get(key, "its own"),
            )
        for key in lookup(self.json, "scheduler.params") or {}:
            self._check_same(f"scheduler.params.{key}", "the recipe's schedule", "its own (plugin lr-scheduler)")
        self._check_same("scheduler.type", "the recipe's schedule", "its own (plugin lr-scheduler)")
        scaling = recipe.plugins.get("amp") or {}
        if "init_scale" in scaling:
            self._check_same(
                "fp16.initial_scale_power",
                "the power of plugins.amp.init_scale",
                round(math.log2(scaling["init_scale"])),
            )
        self._check_same("fp16.loss_scale_window", "plugins.amp.growth_interval", scaling.get("growth_interval"))

    def _check_stage(self, recipe: Recipe, launcher: Launcher) -> None:
        """Check that the stage exists, and that it can do what the options, the launcher and the recipe need."""
        if self.stage not in (0, 1, 2, 3):
            raise PluginError(
                f"is {self.stage!r}.",
                code="unknown-choice",
                place=f"{self.file}: zero_optimization.stage",
                expected="0, 1, 2 or 3",
            )
        for (name, section), least in zip(OFFLOADS.items(), (1, 3), strict=True):
            place = f"{recipe.where}: plugins.deepspeed.{name}" if getattr(self.options, name) else None
            if lookup(self.json, f"zero_optimization.{section}.device") not in (None, "none"):
                place = place or f"{self.file}: zero_optimization.{section}"
            if place and self.stage < least:
                raise PluginError(
                    f"needs stage {least} or more; the stage is {self.stage}.", code="unsupported-stage", place=place
                )
        if self.stage == 3 and launcher.is_on("ACCELERATE_DEEPSPEED_ZERO3_INIT"):
            launcher.refuse(
                "ACCELERATE_DEEPSPEED_ZERO3_INIT",
                "Set zero3_init_flag: false there: each process builds the model on its CPU.",
            )
        if self.stage and recipe.train.optimizer_name in WHOLE_TENSORS:
            raise PluginError(
                f"{recipe.train.optimizer_name} cannot be sharded: ZeRO gives it slices of flattened weights.",
                code="unsupported-optimizer",
                place=f"{recipe.where}: train.optimizer",
                remedy="Use another, such as AdamW, or plugins.deepspeed.stage: 0.",
            )

    def _check_same(self, key: str, name: str, wanted: Any) -> None:
        """Raise an error for a value in the JSON that contradicts the recipe's. ``wanted`` is None if the recipe sets
        none."""
        given = lookup(self.json, key)
        if wanted is None or given is None or given == wanted:
            return
        raise PluginError(
            f"is {given!r}, and {name} is {wanted!r}.",
            code="conflicting-values",
            place=f"{self.file}: {key}",
            remedy='Make them the same, write "auto" there, or remove it there.',
        )

    def check_others(self, run: Run) -> None:
        """Refuse other plugins of the run that do not work with the stage, or warn about them."""
        names = run.plugins.names()
        sharded = self.stage == 3
        if sharded and any(plugin.name == "lora" and plugin.option_values().get("merge") for plugin in run.plugins):
            why = "stage 3 shards the weights that the adapters would be merged into."
            raise PluginError(
                f"plugins 'deepspeed' and 'lora': {why} Set plugins.lora.merge: false, or stage: 2.",
                code="unsupported-stage",
                place=run.recipe.where,
            )
        if sharded and "compile" in names:
            logger.warning(
                Problem(
                    "stage 3 gathers weights module by module, and each breaks the graph: compile gains little.",
                    code="no-speedup",
                    place="deepspeed",
                )
            )
        if "ema" in names and (sharded or self.half):
            why = "stage 3 shards the weights" if sharded else "weights in half precision are copies of sharded ones"
            raise PluginError(
                f"plugins 'deepspeed' and 'ema': {why}, which ema cannot exchange.",
                code="excluded-plugin",
                place=run.recipe.where,
                remedy="Remove one of them.",
            )

    def build(self, run: Run, model: nn.Module) -> dict[str, Any]:
        """Build the configuration for ``deepspeed.initialize``.

        Raises:
            PluginError: The JSON contradicts a setting that is known only now.
        """
        precision = run.accelerator.mixed_precision
        self.half = precision == "fp16" or lookup(self.json, "bf16.enabled") is True
        self._compare_run(run, precision)
        config = without_auto(self.json)
        for section in ("optimizer", "scheduler"):  # the recipe's are used; _agree checked that these are equal
            config.pop(section, None)
        config["train_batch_size"] = run.recipe.train.batch_size
        config["train_micro_batch_size_per_gpu"] = run.loaders.micro_batch_size
        config["gradient_accumulation_steps"] = run.loaders.micro_steps
        # the plugin clips for stage 0
        config["gradient_clipping"] = run.recipe.train.max_grad_norm or 0.0
        if self.stage == 0:
            config["gradient_clipping"] = 0.0
        config.setdefault("zero_allow_untested_optimizer", True)
        config.setdefault("zero_force_ds_cpu_optimizer", False)
        self._set_zero(config.setdefault("zero_optimization", {}), run, model)
        if precision == "bf16" and not self.half:
            config["torch_autocast"] = {"dtype": "bfloat16", **config.get("torch_autocast", {}), "enabled": True}
        if precision == "fp16":
            scaling = run.accelerator.scaler_handler
            defaults = {"initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}  # torch's
            if scaling:
                defaults["initial_scale_power"] = round(math.log2(scaling.init_scale))
                defaults["loss_scale_window"] = scaling.growth_interval
            config["fp16"] = {**defaults, **config.get("fp16", {}), "enabled": True}
        return config

    def _compare_run(self, run: Run, precision: str) -> None:
        """Check that the JSON has the batches and the precision of the run, and that DeepSpeed can do them."""
        if run.settings.split_step is not None:
            splitter = run.settings.writers["split_step"]
            raise PluginError(
                f"needs the same number of micro-steps in each step, and {splitter!r} splits steps by the lengths of "
                "their samples.",
                code="unsupported-batches",
                place=f"{run.recipe.where}: plugins.deepspeed",
                remedy=f"Use another strategy, or remove the option of {splitter!r} that does so.",
            )
        self._check_same("train_micro_batch_size_per_gpu", "the batch of a device", run.loaders.micro_batch_size)
        self._check_same("gradient_accumulation_steps", "the number of micro-steps", run.loaders.micro_steps)
        says = f"in the recipe, whose precision is {precision!r}, it"
        for kind in ("bf16", "fp16"):
            self._check_same(f"{kind}.enabled", says, precision == kind)
        self._check_same("torch_autocast.enabled", says, precision == "bf16" and not self.half)
        if self.half and self.stage == 0:
            raise PluginError(
                "0 keeps no fp32 copy of half-precision weights.",
                code="unsupported-stage",
                place="plugins.deepspeed.stage",
                remedy="Use stage 1 or more.",
            )

    def _set_zero(self, zero: dict[str, Any], run: Run, model: nn.Module) -> None:
        """Set the values of the section ``zero_optimization``."""
        options = self.options
        zero["stage"] = self.stage
        for name, section in OFFLOADS.items():
            if getattr(options, name):
                zero[section] = {"device": "cpu", "pin_memory": run.device.type != "cpu"} | zero.get(section, {})
        if options.overlap_comm is not None:
            zero["overlap_comm"] = options.overlap_comm
        if options.bucket_size is not None:
            zero["reduce_bucket_size"] = zero["allgather_bucket_size"] = options.bucket_size
        # DeepSpeed would allocate all of its default, 5e8
        elements = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        zero.setdefault("reduce_bucket_size", min(elements, 500_000_000))


def take_over(launcher: Launcher) -> None:
    """Take DeepSpeed's settings over from ``accelerate launch``.

    Raises:
        PluginError: A setting contradicts the recipe, or there is no option for it.
    """
    prefix = "ACCELERATE_DEEPSPEED_"
    stage = launcher.asked(f"{prefix}ZERO_STAGE")
    if stage is not None:
        launcher.take(f"{prefix}ZERO_STAGE", "stage", int(stage))
    file = launcher.asked(f"{prefix}CONFIG_FILE")
    if file not in (None, "none"):
        launcher.take(f"{prefix}CONFIG_FILE", "config", file)
    norm = launcher.asked("ACCELERATE_GRADIENT_CLIPPING")
    if norm not in (None, "none"):
        launcher.take("ACCELERATE_GRADIENT_CLIPPING", "train.max_grad_norm", float(norm) or None)
    for variable, option in (
        (f"{prefix}OFFLOAD_OPTIMIZER_DEVICE", "offload_optimizer"),
        (f"{prefix}OFFLOAD_PARAM_DEVICE", "offload_parameters"),
    ):
        device = launcher.asked(variable)
        if device not in (None, "none", "cpu"):
            section = f"zero_optimization.{OFFLOADS[option]}"
            launcher.refuse(variable, f"Name a JSON file with {section} in plugins.deepspeed.config, or set it to cpu.")
        if device is not None:
            launcher.take(variable, option, device == "cpu")
    if launcher.asked(f"{prefix}MOE_LAYER_CLS_NAMES") is not None:
        launcher.refuse(f"{prefix}MOE_LAYER_CLS_NAMES", "Take it out there.")


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file of DeepSpeed's.

    Raises:
        PluginError: The file cannot be read, or one of its keys is likely misspelt.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PluginError(
            f"{path} cannot be read: {clause(error)}.",
            code="file-unreadable",
            place="plugins.deepspeed.config",
            expected="a JSON file of DeepSpeed's",
        ) from None
    if not isinstance(config, dict):
        raise PluginError(
            f"{path} holds a {type(config).__name__}.",
            code="wrong-type",
            place="plugins.deepspeed.config",
            expected="an object with DeepSpeed's keys",
        )
    known = KEYS.split()
    for key in config.keys() - set(known):
        hint = did_you_mean(key, known)
        if hint:
            raise PluginError(f"DeepSpeed has no key {key!r}.", code="unknown-key", place=str(path), remedy=hint)
        logger.warning(
            Problem(
                f"{key!r} is not a key that fastloop knows: passed on unchanged.",
                code="unknown-key",
                place=f"deepspeed: {path}",
            )
        )
    return config


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; None if it is missing or "auto"."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value == "auto" else value


def without_auto(config: dict[str, Any]) -> dict[str, Any]:
    """A copy without the keys whose value is "auto"."""
    return {
        key: without_auto(value) if isinstance(value, dict) else copy.deepcopy(value)
        for key, value in config.items()
        if value != "auto"
    }
