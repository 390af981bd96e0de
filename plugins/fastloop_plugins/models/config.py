"""Configurations of transformers for models that are trained from scratch."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastloop import RecipeError
from fastloop.errors import did_you_mean
from fastloop_plugins.models.hub import quiet


def config_from_scratch(given: dict[str, Any], where: str) -> Any:
    """The configuration of transformers that ``model.config`` describes: ``model_type`` and its options.

    Args:
        where: The recipe and the key, for messages.

    Raises:
        RecipeError: There is no such type or option, or a value is invalid.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kinds = list(CONFIG_MAPPING.keys())
    kind, rest = given["model_type"], {str(key): value for key, value in given.items() if key != "model_type"}
    if kind not in kinds:
        near = did_you_mean(kind, kinds)
        raise RecipeError(f"{where}.model_type: transformers has no {kind!r}.{near}")
    cls = CONFIG_MAPPING[kind]
    known = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    for key in rest:
        if key not in known:  # transformers would store it and never read it
            raise RecipeError(f"{where}.{key}: {kind} has no such option.{did_you_mean(key, known)}")
    try:
        with quiet():  # the default end token may be outside a small vocabulary; build() sets it
            return AutoConfig.for_model(kind, **rest)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise RecipeError(f"{where}: {' '.join(str(error).split())}") from None
