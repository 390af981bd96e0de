"""Trains low-rank adapters (LoRA) and freezes the model's own weights.

    plugins:
      - lora: {r: 8, alpha: 16}

The exported model has the adapters merged in. With ``merge: false``, only the adapters are written. Method: Hu et al.,
"LoRA: Low-Rank Adaptation of Large Language Models", 2021.

``quantize: nf4`` (QLoRA) keeps the frozen linear layers of a pretrained model in 4 bits, an eighth of float32:

    model: {name: FOLDER}
    plugins:
      - lora: {r: 8, quantize: nf4, target_modules: all-linear}

Each process loads the model in float32 before it is quantized, and again for the export. Layers whose number of inputs
is not a multiple of 64 stay in float32. On several processes, use ``ddp``. Method: Dettmers et al., "QLoRA: Efficient
Finetuning of Quantized LLMs", 2023.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from fastloop import Device, Package, Plugin, PluginError, RecipeError, When, hookimpl, option

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")


def quantizes(config: Any) -> bool:
    """A condition for ``When``: whether frozen weights are kept in 4 bits."""
    return config.quantize is not None


@contextmanager
def importing_bitsandbytes() -> Iterator[None]:
    """Import peft inside this context. It imports bitsandbytes, if that is installed, which logs advice for inference.
    It also calls ``torch.compile``, so torch sets the folder of compiled code, which the plugin ``compile`` chooses
    later."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    variable = "TORCHINDUCTOR_CACHE_DIR"
    was_set = variable in os.environ
    try:
        yield
    finally:
        if not was_set:
            os.environ.pop(variable, None)


class LoRA(Plugin):
    """Adds low-rank adapters with peft."""

    name = "lora"
    numerics = "changes-training"
    on_resume = {"merge": "free"}
    requirements = (
        Package("peft", ">=0.18", extra="lora"),
        When(quantizes, Device("cpu", "cuda", "xpu")),
        When(quantizes, Package("bitsandbytes", ">=0.50", extra="qlora")),
    )
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
        modules_to_save: Annotated[
            list[str] | None, option("Layers trained in full; null: the head of a classifier.")
        ] = None
        merge: Annotated[bool, option("Export the model with the adapters merged in.")] = True
        quantize: Annotated[
            Literal["nf4"] | None, option("Keep frozen linear layers in 4 bits (QLoRA); null: as they are.")
        ] = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if quantizes(self.config):
            self.conflicts = {  # type: ignore[misc]
                "fsdp": "4-bit weights with their scales cannot be sharded. Use ddp, or leave quantize out.",
                "deepspeed": "DeepSpeed shards and casts weights, which would damage those in 4 bits. Use ddp, or "
                "leave quantize out.",
                "tensor-parallel": "4-bit weights with their scales cannot be divided. Use ddp, or leave quantize out.",
            }

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        if quantizes(self.config) and recipe.model.get("config") is not None and recipe.model.get("weights") is None:
            raise RecipeError(
                f"{recipe.where}: plugins.lora.quantize: found model.config, which trains from scratch, and 4-bit "
                "weights are frozen. "
                "Set model.name or model.weights to pretrained weights, or leave quantize out."
            )

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> nn.Module:
        with importing_bitsandbytes():
            from peft import LoraConfig, TaskType, get_peft_model

        config = self.config
        if quantizes(config):
            from fastloop_plugins.training import _four_bit

            _four_bit.quantize(run, model, config.modules_to_save or ())
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
                # peft uses a deprecated name of transformers
                warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
                # peft sets it as the layer needs it
                warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
                wrapped: nn.Module = get_peft_model(model, options)
        except (ValueError, TypeError) as error:  # TypeError: a layer is in both target_modules and modules_to_save
            kinds = ("Linear", "Conv1D", "FourBitLinear")
            linear = {
                name.rpartition(".")[2] for name, module in model.named_modules() if type(module).__name__ in kinds
            }
            raise PluginError(
                f"plugin 'lora': target_modules: {config.target_modules}: {str(error).partition('. ')[0]}. "
                f"Layers of this model: {', '.join(sorted(linear))}."
            ) from None
        trained, total = cast("Any", wrapped).get_nb_trainable_parameters()
        logger.info(
            "lora: %s of %s parameters are trained (%.2f%%)", f"{trained:,}", f"{total:,}", 100 * trained / total
        )
        return wrapped

    @hookimpl(wrapper=True)
    def export_model(self, run: Run, folder: Path) -> Generator[None, Any, Any]:
        adapted: Any = run.unwrap_model()
        if not self.config.merge:
            result = yield
            return result
        if quantizes(self.config):
            from fastloop_plugins.training import _four_bit

            _four_bit.dequantize(adapted)
        _replicate_adapters(adapted)
        merged = adapted.merge_and_unload()  # training has ended
        with run.substitute_model(merged):
            return (yield)


def _replicate_adapters(model: nn.Module) -> None:
    """Hold the adapters of each sharded layer in full on every process, so that torch can multiply and add them. Every
    process must call it."""
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    from fastloop.distributed.tensors import gather_full

    for layer in model.modules():
        base = getattr(getattr(layer, "base_layer", None), "weight", None)
        if not isinstance(base, DTensor):
            continue
        mesh = base.device_mesh
        for adapter in (*layer.lora_A.values(), *layer.lora_B.values()):  # type: ignore[operator]
            full = gather_full(adapter.weight.detach())
            whole = distribute_tensor(full, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
            adapter.weight = nn.Parameter(whole, requires_grad=False)
