"""Convert configs of preference tuning and of reward models to recipes of the package ``fastloop-preference``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import UsageError

if TYPE_CHECKING:
    from fastloop_migrate.convert import Conversion

PACKAGE = "fastloop-preference"
TRAINERS = ("sft", "dpo", "kto", "orpo", "reward")
"""Trainers of TRL whose configs can be converted."""

KTO_LOSSES = ("kto", "apo_zero_unpaired")
DPO_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_pair",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
"""Values of TRL's ``loss_type`` that only its DPO trainer has."""
SIGNS: dict[str, tuple[str, ...]] = {
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "dpo": (
        "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef", "reference_free", "sync_ref_model",
        "ref_model_mixup_alpha", "ref_model_sync_steps", "use_weighting", "rpo_alpha", "ld_alpha", "loss_weights",
        "discopop_tau", "model_adapter_name", "ref_adapter_name", "force_use_ref_model",
    ),
}  # fmt: skip
"""Trainer -> keys that only its config has."""
SHARED = ("beta", "precompute_ref_log_probs", "precompute_ref_batch_size", "max_prompt_length")
"""Keys of several preference trainers, and not of the one for SFT."""
SFT = (
    "dataset_text_field", "assistant_only_loss", "completion_only_loss", "packing", "packing_strategy", "eval_packing",
    "chat_template_path",
)  # fmt: skip
"""Keys that only the config of TRL's SFT trainer has."""
GRPO_KEYS = ("num_generations", "reward_funcs")
"""Keys of GRPO, whose configs are not converted."""
GRPO_REMEDY = "Write a recipe of the package fastloop-grpo: docs/tasks/grpo.md lists its options by TRL's names."
OTHER_TRAINERS = {
    "reward_model_path": "online DPO or PPO",
    "num_ppo_epochs": "PPO",
    "cpo_alpha": "CPO or SimPO",
    "simpo_gamma": "SimPO",
    "lmbda": "GKD",
    "teacher_model_name_or_path": "GKD",
}
"""Key -> the trainer that it belongs to, which no package of fastloop has."""

AXOLOTL_RL = {
    "dpo": ("dpo", "sigmoid"),
    "ipo": ("dpo", "ipo"),
    "orpo": ("orpo", "orpo"),
    "kto": ("kto", "kto"),
}
"""Axolotl's ``rl`` -> trainer and loss."""
AXOLOTL_NAMES = {
    "rl_beta": "beta",
    "dpo_beta": "beta",
    "orpo_alpha": "beta",
    "dpo_loss_type": "loss_type",
    "dpo_label_smoothing": "label_smoothing",
    "dpo_use_weighting": "use_weighting",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "precompute_ref_logprobs": "precompute_ref_log_probs",
}
"""Axolotl's key -> that of TRL."""
CHATML = {"chat_template": "chatml"}
AXOLOTL_COLUMNS: dict[str, dict[str, Any]] = {
    "chatml.intel": {"system": "system", "prompt": "question", **CHATML},
    "chatml.icr": {"system": "system", "prompt": "input", **CHATML},
    "chatml.argilla": {
        "prompt": "instruction",
        "chosen": "chosen_response",
        "rejected": "rejected_response",
        **CHATML,
    },
    "chatml.argilla_chat": {"prompt": None, **CHATML},
    "chatml.ultra": {"prompt": None, **CHATML},
    "chat_template.default": {"prompt": "messages"},
}
"""Axolotl's type of pairs -> keys of the section ``data``."""

REFUSED: dict[str, tuple[Any, str]] = {
    "f_divergence_type": ("reverse_kl", "dpo has the reverse KL divergence only"),
    "reference_free": (False, "dpo compares with the model before training; orpo needs no reference"),
    "sync_ref_model": (False, "the reference of dpo stays the model before training"),
    "use_weighting": (False, "dpo does not weight pairs"),
    "rpo_alpha": (None, "dpo adds no loss of the chosen completions; orpo does"),
    "dpo_norm_loss": (False, "dpo has no normalized loss; ipo averages over tokens"),
    "ld_alpha": (None, "dpo counts all tokens of a completion alike"),
    "loss_weights": (None, "dpo has one loss"),
    "ref_adapter_name": (None, "with lora, the reference is the model without adapters"),
    "force_use_ref_model": (False, "with lora, the reference is the model without adapters"),
    "ref_model_name_or_path": (None, "the reference is the model before training"),
}
"""Key that would change the loss -> the only value that can be converted, and why."""
AS_DEFAULT = {
    "precompute_ref_batch_size": "the reference is computed in batches of train.eval_batch_size",
    "max_prompt_length": "data.max_length counts prompt and completion; a longer row is cut at its end",
    "max_completion_length": "data.max_length counts prompt and completion; a longer row is cut at its end",
    "truncation_mode": "a row longer than data.max_length is cut at its end",
    "padding_free": "list the plugin packing",
    "generate_during_eval": "evaluations compute losses and rewards, and generate no texts",
}
"""Key of preference tuning without a counterpart -> why, or what to do."""
QUIET = ("precompute_ref_log_probs", "label_pad_token_id", "model_adapter_name")
"""Keys of preference tuning that change no result here."""


