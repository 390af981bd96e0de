"""Folders of LoRA adapters that peft wrote: find their base model, and load or merge them."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import Problem, RecipeError
from fastloop.export.card import BASE_CONFIG
from fastloop.probing import has_values
from fastloop.problem import clause, typed_clause
from fastloop.runtime.files import read_json_object
from fastloop_plugins.models.hub import quiet

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from torch import nn

    from fastloop.recipe import Recipe
    from fastloop_plugins.models.label_order import LabelOrder

logger = logging.getLogger("fastloop")

ADAPTER_CONFIG = "adapter_config.json"
"""The file of peft that marks a folder as an adapter."""


@dataclass(frozen=True)
class Adapter:
    """A folder with an adapter.

    Attributes:
        base: The base model: a hub id or a folder.
        revision: The base model's revision on the hub.
    """

    folder: Path
    base: str
    revision: str | None

    @property
    def base_config(self) -> Path | None:
        """The configuration with the classes of the task; None: another program wrote the adapter."""
        path = self.folder / BASE_CONFIG
        return path if path.is_file() else None


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter alone, without its base model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def find_adapter(recipe: Recipe, name: str, where: str) -> Adapter | None:
    """The adapter that ``model.name`` or another option names; None if that is no folder of an adapter.

    If the base model is a folder that is gone, the recipe's ``model.name`` replaces it.

    Raises:
        RecipeError: The folder holds another kind of adapter, or names no base model.
    """
    folder = recipe.find(name)
    if not is_adapter(folder):
        return None
    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        kind = settings["peft_type"]
        base = settings.get("base_model_name_or_path")
        revision = settings.get("revision")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecipeError(
            f"not a configuration of peft: {typed_clause(error)}.",
            code="wrong-format",
            place=f"{where}: {folder / ADAPTER_CONFIG}",
        ) from None
    if kind != "LORA":
        raise RecipeError(
            f"{folder} holds an adapter of the type {kind}.", code="unsupported-adapter", place=where, expected="LORA"
        )
    own = recipe.model.get("name")
    if isinstance(base, str) and Path(base).is_absolute() and not Path(base).is_dir():
        base = None
    if base is None and isinstance(own, str) and not is_adapter(recipe.find(own)):
        base = own
    if not isinstance(base, str):
        raise RecipeError(
            f"{folder} is an adapter, and its base model cannot be found: {ADAPTER_CONFIG} names "
            f"{settings.get('base_model_name_or_path')!r}.",
            code="base-model-missing",
            place=where,
            remedy="Write the folder or hub id of the base model to base_model_name_or_path.",
        )
    return Adapter(folder, base, revision if isinstance(revision, str) else None)


def check_classes(adapter: Adapter, order: LabelOrder, where: str) -> None:
    """Raise an error if an adapter's head is for other classes than the data's. Log the order of classes if the adapter
    does not name its own.

    Args:
        order: The classes as the model of the adapter's configuration numbers them.

    Raises:
        RecipeError: The classes differ.
    """
    if adapter.base_config is None:
        listed = ", ".join(f"{index} = {name}" for index, name in enumerate(order.names))
        logger.warning(
            Problem(
                f"{adapter.folder} does not name its classes. They are taken to be {listed}.",
                code="classes-without-names",
                place=where,
            )
        )
    elif not _has_classes(adapter.base_config):
        raise RecipeError(
            f"{adapter.folder} is the adapter of a model without classes, and the task trains a new head. The base "
            f"model needs the adapter's weights first.",
            code="labels-differ",
            place=where,
            remedy="Merge them with the run of the adapter, by `fastloop export RUN --out FOLDER`. Then set "
            f"model.name=FOLDER. Or start from the base model {adapter.base}.",
        )
    elif not order.keeps_head:
        raise RecipeError(
            f"the classes of the data are {', '.join(order.names)}, and {adapter.folder} was trained for others, "
            f"which {BASE_CONFIG} lists.",
            code="labels-differ",
            place=where,
            remedy=f"Rename them in the data, or start from the base model {adapter.base}.",
        )


def _has_classes(base_config: Path) -> bool:
    """Whether the configuration of an adapter's base is that of a classifier."""
    architectures = read_json_object(base_config).get("architectures") or ["Classification"]
    return any(str(name).endswith("Classification") for name in architectures)


