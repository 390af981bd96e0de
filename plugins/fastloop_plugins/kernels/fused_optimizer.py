"""Steps the optimizer in one pass over the weights: a fused kernel, or one call for all tensors of an operation.

    plugins:
      - fused-optimizer: {implementation: fused}

``fused`` updates weight and moments in one kernel (CUDA, CPU and others); ``foreach`` makes one call an operation for all weights, for
optimizers without a fused kernel. Torch's own choice is foreach on CUDA and a loop over the weights on CPU.

``8bit`` keeps the moments of Adam, AdamW and others in 8 bits, by bitsandbytes: a quarter of their memory, for fewer bits in the numbers.
Weights of fewer than 4096 elements keep theirs in 32. Needs the extra: ``pip install 'fastloop[optim8bit]'``. Method: Dettmers et al.,
"8-bit Optimizers via Block-wise Quantization", 2021.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastloop import Device, OptimizerDraft, Package, Plugin, PluginError, SpeedupEstimate, When, hookimpl, option

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from fastloop import Run
    from fastloop.estimates import StepProfile
    from fastloop.recipe import Recipe


def eight_bits(config: Any) -> bool:
    """Whether moments are to be kept in 8 bits."""
    return bool(config.implementation == "8bit")


EIGHT_BITS = ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad")
"""Torch's optimizers that bitsandbytes has too."""


class FusedOptimizer(Plugin):
    """``fused=True`` or ``foreach=True`` for the recipe's optimizer, or bitsandbytes' of the same name."""

    name = "fused-optimizer"
    numerics = "reassociated"
    requirements = (
        When(eight_bits, Device("cuda", "xpu", "cpu")),
        When(eight_bits, Package("bitsandbytes", ">=0.50", extra="optim8bit")),
    )
    description = "steps the optimizer in one pass"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        implementation: Annotated[
            Literal["fused", "foreach", "8bit"], option("One kernel for all, one call an operation, or moments in 8 bits.")
        ] = "fused"

    @classmethod
    def estimate_speedup(cls, seen: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        from fastloop.defaults import optimizer_class

        if cls.name in recipe.plugins or "fused" not in inspect.signature(optimizer_class(recipe)).parameters:
            return None
        stepping = seen.region("optimizer")
        return SpeedupEstimate(seconds=0.7 * stepping, why=f"The optimizer's step is {stepping / seen.seconds:.0%} of a step.")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if eight_bits(self.config):
            self.numerics = "reduced-precision"  # type: ignore[assignment, misc] # with this option it promises less
        else:  # another plugin's optimizer gets `fused` or `foreach` through run.optimizer_arguments
            self.fallback_hooks = ("build_optimizer",)

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        from fastloop.defaults import optimizer_class

        wanted, name = self.config.implementation, recipe.train.optimizer
        cls = optimizer_class(recipe)
        if eight_bits(self.config):
            if name not in EIGHT_BITS:
                known = ", ".join(EIGHT_BITS)
                raise PluginError(
                    f"{recipe.where}: plugins.fused-optimizer: {name} has no 8bit implementation. train.optimizer: {known} do."
                )
            return
        if wanted in inspect.signature(cls).parameters:
            return
        repair = (
            "Set plugins.fused-optimizer.implementation: foreach."
            if wanted == "fused" and "foreach" in inspect.signature(cls).parameters
            else f"Leave it out: --without {self.name}."
        )
        raise PluginError(f"{recipe.where}: plugins.fused-optimizer: torch's {name} has no {wanted} implementation. {repair}")

    @hookimpl
    def configure_optimizer(self, draft: OptimizerDraft) -> None:
        if not eight_bits(self.config):
            draft.arguments = {self.config.implementation: True}

    @hookimpl
    def build_optimizer(self, run: Run, model: nn.Module) -> Optimizer | None:
        if not eight_bits(self.config):
            return None
        import bitsandbytes
        from torch.distributed.tensor import DTensor

        train = run.recipe.train
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            raise PluginError(f"{run.recipe.where}: plugins.fused-optimizer: bitsandbytes cannot step sharded weights. Take ddp, or fused.")
        optimizer: Optimizer = getattr(bitsandbytes.optim, f"{train.optimizer}8bit")(
            parameters, lr=train.lr, weight_decay=train.weight_decay, **run.optimizer_arguments
        )
        return optimizer
