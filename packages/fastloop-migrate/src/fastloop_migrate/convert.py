"""Convert the keys of a config to a recipe, with a note for each key without a counterpart."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastloop import UsageError

from fastloop_migrate import keys, preference
from fastloop_migrate.data import convert_data

METRICS_OF_CLASSIFIERS = ("loss", "accuracy", "f1")
"""The metrics of text-classification, without options. Scripts of classifiers often have one of these names, too."""


class Conversion:
    """A recipe under construction.

    Attributes:
        left: Keys of the config that are not converted yet.
        sections: The recipe: ``model``, ``data``, ``train``, ``output``.
        plugins: Plugin -> options.
        notes: Key -> why it has no equal counterpart.
        folder: Folder of the config: files may be relative to it.
    """

    def __init__(self, config: Mapping[str, Any], file: Path, original: Mapping[str, str]) -> None:
        self.left = dict(config)
        self.folder = file.parent
        self._file = file
        self._original = original
        self.sections: dict[str, Any] = {"model": {}, "data": {}, "train": {}}
        self.plugins: dict[str, dict[str, Any]] = {}
        self.notes: dict[str, str] = {}

    def take(self, key: str, default: Any = None) -> Any:
        """Remove a key and return its value; None counts as missing."""
        value = self.left.pop(key, None)
        return default if value is None else value

    def take_number(self, key: str, default: Any = None) -> Any:
        """The same for a number. YAML reads ``2e-5`` as text.

        Raises:
            UsageError: The value is no number.
        """
        value = self.take(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or is_number:
            return value
        if isinstance(value, str):
            with suppress(ValueError):
                return float(value)
        name = self._original.get(key, key)
        raise UsageError(code="wrong-type", place=f"{self._file}: {name}", found=repr(value), expected="a number")

    def note(self, key: str, reason: str) -> None:
        """Explain a key that has no equal counterpart, by its name in the config."""
        name = self._original.get(key, key)
        self.notes[" ".join(name.split())] = " ".join(reason.split())  # one line: it becomes a comment

    def put(self, dotted: str, value: Any) -> None:
        """Set a key of the recipe, such as ``train.lr``."""
        section, _, key = dotted.partition(".")
        if key:
            self.sections[section][key] = value
        else:
            self.sections[section] = value


def convert(
    config: Mapping[str, Any], format: str, processes: int, file: Path, trainer: str = "auto"
) -> tuple[dict[str, Any], dict[str, str]]:
    """The recipe as a mapping, and key -> why it has no equal counterpart.

    Args:
        processes: Processes of the run.
        file: The config's file.
        trainer: One of ``preference.TRAINERS``, or ``auto``: find it by the keys.

    Raises:
        UsageError: The config is of a training that fastloop does not have, or a value has another type than its key
            needs.
    """
    trainer = preference.find_trainer(config, format, trainer, file)
    defaults = dict(keys.DEFAULTS[format])
    names = keys.AXOLOTL if format == "axolotl" else {}
    if trainer != "sft":
        if format == "axolotl":
            names = names | preference.AXOLOTL_NAMES
        else:
            defaults |= preference.KINDS[trainer].defaults
    settings = {names.get(key, key): value for key, value in config.items() if value is not None}
    original = {name: key for key, name in names.items() if key in config}
    if trainer != "sft":
        preference.check_values(settings, original, trainer, file)
    result = Conversion({**keys.BASE, **defaults, **settings}, file, original)
    micro_steps = convert_lengths(result, processes, settings)
    convert_plugins(result, settings)
    convert_optimizer(result)
    convert_schedule(result)
    convert_precision(result, settings)
    convert_lora(result, settings)
    convert_data(result, settings, format, trainer)
    convert_strategy(result, processes, format)
    convert_evaluation(result)
    if format == "transformers":
        convert_loss(result, micro_steps)
    if trainer != "sft":
        preference.convert_tuning(result, trainer, format, file)
    elif format == "trl":
        preference.note_trainer(result, config)
    for key, dotted in keys.DIRECT.items():
        value = result.take_number(key) if key in keys.NUMBERS else result.take(key)
        if value is not None:
            result.put(dotted, value)
    result.put("output", own_folder(result.take("output_dir"), settings, file))
    if result.take("use_cpu"):
        result.put("train.device", "cpu")
    explain_rest(result, settings, format)
    return build_recipe(result), result.notes


def own_folder(old: Any, settings: Mapping[str, Any], file: Path) -> str:
    """The folder of the run, in runs/, with the name of the old trainer's. That one keeps its own: fastloop refuses a
    folder with other files, and one name would mix the two.

    Args:
        old: The old trainer's folder, or its default.
        file: The config, whose name the folder gets if the config names none.
    """
    name = Path(str(old)).name if "output_dir" in settings else file.stem
    folder = Path("runs", name or file.stem)
    if folder == Path(str(old)):
        folder = folder.with_name(f"{folder.name}-fastloop")
    return folder.as_posix()


def build_recipe(result: Conversion) -> dict[str, Any]:
    """The recipe of a conversion, without empty sections: ``output`` comes last, after the plugins."""
    recipe: dict[str, Any] = {}
    for section, value in result.sections.items():
        if value and section != "output":
            recipe[section] = value
    plugins: list[Any] = []
    for name, options in result.plugins.items():
        plugins.append({name: options} if options else name)
    if plugins:
        recipe["plugins"] = plugins
    recipe["output"] = result.sections["output"]
    return recipe


def convert_lengths(result: Conversion, processes: int, settings: Mapping[str, Any]) -> int:
    """Batch sizes, epochs, steps, and when to log, evaluate and save. Returns the micro-batches of a step on one
    process."""
    micro = int(result.take_number("per_device_train_batch_size"))
    accumulated = int(result.take_number("gradient_accumulation_steps"))
    epochs = float(result.take_number("num_train_epochs"))
    steps = int(result.take_number("max_steps", -1))
    if steps > 0:  # it overrides the epochs there
        result.put("train.max_steps", steps)
    else:
        result.put("train.epochs", max(1, math.ceil(epochs)))
        if epochs != math.ceil(epochs):
            result.note("num_train_epochs", f"{epochs:g} is rounded up; for less, set train.max_steps")
    result.put("train.batch_size", micro * accumulated * processes)
    result.put("train.micro_batch_size", micro)
    logging = result.take_number("logging_steps")
    result.put("train.log_every", int(logging) if logging >= 1 else 10)
    convert_interval(result, settings, "eval", "train.evaluate_every", logging)
    convert_interval(result, settings, "save", "train.save_every", logging)
    norm = result.take_number("max_grad_norm")
    if norm > 0:
        result.put("train.max_grad_norm", norm)
    return accumulated


def convert_interval(result: Conversion, settings: Mapping[str, Any], name: str, key: str, logging: float) -> None:
    """When to evaluate or to save.

    Args:
        name: ``eval`` or ``save``: the keys are ``eval_strategy``, ``eval_steps`` and ``evals_per_epoch``.
        key: The key of the recipe.
        logging: Steps between two log points, which transformers takes if ``eval_steps`` is missing.
    """
    strategy = str(result.take(f"{name}_strategy"))
    steps = result.take_number(f"{name}_steps")
    times = result.take_number(f"{name}s_per_epoch")
    if f"{name}_steps" in settings and f"{name}_strategy" not in settings:
        strategy = "steps"
    if strategy == "steps" and steps is None:
        steps = logging
    every: int | str | None = "epoch"
    if strategy == "no":
        every = None
    elif strategy == "steps":
        if steps >= 1:
            every = int(steps)
        else:
            result.note(f"{name}_steps", f"{steps} is a share of the run; set {key} to a number of steps")
    if times == 0:
        every = None
    elif times not in (None, 1):
        result.note(f"{name}s_per_epoch", f"{times} times an epoch; set {key} to a number of steps")
    result.put(key, every)


def convert_plugins(result: Conversion, settings: Mapping[str, Any]) -> None:
    """Keys that are true, and plugins with a few options."""
    for key, (plugin, options) in keys.PLUGINS.items():
        if key == "activation_checkpointing" and "gradient_checkpointing" in settings:
            result.take(key)  # a default, and the config has the other name
        elif result.take(key):
            result.plugins[plugin] = dict(options)
    attention = result.take("attn_implementation")
    if attention in keys.ATTENTION:
        result.plugins["attention"] = {"implementation": keys.ATTENTION[attention]}
    elif attention is not None:
        result.note("attn_implementation", f"{attention}: list the plugin attention, which chooses a kernel")
    if result.take("train_sampling_strategy") == "group_by_length":
        result.plugins["length-bucketing"] = {}
    workers = int(result.take_number("dataloader_num_workers", 0))
    if workers:
        result.plugins["dataloader-workers"] = {"num_workers": workers}
    if result.take("torch_compile") in (True, "true"):
        options = {name: result.take(f"torch_compile_{name}") for name in ("backend", "mode")}
        result.plugins["compile"] = {name: value for name, value in options.items() if value is not None}
    for name in result.take("plugins", []):
        if name in keys.INTEGRATIONS:
            result.plugins[keys.INTEGRATIONS[name]] = {}
        else:
            result.note(f"plugins: {name}", keys.WRITE_A_PLUGIN)
    convert_trackers(result)


def convert_trackers(result: Conversion) -> None:
    """The services that record a run."""
    reports = result.take("report_to", [])
    reports = [reports] if isinstance(reports, str) else list(reports)
    project = result.take("wandb_project")
    names = [name for name in keys.TRACKERS if name in reports]
    if (project or result.left.get("use_wandb")) and "wandb" not in names:
        names.append("wandb")
    if (result.left.get("use_mlflow") or result.left.get("mlflow_experiment_name")) and "mlflow" not in names:
        names.append("mlflow")
        project = project or result.take("mlflow_experiment_name")
    if names:
        result.plugins["trackers"] = {"trackers": names}
        if project:
            result.plugins["trackers"]["project"] = project
    if "tensorboard" in reports:
        result.plugins["tensorboard"] = {}
    others = [name for name in reports if name not in (*keys.TRACKERS, "tensorboard", "none")]
    if others:
        result.note("report_to", f"{', '.join(others)}: its callback runs in the plugin transformers-callbacks")


def convert_optimizer(result: Conversion) -> None:
    """The optimizer and its arguments."""
    name = str(result.take("optim"))
    arguments: dict[str, Any] = {}
    if name in keys.OPTIMIZERS:
        optimizer, fused = keys.OPTIMIZERS[name]
        if fused is not None:
            result.plugins["fused-optimizer"] = dict(fused)
    else:
        optimizer = "AdamW"
        result.note("optim", f"{name}: name its class, train.optimizer: package.module:Class; AdamW stands for it")
    beta1 = result.take_number("adam_beta1")
    beta2 = result.take_number("adam_beta2")
    epsilon = result.take_number("adam_epsilon")
    if optimizer == "AdamW" and (beta1, beta2) not in ((None, None), (0.9, 0.999)):
        arguments["betas"] = [beta1 or 0.9, beta2 or 0.999]
    if optimizer == "AdamW" and epsilon not in (None, 1e-8):
        arguments["eps"] = epsilon
    extra = result.take("optim_args", {})
    if isinstance(extra, Mapping):
        arguments |= extra
    elif extra:
        result.note("optim_args", f"{extra}: write them as train.optimizer: {{name: {optimizer}, ...}}")
    result.put("train.optimizer", {"name": optimizer, **arguments} if arguments else optimizer)
    if float(result.left.get("weight_decay") or 0):
        result.put("train.decay_biases_and_norms", False)


def convert_schedule(result: Conversion) -> None:
    """The schedule of the learning rate."""
    kind = str(result.take("lr_scheduler_type"))
    arguments = result.take("lr_scheduler_kwargs", {})
    arguments = dict(arguments) if isinstance(arguments, Mapping) else json.loads(arguments)
    steps = result.take_number("warmup_steps")
    share = result.take_number("warmup_ratio")
    warmup = steps or share or 0
    schedule = keys.SCHEDULES.get(kind, kind)
    options: dict[str, Any] = {"schedule": schedule}
    if kind in keys.NO_SCHEDULES:
        result.note("lr_scheduler_type", f"{kind}: cosine stands for it; see plugins.lr-scheduler")
        options["schedule"] = "cosine"
    if warmup and kind != "constant":
        options["warmup"] = warmup
    ratio = result.take("cosine_min_lr_ratio", arguments.pop("min_lr_rate", None))
    if ratio is not None and options["schedule"] == "cosine":
        options["min_ratio"] = ratio
    if arguments and options["schedule"] not in ("linear", "cosine", "constant"):
        options["arguments"] = arguments
    elif arguments:
        result.note("lr_scheduler_kwargs", f"{arguments}: {schedule} of fastloop has warmup and min_ratio only")
    if options != {"schedule": "constant"}:
        result.plugins["lr-scheduler"] = options


def convert_precision(result: Conversion, settings: Mapping[str, Any]) -> None:
    """Mixed precision."""
    bf16 = result.take("bf16")
    fp16 = result.take("fp16")
    if fp16 and ("bf16" not in settings or not bf16):
        result.plugins["amp"] = {"dtype": "fp16"}
    elif bf16:
        result.plugins["amp"] = {"dtype": "auto" if bf16 == "auto" else "bf16"}
    if result.take("tf32"):
        result.plugins.setdefault("amp", {"dtype": "fp32"})["fp32_matmul"] = "high"
    if bf16 == "full":
        result.note("bf16", "full: fastloop keeps fp32 weights, and computes in bf16 (amp)")


def convert_lora(result: Conversion, settings: Mapping[str, Any]) -> None:
    """LoRA and QLoRA."""
    options = {name: result.take(f"lora_{name}") for name in ("r", "alpha", "dropout", "target_modules")}
    for name in ("use_rslora", "use_dora", "layers_to_transform", "init_lora_weights"):
        options[name] = result.take(name) or result.take(f"peft_{name}")  # trl, axolotl
    options["adapter"] = result.take("lora_model_dir")
    linear = result.take("lora_target_linear")
    saved = result.take("lora_modules_to_save")
    four_bit = result.take("load_in_4bit")
    adapter = settings.get("adapter")
    if not adapter and settings.get("use_peft"):
        adapter = "lora"
    if adapter not in ("lora", "qlora"):
        if adapter:
            result.note("adapter", f"{adapter}: fastloop has lora and qlora")
        if four_bit:
            result.note("load_in_4bit", "fastloop quantizes with LoRA only: plugins.lora.quantize: nf4")
        return
    if linear:
        options["target_modules"] = "all-linear"
    if saved:
        options["modules_to_save"] = saved
    if four_bit or adapter == "qlora":
        options["quantize"] = "nf4"
    result.plugins["lora"] = {name: value for name, value in options.items() if value is not None}


def convert_strategy(result: Conversion, processes: int, format: str) -> None:
    """FSDP, DeepSpeed, or DDP for several processes."""
    deepspeed = result.take("deepspeed")
    fsdp = result.take("fsdp")
    settings = result.take("fsdp_config")
    if format == "axolotl":
        fsdp = fsdp or settings
    if (deepspeed or fsdp) and "quantize" in result.plugins.get("lora", {}):
        result.note("deepspeed" if deepspeed else "fsdp", "4-bit weights cannot be sharded: ddp, or no lora.quantize")
        deepspeed = None
        fsdp = None
    if deepspeed or isinstance(deepspeed, Mapping):
        convert_deepspeed(result, deepspeed)
    elif fsdp:
        result.plugins["fsdp"] = fsdp_options(fsdp, settings or {})
    elif processes > 1:
        result.plugins["ddp"] = {}


def convert_deepspeed(result: Conversion, deepspeed: Any) -> None:
    """DeepSpeed, from its configuration or the path of its file."""
    if isinstance(deepspeed, Mapping):
        stage = deepspeed.get("zero_optimization", {}).get("stage", 0)
        result.plugins["deepspeed"] = {"stage": stage}
        result.note("deepspeed", "only its stage is taken; for the rest, save it as JSON: plugins.deepspeed.config")
        return
    path = str(deepspeed)
    if (result.folder / path).is_file() or Path(path).is_file():
        result.plugins["deepspeed"] = {"config": path}
        return
    number = re.search(r"zero_?([0-3])", path)
    result.plugins["deepspeed"] = {"stage": int(number[1]) if number is not None else 2}
    result.note("deepspeed", f"{path}: no such file here; the stage is that of its name, or 2")


def fsdp_options(fsdp: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the plugin ``fsdp``.

    Args:
        fsdp: Words such as ``full_shard offload``, or the settings.
        settings: The section ``fsdp_config``. Its keys may begin with ``fsdp_``.
    """
    by_name = {str(key).removeprefix("fsdp_"): value for key, value in settings.items()}
    options: dict[str, Any] = {}
    blocks = by_name.get("transformer_layer_cls_to_wrap")
    if blocks:
        options["blocks"] = blocks.split(",") if isinstance(blocks, str) else list(blocks)
    words = f"{fsdp} {by_name.get('sharding_strategy', '')}".lower()
    if by_name.get("reshard_after_forward") is False or "shard_grad_op" in words:
        options["reshard_after_forward"] = False
    if by_name.get("offload_params") or "offload" in str(fsdp):
        options["cpu_offload"] = True
    if by_name.get("cpu_ram_efficient_loading"):
        options["meta_device"] = True
    return options


