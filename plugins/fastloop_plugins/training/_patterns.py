"""Patterns of parameter names, such as ``head.*``: the names are those of the model as built."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fastloop import RecipeError
from fastloop.errors import did_you_mean
from fastloop.runtime.compiled_modules import COMPILED

if TYPE_CHECKING:
    from torch import nn

WRAPPERS = (
    "base_model.model.", "modules_to_save.default.", "base_layer.", "_checkpoint_wrapped_module.", f"{COMPILED}.",
)  # fmt: skip
"""Parts that adapters (peft), activation checkpointing and compilation add to names."""


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter, without the parts that wrappers add. The parameters that a wrapper adds keep the names that it
    gives them."""
    parameters = {}
    for name, parameter in model.named_parameters():
        if ".original_module." in name:  # peft keeps it beside the copy that is trained
            continue
        for part in WRAPPERS:
            name = name.replace(part, "")
        parameters[name] = parameter
    return parameters


def matching(pattern: str, parameters: Mapping[str, nn.Parameter], where: str) -> list[str]:
    """The names that a pattern matches: ``*`` stands for any characters, dots included.

    Raises:
        RecipeError: No name matches; suggests near ones.
    """
    names = fnmatch.filter(parameters, pattern)
    if not names:
        raise RecipeError(
            f"no parameter matches {pattern!r}.",
            code="no-match",
            place=where,
            remedy=did_you_mean(pattern, _suggestions(parameters)),
        )
    return names


def _suggestions(names: Iterable[str]) -> list[str]:
    """Patterns that match: each name, and each module with ``.*``."""
    modules: set[str] = set()
    for name in names:
        parts = name.split(".")
        for depth in range(1, len(parts)):  # of a.b.weight: a.* and a.b.*
            modules.add(f"{'.'.join(parts[:depth])}.*")
    return [*names, *modules]
