"""Trains low-rank adapters (LoRA) and freezes the model's own weights.

    plugins:
      - lora: {r: 8, alpha: 16}

``train.parameter_groups`` gives some of these matrices a learning rate of their own: ``{match: "*lora_B*", lr: 1e-3}``.

Weights that the pretrained model lacks, such as those of a new head, are trained in full and saved with the adapters.
The exported model has the adapters merged in. With ``merge: false``, only the adapters are written, and ``fastloop
evaluate`` and ``predict`` add them to the base model. Method: Hu et al., "LoRA: Low-Rank Adaptation of Large Language
Models", 2021. ``use_rslora`` scales adapters by ``alpha / sqrt(r)`` instead of ``alpha / r`` (Kalajdzievski, "A Rank
Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023). ``use_dora`` also trains the magnitude of each weight's
columns (Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024).

To continue an adapter, of fastloop or of peft, name its folder. Its ``r``, ``alpha`` and layers are kept:

    model: {name: runs/first/model}       # the folder of the adapter; it names its base model and the classes
    plugins:
      - lora: {merge: false}

Or name the base model and set ``adapter``: ``lora: {adapter: FOLDER}``.

Adapters may be on an output layer that is tied to the embedding (``target_modules: [lm_head]``). The exported model
then has a weight for each of them.

``quantize: nf4`` (QLoRA) keeps the frozen linear layers of a pretrained model in 4 bits, an eighth of float32:

    model: {name: FOLDER}
    plugins:
      - lora: {r: 8, quantize: nf4, target_modules: all-linear}

Each process loads the model in float32 before it is quantized, and again for the export. Layers whose number of inputs
is not a multiple of 64 stay in float32. With ``merge: false``, a warning says that the adapter computes other numbers
on the base model in float32. On several processes, use ``ddp``. Method: Dettmers et al., "QLoRA: Efficient
Finetuning of Quantized LLMs", 2023.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import Device, Package, Problem, RecipeError, When, hookimpl
from fastloop.problem import counted
from fastloop_plugins.models.adapters import check_untied, importing_bitsandbytes, merge, quiet_peft, tied_and_adapted
from fastloop_plugins.training._adapter_files import replicate_adapters, task_type, write_base_config
from fastloop_plugins.training._lora_model import (
    adapter_to_continue,
    continue_adapter,
    new_adapter,
    share_inputs,
)  # fmt: skip
from fastloop_plugins.training._lora_modules import running_statistics
from fastloop_plugins.training._lora_options import (
    CHANGES_BASE,
    LoRAOptions,
    check_chosen_layers,
    check_initial_values,
)

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run
    from fastloop.recipe import Recipe


def quantizes(plugin: Any) -> bool:
    """A condition for ``When``: whether frozen weights are kept in 4 bits."""
    return plugin.quantize is not None


class LoRA(LoRAOptions):
    """Trains low-rank adapters only, with peft."""

    name = "lora"
    numerics = "changes-training"
    on_resume = {"merge": "free"}
    requirements = (
        Package("peft", ">=0.18", extra="lora"),
        When(quantizes, Device("cpu", "cuda", "xpu")),
        When(quantizes, Package("bitsandbytes", ">=0.50", extra="qlora")),
    )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.given = set(options)
        if quantizes(self):
            self.conflicts = {
                "fsdp": "4-bit weights with their scales cannot be sharded. Use ddp, or leave quantize out.",
                "deepspeed": "DeepSpeed shards and casts weights, which would damage those in 4 bits. Use ddp, or "
                "leave quantize out.",
                "tensor-parallel": "4-bit weights with their scales cannot be divided. Use ddp, or leave quantize out.",
            }
        elif self.use_dora:
            reason = "DoRA normalizes whole weights, and this strategy divides them. Use ddp, or leave use_dora out."
            self.conflicts = dict.fromkeys(("fsdp", "deepspeed", "tensor-parallel"), reason)

    def begins_idle(self, recipe: Recipe) -> bool:
        """Whether the adapters are new and change nothing before the first step, because one of their factors is 0."""
        if self.init_lora_weights is False or str(self.init_lora_weights).startswith(CHANGES_BASE):
            return False
        return adapter_to_continue(self, recipe) is None

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        where = f"{recipe.where}: plugins.lora"
        from_scratch = recipe.model.get("config") is not None
        if quantizes(self) and from_scratch and recipe.model.get("weights") is None:
            raise RecipeError(
                "found model.config, which trains from scratch, and 4-bit weights are frozen.",
                code="conflicting-values",
                place=f"{where}.quantize",
                remedy="Set model.name or model.weights to pretrained weights, or leave quantize out.",
            )
        key = "config" if from_scratch else "weights"
        if not self.merge and recipe.model.get(key) is not None:
            raise RecipeError(
                f"found false with model.{key}. An adapter alone needs a base model that can be loaded again: name "
                "one with model.name, without model.weights.",
                code="conflicting-values",
                place=f"{where}.merge",
                remedy="Or set merge: true.",
            )
        check_initial_values(self, where)
        check_chosen_layers(self, where)
        adapter_to_continue(self, recipe)

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> nn.Module:
        with importing_bitsandbytes():
            import peft  # noqa: F401 # the others import it, too

        where = f"{run.recipe.where}: plugins.lora"
        if not self.merge and run.recipe.model and not getattr(model, "name_or_path", ""):
            raise RecipeError(
                f"found false. An adapter alone needs a base model that peft can load, and {type(model).__name__} "
                "comes from no folder of transformers.",
                code="unsupported-model",
                place=f"{where}.merge",
                remedy="Set merge: true.",
            )
        adapter = adapter_to_continue(self, run.recipe)
        if adapter is None:
            wrapped = new_adapter(self, run, model)
        else:
            wrapped = continue_adapter(self, self.given, run, model, adapter)
        if run.accelerator.native_amp and not run.strategy.sets_precision:
            share_inputs(wrapped)
        if not self.merge and (layers := running_statistics(wrapped)):
            raise RecipeError(
                "found false. Training changes the running statistics of batch norm, and an adapter alone does not "
                f"have them: {counted(len(layers), 'layer')}, such as {layers[0]}.",
                code="conflicting-values",
                place=f"{where}.merge",
                remedy="Set merge: true, or list the layers in modules_to_save.",
            )
        if names := tied_and_adapted(wrapped):
            check_untied(model, names, where)
            self.log.info("the exported model has a weight of its own for each tied layer: %s", ", ".join(names))
        if quantizes(self) and not self.merge:
            self.log.warning(
                Problem(
                    "the adapter is trained on weights in 4 bits. evaluate, predict and peft add it to the base model "
                    "as that is saved, so they compute other numbers than this run.",
                    code="other-precision",
                    place=where,
                    remedy="Set merge: true to export the weights that it was trained on.",
                )
            )
        trained, total = wrapped.get_nb_trainable_parameters()
        self.log.info("%s of %s parameters are trained (%.2f%%)", f"{trained:,}", f"{total:,}", 100 * trained / total)
        return wrapped

    @hookimpl(wrapper=True)
    def export_model(self, run: Run, folder: Path) -> Generator[None, Any, Any]:
        adapted: Any = run.unwrap_model()
        if not self.merge:
            adapted.peft_config["default"].task_type = task_type(adapted.get_base_model())
            with quiet_peft():
                result = yield
            if run.is_main:
                write_base_config(adapted.get_base_model(), folder)
            return result
        if quantizes(self):
            from fastloop_plugins.training import _four_bit

            _four_bit.dequantize(adapted)
        replicate_adapters(adapted)
        merged = merge(adapted, f"{run.recipe.where}: plugins.lora")  # training has ended
        with run.substitute_model(merged):
            return (yield)
