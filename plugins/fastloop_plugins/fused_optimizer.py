"""Steps the optimizer in one pass over the weights: a fused kernel, or one call for all tensors of an operation.

    plugins:
      - fused-optimizer

``fused`` updates weight and moments in one kernel (CUDA, CPU and others); ``foreach`` makes one call an operation for all weights, for
optimizers without a fused kernel. Torch's own choice is foreach on CUDA and a loop over the weights on CPU.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from fastloop import OptimizerDraft, Plugin, PluginError, hookimpl, option

if TYPE_CHECKING:
    from fastloop.recipe import Recipe


class FusedOptimizer(Plugin):
    """``fused=True`` or ``foreach=True`` for the recipe's optimizer."""

    name = "fused-optimizer"
    parity = "reassociated"
    configures = "steps the optimizer in one pass"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        implementation: Annotated[Literal["fused", "foreach"], option("One kernel for all, or one call an operation.")] = "fused"

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        import torch

        wanted, name = self.config.implementation, recipe.train.optimizer
        cls = getattr(torch.optim, name, None)
        if cls is None or wanted in inspect.signature(cls).parameters:  # None: the core says it
            return
        repair = (
            "Set plugins.fused-optimizer.implementation: foreach."
            if wanted == "fused" and "foreach" in inspect.signature(cls).parameters
            else f"Leave it out: --without {self.name}."
        )
        raise PluginError(f"{recipe.where}: plugins.fused-optimizer: torch's {name} has no {wanted} implementation. {repair}")

    @hookimpl
    def configure_optimizer(self, draft: OptimizerDraft) -> None:
        draft.arguments = {self.config.implementation: True}