def continues(recipe: Recipe) -> bool:
    """Whether ``lora`` trains the adapter that ``model.name`` names; otherwise it is merged into its base."""
    return recipe.inference is None and recipe.has_plugin("lora")


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


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence the warnings of peft inside this context that fastloop acts on itself, and those about its own code."""
    handled = (
        ".*is_gradient_checkpointing",  # peft uses a deprecated name of transformers
        "fan_in_fan_out is set to",  # peft sets it as the layer needs it
        ".*tie_word_embeddings",  # `merge` separates tied weights
        ".*no longer tied",
        "Setting `save_embedding_layers`",  # adapters of embeddings are saved with their layers
        "Could not find a config file in",
        ".*lora_bias=True",  # `_check_biases` refuses it
        "aLoRA is",  # `read_settings` refuses it
        ".*copying from a non-meta parameter",  # a model without values stays without: see `has_values`
    )
    with warnings.catch_warnings():
        for message in handled:
            warnings.filterwarnings("ignore", message=message)
        yield


def read_settings(folder: Path, where: str) -> LoraConfig:
    """The settings of an adapter that ``find_adapter`` found.

    Raises:
        RecipeError: The file cannot be read, or the adapter cannot be merged.
    """
    with importing_bitsandbytes():
        from peft import LoraConfig

    try:
        with quiet_peft():
            settings: LoraConfig = LoraConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{folder} cannot be loaded: {clause(error)}.", code="file-unreadable", place=where) from None
    if getattr(settings, "alora_invocation_tokens", None) is not None:
        raise RecipeError(
            f"{folder} acts only after its alora_invocation_tokens, so it cannot be merged.",
            code="unsupported-adapter",
            place=where,
            expected="an adapter that acts on each token",
        )
    settings.task_type = None  # else the wrapper adds modules of its own to modules_to_save
    return settings


def add_adapter(model: nn.Module, folder: Path, settings: LoraConfig, where: str, trained: bool) -> PeftModel:
    """Wrap a model by peft, with the weights of an adapter.

    Args:
        settings: A result of ``read_settings``.
        trained: Whether the adapter's weights get gradients.

    Raises:
        RecipeError: The adapter is not one of this model, or it cannot be merged.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    advice = "Use the base model that it was trained on."
    settings.inference_mode = not trained
    try:
        with quiet(), quiet_peft():
            wrapped = PeftModel(model, settings)
            loaded = wrapped.load_adapter(str(folder), "default", is_trainable=trained, torch_device="cpu")
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, SafetensorError) as error:
        raise RecipeError(
            f"{folder} is not an adapter of {type(model).__name__}: {clause(error)}.",
            code="adapter-differs",
            place=where,
            remedy=advice,
        ) from None
    names = [*loaded.missing_keys, *loaded.unexpected_keys]
    if names:
        raise RecipeError(
            f"{folder} is not an adapter of {type(model).__name__}: {len(names)} weights have no counterpart, such as "
            f"{names[0]}.",
            code="adapter-differs",
            place=where,
            remedy=advice,
        )
    if settings.lora_bias:
        _check_biases(wrapped, folder, where)
    return wrapped


def _check_biases(wrapped: nn.Module, folder: Path, where: str) -> None:
    """Raise an error for an adapter with a bias for a layer that has none: an export or a prediction could not merge
    it."""
    for name, module in wrapped.named_modules():
        if hasattr(module, "lora_bias") and module.get_base_layer().bias is None:
            raise RecipeError(
                f"{folder} has lora_bias: true, and {name.removeprefix('base_model.model.')} of the base model has no "
                "bias, so the adapter cannot be merged.",
                code="unsupported-adapter",
                place=where,
                expected="lora_bias: false",
            )


