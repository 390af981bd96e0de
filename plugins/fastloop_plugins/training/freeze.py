"""Freezes parameters by name: they keep their initial or pretrained values.

    plugins:
      - freeze: {match: ["*.embeddings.*", "*.layer.0.*"]}

In patterns of parameter names, ``*`` stands for any characters, dots included. With ``lora``, a pattern of a layer
freezes its adapters. Every pattern must match a parameter. Dropout stays active in frozen modules, and batch norm
updates its statistics.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastloop import Plugin, RecipeError, hookimpl, option

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run

log = logging.getLogger("fastloop")


class Freeze(Plugin):
    """Freezes parameters by name."""

    name = "freeze"
    numerics = "changes-training"
    runs_after = ("lora", "activation-checkpointing")
    runs_before = ("fsdp",)

    match: str | list[str] = option("Pattern of parameter names, such as embeddings.*, or a list of them.")

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        from fastloop_plugins.training._patterns import matching, parameters_by_name

        where, match = f"{run.recipe.where}: plugins.freeze.match", self.match
        parameters = parameters_by_name(model)
        for pattern in [match] if isinstance(match, str) else match:
            for name in matching(pattern, parameters, where):
                parameters[name].requires_grad_(False)
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in parameters.values()]
        trained, total = sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)
        if not trained:
            raise RecipeError(f"{where}: {match!r} freezes every parameter that is trained. Leave one out.")
        log.info(
            "freeze: %s of %s parameters are trained (%.2f%%)", f"{trained:,}", f"{total:,}", 100 * trained / total
        )
