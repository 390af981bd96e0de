"""Trains low-rank adapters (LoRA) and freezes the model's own weights.

    plugins:
      - lora: {r: 8, alpha: 16}

The exported model has the adapters merged in, and loads like any other. With ``merge: false``, only the adapters are written.
Needs the extra: ``pip install 'fastloop[lora]'``. Method: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from fastloop import Package, Plugin, PluginError, hookimpl, option

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run

logger = logging.getLogger("fastloop")


class LoRA(Plugin):
    """Adds low-rank adapters with peft."""

    name = "lora"
    numerics = "changes-training"
    requirements = (Package("peft", ">=0.18", extra="lora"),)
    description = "trains low-rank adapters only"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        r: Annotated[int, option("Rank of the adapters.", ge=1)] = 8
        alpha: Annotated[float, option("Adapters are scaled by alpha / r.", gt=0)] = 16.0
        dropout: Annotated[float, option("Dropout before the adapters.", ge=0, lt=1)] = 0.0
        target_modules: Annotated[
            list[str] | str | None,
            option("Names of layers, or all-linear; null: peft's default for the architecture."),
        ] = None
        modules_to_save: Annotated[list[str] | None, option("Layers trained in full; null: the head of a classifier.")] = None
        merge: Annotated[bool, option("Export the model with the adapters merged in.")] = True

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> nn.Module:
        from peft import LoraConfig, TaskType, get_peft_model

        config = self.config
        classifies = type(model).__name__.endswith("ForSequenceClassification")
        kind = TaskType.SEQ_CLS if classifies else None
        options = LoraConfig(
            task_type=kind,
            r=config.r,
            lora_alpha=config.alpha,  # type: ignore[arg-type] # peft divides it by r
            lora_dropout=config.dropout,
            target_modules=config.target_modules,
            modules_to_save=config.modules_to_save,
        )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # peft uses a deprecated name of transformers
                warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # peft sets it as the layer needs it
                wrapped: nn.Module = get_peft_model(model, options)
        except (ValueError, TypeError) as error:  # TypeError: a layer is in both target_modules and modules_to_save
            linear = {name.rpartition(".")[2] for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}
            raise PluginError(
                f"plugin 'lora': target_modules: {config.target_modules}: {str(error).partition('. ')[0]}. "
                f"Layers of this model: {', '.join(sorted(linear))}."
            ) from None
        trained, total = cast("Any", wrapped).get_nb_trainable_parameters()
        logger.info("lora: %s of %s parameters are trained (%.2f%%)", f"{trained:,}", f"{total:,}", 100 * trained / total)
        return wrapped

    @hookimpl(wrapper=True)
    def export_model(self, run: Run, folder: Path) -> Generator[None, Any, Any]:
        adapted: Any = run.unwrap_model()
        if not self.config.merge:
            result = yield
            return result
        merged = adapted.merge_and_unload()  # training has ended
        with run.substitute_model(merged):
            return (yield)