@dataclass
class Tuning:
    """The trainer of a config, and defaults of TRL that differ from those of ``SFTTrainer``."""

    plugin: str
    loss: str | None = None
    defaults: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "dpo": Tuning("dpo", "sigmoid", {"learning_rate": 1e-6}),
    "orpo": Tuning("dpo", "orpo", {"learning_rate": 1e-6}),
    "kto": Tuning("kto", "kto", {"learning_rate": 1e-6}),
    "reward": Tuning("reward-model", None, {"learning_rate": 1e-4}),
}
"""Trainer -> its task."""


def find_trainer(config: Mapping[str, Any], format: str, trainer: str, file: Path) -> str:
    """The trainer that a config is for: one of ``TRAINERS``.

    Args:
        trainer: The option ``--trainer``; ``auto``: find it by the keys.

    Raises:
        UsageError: It is one that fastloop does not have, or the keys do not show it.
    """
    if format == "axolotl":
        return _find_axolotl(config, file)
    for key in GRPO_KEYS:
        if config.get(key) is not None:
            raise UsageError(
                f"found a key of GRPO, which is not converted. {GRPO_REMEDY}",
                code="unsupported-trainer",
                place=f"{file}: {key}",
            )
    for key, other_trainer in OTHER_TRAINERS.items():
        if config.get(key) is not None:
            raise UsageError(
                f"found a key of {other_trainer}, and fastloop has no such training.",
                code="unknown-key",
                place=f"{file}: {key}",
                remedy="Use TRL for it.",
            )
    if trainer != "auto":
        return trainer
    for name, keys in SIGNS.items():
        if any(key in config for key in keys):
            return name
    losses = _losses(config)
    if losses & {*KTO_LOSSES}:
        return "kto"
    if losses & {*DPO_LOSSES}:
        return "dpo"
    shared = [key for key in SHARED if key in config]
    if shared:
        raise UsageError(
            "found a key of preference tuning, which configs of DPO, KTO and ORPO have.",
            code="ambiguous-name",
            place=f"{file}: {shared[0]}",
            remedy="Say which trainer reads the file: --trainer dpo, --trainer kto or --trainer orpo.",
        )
    return "sft"


def _find_axolotl(config: Mapping[str, Any], file: Path) -> str:
    if config.get("process_reward_model"):
        raise UsageError(
            "found true, and fastloop has reward models of whole completions only.",
            code="unknown-key",
            place=f"{file}: process_reward_model",
        )
    if config.get("reward_model"):
        return "reward"
    kind = config.get("rl")
    if not kind:
        return "sft"
    if kind == "grpo":
        raise UsageError(
            f"found grpo, which is not converted. {GRPO_REMEDY}", code="unsupported-trainer", place=f"{file}: rl"
        )
    if str(kind) not in AXOLOTL_RL:
        known = ", ".join(AXOLOTL_RL)
        raise UsageError(
            code="unknown-choice",
            place=f"{file}: rl",
            found=str(kind),
            expected=f"one of {known}, which {PACKAGE} has",
            remedy=f"Use Axolotl for {kind}.",
        )
    return AXOLOTL_RL[str(kind)][0]


def _losses(config: Mapping[str, Any]) -> set[str]:
    """The names in ``loss_type``."""
    value = config.get("loss_type")
    if value is None:
        return set()
    return {str(name) for name in (value if isinstance(value, list) else [value])}