def convert_evaluation(result: Conversion) -> None:
    """Early stopping and the best checkpoint."""
    metric = str(result.left.get("metric_for_best_model") or "loss").removeprefix("eval_")
    greater = result.left.get("greater_is_better")
    monitor: dict[str, Any] = {"monitor": metric}
    if greater is not None:
        monitor["mode"] = "max" if greater else "min"
    patience = result.take_number("early_stopping_patience")
    if patience:
        result.plugins["early-stopping"] = {**monitor, "patience": int(patience)}
    if result.left.get("load_best_model_at_end"):
        result.plugins["checkpoint-best"] = monitor
    is_monitored = patience or result.left.get("load_best_model_at_end")
    if is_monitored and metric not in METRICS_OF_CLASSIFIERS:
        result.note(
            "metric_for_best_model",
            f"the script's compute_metrics is not imported: the task must compute {metric!r}; text-classification "
            f"computes {', '.join(METRICS_OF_CLASSIFIERS)}, and its option metrics adds others by name",
        )


def convert_loss(result: Conversion, micro_steps: int) -> None:
    """Label smoothing of ``TrainingArguments``: both spread the share evenly over all classes. Without it, a note says
    how the figures of accumulated steps differ.

    transformers' classifiers take the argument ``num_items_in_batch``, and ignore it. So the HF Trainer adds the mean
    losses of the micro-batches. With label smoothing, it divides their sum itself. See docs/migrate.md.
    """
    smoothing = result.take_number("label_smoothing_factor")
    if smoothing:
        loss = {"name": "cross_entropy", "label_smoothing": float(smoothing)}
        result.plugins["text-classification"] = {"loss": loss}
        result.note("label_smoothing_factor", "for another task than text-classification, give the loss to its plugin")
    elif micro_steps > 1:
        result.note(
            "gradient_accumulation_steps",
            f"for a classifier, the HF Trainer logs {micro_steps} times fastloop's loss, and clips gradients that are "
            "as many times larger: see docs/migrate.md",
        )


def explain_rest(result: Conversion, settings: Mapping[str, Any], format: str) -> None:
    """A note for each key that no other function has converted, unless it is off or has its default."""
    defaults: dict[str, Any] = {}
    if format != "axolotl":
        import dataclasses

        from fastloop_plugins.toolkit import importing_bitsandbytes

        with importing_bitsandbytes():  # transformers' arguments of the Trainer import it
            from transformers import TrainingArguments

        defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    for key, value in result.left.items():
        if key in keys.IRRELEVANT or key not in settings or not value or value == defaults.get(key):
            continue
        result.note(key, reason_for(key))


def reason_for(key: str) -> str:
    """Why a key has no counterpart: by the key, or by its first letters."""
    if keys.REASONS.get(key):
        return keys.REASONS[key]
    for start, reason in keys.PREFIXES.items():
        if key.startswith(start):
            return reason
    return keys.UNKNOWN
