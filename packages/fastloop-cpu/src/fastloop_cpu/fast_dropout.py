"""Draws dropout masks from a faster random generator, for training on a CPU.

    plugins:
      - fast-dropout

The generator is twenty times as fast as torch's. Attention with dropout, for which torch has no fast kernel, is
computed by matrix products. Rate, scale and independence match ``nn.Dropout``; the random numbers differ. ``compile``
breaks its graph at each mask.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, Problem, Recommendation, SpeedupEstimate, hookimpl
from fastloop_plugins.toolkit import model_type, recipe_traits

if TYPE_CHECKING:
    from fastloop import Machine, Recipe, Run, StepProfile
    from torch import Tensor, nn


NAME = "fast_dropout"
"""Name of the attention in transformers' registry."""


class FastDropout(Plugin):
    """Draws dropout masks from a faster generator, on a CPU.

    Replaces ``nn.Dropout`` and the dropout in transformers' attention.
    """

    name = "fast-dropout"
    numerics = "reassociated"
    runs_before = ("activation-checkpointing", "slot:strategy", "compile")
    runs_after = ("attention",)
    for_inference = True

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """For training on a CPU, for transformers models of token ids that are not compiled."""
        if (
            machine.device != "cpu"
            or recipe.inference is not None
            or model_type(recipe) is None
            or recipe.has_plugin("compile")
            or "token-ids" not in recipe_traits(recipe)
        ):
            return None
        return Recommendation(why="torch draws dropout masks slowly on a CPU")

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        if cls.name in recipe.plugins or profile.device != "cpu":
            return None
        drawing = profile.spent(("aten::bernoulli_", "aten::native_dropout"))
        return SpeedupEstimate(
            seconds=0.9 * drawing,
            why=f"Drawing dropout masks is {drawing / profile.seconds:.0%} of a step; attention gets a faster kernel "
            "as well.",
        )

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        from torch import nn

        from fastloop_cpu._fast_dropout import BLOCKED, use

        if run.device.type != "cpu":
            self.log.warning(
                Problem(
                    f"this run is on {run.device.type}, where dropout is cheap: the plugin does nothing.",
                    code="no-effect",
                )
            )
            return
        dropouts = [module for module in model.modules() if type(module) is nn.Dropout]
        for module in dropouts:
            module.forward = partial(drop, module, module.forward)  # type: ignore[method-assign]
        config: Any = getattr(model, "config", None)
        usual = getattr(config, "_attn_implementation", None) in ("sdpa", "eager", BLOCKED)
        attention = usual and use(model, NAME, drops=True)
        if not dropouts and not attention:
            self.log.warning(
                Problem(f"{type(model).__name__} has no dropout: there is nothing to replace.", code="no-effect")
            )


def drop(module: nn.Dropout, torchs: Any, tensor: Tensor) -> Tensor:
    """The forward of an ``nn.Dropout``."""
    from fastloop_cpu._fast_dropout import dropout

    if not module.training or not 0 < module.p < 1 or tensor.device.type != "cpu" or not tensor.is_floating_point():
        by_torch: Tensor = torchs(tensor)
        return by_torch
    masked: Tensor = dropout(tensor, module.p)
    return masked