def check_values(settings: Mapping[str, Any], original: Mapping[str, str], trainer: str, file: Path) -> None:
    """Check that no key asks for another loss than the package has.

    Args:
        settings: The config, with TRL's names.
        original: TRL's name -> that of the config, where they differ.

    Raises:
        UsageError: A key does; the message names it.
    """
    for key, (accepted, why) in REFUSED.items():
        value = settings.get(key)
        if value is not None and value != accepted:
            name = original.get(key, key)
            raise UsageError(
                f"found {value!r}, and {why}.",
                code="unknown-choice",
                place=f"{file}: {name}",
                remedy="Remove the key, or use the other library.",
            )
    losses = sorted(_losses(settings))
    known = {"dpo": ("sigmoid", "robust", "ipo"), "kto": ("kto",)}.get(trainer)
    if known is not None and losses and (len(losses) > 1 or losses[0] not in known):
        name = original.get("loss_type", "loss_type")
        raise UsageError(
            code="unknown-choice",
            place=f"{file}: {name}",
            found=", ".join(losses),
            expected=f"one of {', '.join(known)}: {PACKAGE} has no other loss of {trainer.upper()}",
        )


def note_trainer(result: Conversion, config: Mapping[str, Any]) -> None:
    """Explain that a config of TRL was taken as one of SFT, unless it has a key of SFT alone."""
    if not any(key in config for key in (*SFT, "loss_type")):
        result.note(
            "trainer",
            "the file does not name it, and was taken as TRL's of SFT, whose defaults are bf16 and activation "
            "checkpointing: else, repeat with --trainer, or with --format transformers for arguments of transformers",
        )


def convert_tuning(result: Conversion, trainer: str, format: str, file: Path) -> None:
    """The task with its options, and the columns of its rows.

    Raises:
        UsageError: The label smoothing is for another loss.
    """
    kind = KINDS[trainer]
    loss = kind.loss
    axolotl = str(result.take("rl", ""))
    if format == "axolotl" and trainer == "dpo":
        loss = AXOLOTL_RL[axolotl][1]
    loss_type = result.take("loss_type")
    if trainer == "dpo" and loss_type is not None:
        loss = str(loss_type[0] if isinstance(loss_type, list) else loss_type)
    options: dict[str, Any] = {}
    if kind.plugin == "dpo":
        options["loss"] = loss
    beta = result.take_number("beta")
    if beta is not None and trainer != "reward":
        options["beta"] = beta
    smoothing = result.take_number("label_smoothing")
    if smoothing:
        if loss != "robust":
            raise UsageError(
                f"found {smoothing:g} with the loss {loss}, and dpo has it for the loss robust only.",
                code="unknown-key",
                place=f"{file}: label_smoothing",
                remedy="Set loss_type: robust, or remove it.",
            )
        options["label_smoothing"] = smoothing
    for name in ("desirable_weight", "undesirable_weight"):
        weight = result.take_number(name)
        if weight is not None:
            options[name] = weight
    center = result.take_number("center_rewards_coefficient")
    if center is not None:
        options["center"] = center
    disable_dropout = result.take("disable_dropout")
    if disable_dropout is not None:
        options["disable_dropout"] = disable_dropout
    result.take("reward_model")
    result.plugins = {kind.plugin: options, **result.plugins}
    for key in (*REFUSED, *QUIET):
        result.take(key)
    for key, reason in AS_DEFAULT.items():
        if result.take(key) is not None:
            result.note(key, reason)
    if not entry_points(group="fastloop.plugins", name=kind.plugin):
        result.note(kind.plugin, f"a task of the package {PACKAGE}: pip install {PACKAGE}")


def convert_axolotl_rows(result: Conversion, dataset: Mapping[str, Any], trainer: str) -> None:
    """The columns of a data set of pairs, by its type."""
    kind = dataset.get("type")
    if isinstance(kind, Mapping):
        for part in ("system", "prompt", "chosen", "rejected", "completion", "label"):
            column = kind.get(f"field_{part}")
            if column is not None:
                result.put(f"data.{part}", column)
        formats = [key for key in kind if str(key).endswith("_format")]
        if formats:
            result.note("datasets: type", f"{', '.join(formats)}: texts follow data.chat_template, not these formats")
    elif str(kind) in AXOLOTL_COLUMNS and trainer in ("dpo", "orpo", "reward"):
        for key, value in AXOLOTL_COLUMNS[str(kind)].items():
            result.put(f"data.{key}", value)
    elif kind is not None:
        columns = "data.completion and data.label" if trainer == "kto" else "data.chosen and data.rejected"
        result.note("datasets: type", f"{kind}: set data.prompt, {columns}, and data.chat_template")
