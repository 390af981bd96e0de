"""The repeated blocks of a model, such as the layers of a transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastloop import PluginError
from fastloop.errors import did_you_mean

if TYPE_CHECKING:
    from torch import nn


def transformer_blocks(model: nn.Module, names: Sequence[str] | None = None, where: str = "blocks") -> list[nn.Module]:
    """The model's blocks, outermost first: the elements of lists of modules of one class, or all modules of the classes
    ``names``.

    Raises:
        PluginError: The model has no module of a given class.
    """
    from torch import nn

    if names is not None:
        classes = {type(module).__name__ for module in model.modules()}
        for name in names:
            if name not in classes:
                raise PluginError(
                    f"the model has no module of class {name!r}.",
                    code="unknown-module",
                    place=where,
                    remedy=did_you_mean(name, classes),
                )
        return [module for module in model.modules() if type(module).__name__ in names]
    blocks: list[nn.Module] = []
    for parent in model.modules():
        if not isinstance(parent, nn.ModuleList) or len(parent) < 2:
            continue
        kinds = {type(child) for child in parent}
        if len(kinds) == 1:
            blocks += parent
    return blocks


def outermost(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks that are not within another one, as an expert of a layer is."""
    inner: set[int] = set()  # ids of the modules within a block
    for block in blocks:
        for module in block.modules():
            if module is not block:
                inner.add(id(module))
    return [block for block in blocks if id(block) not in inner]