def merge(wrapped: Any, where: str) -> nn.Module:
    """Add adapters to the weights of their layers, and return the model without them.

    An output layer that is tied to the embedding gets a weight of its own first, if one of them has adapters or is
    trained in full. The configuration is changed to two weights, so both are exported.

    Raises:
        RecipeError: See ``check_untied``.
    """
    model = wrapped.get_base_model()
    names = tied_and_adapted(wrapped)
    if names:
        check_untied(model, names, where)
        _copy_shared_weights(wrapped)
    with quiet_peft():
        merged: nn.Module = wrapped.merge_and_unload()
    if names:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
    return merged


def merge_adapter(model: nn.Module, folder: Path, where: str) -> set[str]:
    """Add the weights of an adapter to its base model, in place. A model on the meta device receives its weights from
    another process, and stays as it is.

    Returns:
        Names of the parameters that the adapter has in full, such as those of a head.

    Raises:
        RecipeError: The adapter is not one of this model.
    """
    if not has_values(model):
        return set()
    with importing_bitsandbytes():
        from peft.utils import ModulesToSaveWrapper

    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    wrapped = add_adapter(model, folder, read_settings(folder, where), where, trained=False)
    replaced = set()
    for name, module in wrapped.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            prefix = name.removeprefix("base_model.model.")
            replaced |= {f"{prefix}.{key}" for key, _ in module.original_module.named_parameters()}
    merge(wrapped, where)
    for name, parameter in model.named_parameters():  # peft has frozen them
        parameter.requires_grad_(trained.get(name, True))
    return replaced


def tied_and_adapted(wrapped: nn.Module) -> list[str]:
    """Names of the layers that have adapters, or that are trained in full, and whose weight other layers have, too.

    Rows of new tokens are no adapters of one layer: peft trains them for all layers of the weight, and merges them.
    """
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    shared = _shared_parameters(wrapped)
    names = []
    for name, module in wrapped.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            layer: Any = module.original_module
        elif isinstance(module, BaseTunerLayer) and not isinstance(module, TrainableTokensLayer):
            layer = module.get_base_layer()
        else:
            continue
        if any(id(parameter) in shared for parameter in layer.parameters()):
            names.append(name.removeprefix("base_model.model."))
    return names


def check_untied(model: Any, names: Sequence[str], where: str) -> None:
    """Raise an error unless the output layer and the embedding of a model can be exported with a weight each.

    Other models share weights in ways that their configuration cannot turn off one by one, or read the option
    ``tie_word_embeddings`` in their forward.

    Args:
        names: A result of ``tied_and_adapted``.

    Raises:
        RecipeError: They cannot.
    """
    embeddings: list[Any] = []
    if hasattr(model, "get_output_embeddings") and not model.config.is_encoder_decoder:
        embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = {id(parameter) for module in embeddings if module is not None for parameter in module.parameters()}
    if not _shared_parameters(model) <= weights:
        raise RecipeError(
            f"{', '.join(names)} of {type(model).__name__} share their weights with other layers, so adapters of one "
            "of them cannot be merged.",
            code="shared-parameter",
            place=where,
            remedy="Leave them out of target_modules and modules_to_save.",
        )


def _shared_parameters(model: nn.Module) -> set[int]:
    """The ids of the parameters that several modules have."""
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    return {parameter for parameter, count in owners.items() if count > 1}


def _copy_shared_weights(wrapped: nn.Module) -> None:
    """Give each layer with adapters a weight of its own."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch import nn

    for module in wrapped.modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        layer: Any = module.get_base_layer()
        if id(layer.weight) in _shared_parameters(wrapped):
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
