"""The model that ``lora`` trains: with new adapters, or with those of a folder."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from fastloop import PluginError, RecipeError
from fastloop.probing import has_values
from fastloop_plugins.models.adapters import Adapter, add_adapter, find_adapter, quiet_peft, read_settings
from fastloop_plugins.training._lora_modules import classifier_head, owning_modules
from fastloop_plugins.training._lora_options import CHANGES_BASE, LoRAOptions
from fastloop_plugins.training._lora_tokens import check_token_rows, new_token_rows

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn

    from fastloop import Run
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")

FROM_ADAPTER = {
    "r": "r",
    "alpha": "lora_alpha",
    "target_modules": "target_modules",
    "modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "layers_to_transform": "layers_to_transform",
    "init_lora_weights": "init_lora_weights",
}
"""Option -> its name in peft, for the options that a continued adapter decides."""


def adapter_to_continue(lora: LoRAOptions, recipe: Recipe) -> Adapter | None:
    """The adapter to continue; None: a new one is made.

    Raises:
        RecipeError: The option ``adapter`` names no adapter, or ``model.name`` names another one.
    """
    name = recipe.model.get("name")
    where = f"{recipe.where}: plugins.lora.adapter"
    of_model = find_adapter(recipe, name, f"{recipe.where}: model.name") if isinstance(name, str) else None
    if lora.adapter is None:
        return of_model
    adapter = find_adapter(recipe, lora.adapter, where)
    if adapter is None:
        raise RecipeError(
            code="file-missing",
            place=f"{where}: {recipe.find(lora.adapter)}",
            found="no adapter_config.json",
            expected="the folder of a LoRA adapter, such as RUN/model of a run with merge: false",
        )
    if of_model is not None:
        raise RecipeError(
            "model.name is the folder of an adapter, too.",
            code="exclusive-options",
            place=where,
            remedy="Remove one of them.",
        )
    return adapter


def new_adapter(lora: LoRAOptions, run: Run, model: nn.Module) -> PeftModel:
    """Wrap a model by peft, with adapters that have their initial values."""
    from peft import LoraConfig, get_peft_model

    modules_to_save = lora.modules_to_save
    if modules_to_save is None:
        modules_to_save = owning_modules(model, run.new_weights or classifier_head(model))
        if modules_to_save:
            logger.info("lora: trained in full: %s", ", ".join(modules_to_save))
    token_rows = new_token_rows(run, model, modules_to_save, lora.merge)
    if lora.quantize:
        from fastloop_plugins.training import _four_bit

        _four_bit.quantize(run, model, modules_to_save)
    initial = lora.init_lora_weights
    if str(initial).startswith(CHANGES_BASE) and not has_values(model):
        initial = True  # peft computes the others from the weights
    options = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type] # peft divides it by r
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        modules_to_save=modules_to_save or None,
        trainable_token_indices=token_rows or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        layers_to_transform=lora.layers_to_transform,
        init_lora_weights=initial,  # type: ignore[arg-type]
    )
    try:
        with quiet_peft():
            wrapped = get_peft_model(model, options)
    except (ValueError, TypeError) as error:  # TypeError: a layer is in both target_modules and modules_to_save
        kinds = ("Linear", "Conv1D", "FourBitLinear")
        linear = {name.rpartition(".")[2] for name, module in model.named_modules() if type(module).__name__ in kinds}
        raise PluginError(
            f"{str(error).partition('. ')[0]}. Layers of this model: {', '.join(sorted(linear))}.",
            code="unknown-module",
            place=f"plugin 'lora': target_modules: {lora.target_modules}",
        ) from None
    _check_layers(lora.layers_to_transform, wrapped)
    _check_magnitudes(wrapped)
    return wrapped


def _check_layers(wanted: list[int] | int | None, wrapped: Any) -> None:
    """Raise an error if an index of ``layers_to_transform`` is not one of a layer with adapters."""
    if wanted is None:
        return
    indices = set()
    for name in wrapped.base_model.targeted_module_names:
        match = re.match(r".*?\.[^.]*\.(\d+)\.", name)  # as peft finds it
        if match is not None:
            indices.add(int(match[1]))
    missing = ({wanted} if isinstance(wanted, int) else set(wanted)) - indices
    if missing:
        raise PluginError(
            f"found {', '.join(map(str, sorted(missing)))}, and the model has no such layer to adapt. Its layers with "
            f"adapters: {', '.join(map(str, sorted(indices)))}.",
            code="unknown-module",
            place="plugin 'lora': layers_to_transform",
        )


def _check_magnitudes(wrapped: PeftModel) -> None:
    """Raise an error for a layer whose outputs DoRA would make NaN: it divides by the norm of each row."""
    for name, module in wrapped.named_modules():
        for vector in getattr(module, "lora_magnitude_vector", {}).values():
            if not vector.weight.is_meta and not vector.weight.all():
                raise PluginError(
                    f"{name.removeprefix('base_model.model.')} has rows of zeros, such as the one of the padding "
                    "token, and DoRA divides by their norm.",
                    code="unsupported-model",
                    place="plugin 'lora': use_dora",
                    remedy="Leave the layer out of target_modules.",
                )


def share_inputs(wrapped: PeftModel) -> None:
    """Let adapters multiply the input of their layer as it is, for training under autocast.

    By default peft casts it to the dtype of the adapter, float32. Autocast casts the copy back to 16 bits for the
    product, so the backward pass keeps one more copy for each adapter: three of one input, with adapters at query, key
    and value. Both casts change no bit. In a tensor of 16 bits dropout would round, and DoRA computes its norms in the
    dtype of the input, so these layers keep the cast. So do all layers of a model with weights in 16 bits, which may
    compute outside autocast, too.
    """
    from peft.tuners.lora import LoraLayer
    from torch import float32
    from torch.nn import Identity

    for parameter in wrapped.parameters():
        if parameter.is_floating_point() and parameter.dtype != float32:
            return
    for module in wrapped.modules():
        if not isinstance(module, LoraLayer) or module.lora_variant:
            continue
        if all(isinstance(dropout, Identity) for dropout in module.lora_dropout.values()):
            module.cast_input_dtype_enabled = False


def continue_adapter(
    lora: LoRAOptions, given: Collection[str], run: Run, model: nn.Module, adapter: Adapter
) -> PeftModel:
    """Wrap a model by peft, with the weights of an adapter.

    Args:
        given: The options of the recipe; the others of ``lora`` have their defaults.

    Raises:
        RecipeError: An option contradicts the adapter, or the adapter is not one of this model.
    """
    where = f"{run.recipe.where}: plugins.lora"
    settings = read_settings(adapter.folder, where)
    for name in FROM_ADAPTER.keys() & given:
        ours = getattr(lora, name)
        theirs = getattr(settings, FROM_ADAPTER[name])
        if isinstance(theirs, set):
            theirs = sorted(theirs)
        if ours is not None and ours != theirs and not (isinstance(ours, list) and sorted(ours) == theirs):
            raise RecipeError(
                f"found {ours}, and the adapter {adapter.folder} has {theirs}.",
                code="conflicting-values",
                place=f"{where}.{name}",
                remedy=f"Leave {name} out.",
            )
    if str(settings.init_lora_weights).startswith(CHANGES_BASE):
        raise RecipeError(
            f"{adapter.folder} was made with init_lora_weights: {settings.init_lora_weights}, which changed its base "
            "model.",
            code="unsupported-adapter",
            place=f"{where}.adapter",
            remedy="Merge it into the base model, and start a new adapter.",
        )
    _check_classes(model, adapter, where)
    check_token_rows(model, settings.trainable_token_indices, f"{where}.adapter: {adapter.folder}")
    if "dropout" in given:
        settings.lora_dropout = lora.dropout
    if lora.quantize:
        from fastloop_plugins.training import _four_bit

        _four_bit.quantize(run, model, settings.modules_to_save or ())
    logger.info("lora: continues %s: r %d, alpha %g", adapter.folder, settings.r, settings.lora_alpha)
    return add_adapter(model, adapter.folder, settings, where, trained=True)


def _check_classes(model: nn.Module, adapter: Adapter, where: str) -> None:
    """Raise an error if the adapter's head is one for other classes, or for another order of them."""
    if adapter.base_config is None or not hasattr(model, "config"):
        return
    from transformers import AutoConfig

    ours = getattr(model.config, "id2label", None)
    theirs = getattr(AutoConfig.from_pretrained(str(adapter.base_config)), "id2label", None)
    if ours != theirs:
        remedy = "Rename them in the data, or start a new adapter."
        if ours and theirs and sorted(ours.values()) == sorted(theirs.values()):
            remedy = "Name the adapter's folder as model.name, so that its order of classes is used."
        raise RecipeError(
            f"the adapter {adapter.folder} was trained for the classes {theirs}, and the model has {ours}.",
            code="labels-differ",
            place=where,
            remedy=remedy,
        )
