"""Computes what lies between the products of a layer in one pass each, on a CPU.

    plugins:
      - amp: {dtype: bf16}
      - cpu-layers

One kernel computes bias, dropout, residual and layer norm, another one bias and GELU. Hidden states stay in bf16 from
product to product. The plugin is for BERT, DistilBERT, RoBERTa, XLM-R, CamemBERT and ELECTRA.

It needs a processor with AVX512-BF16, a C compiler and bf16 precision. Otherwise the plugin logs the reason and changes
nothing. Weights that a strategy divides or gathers are left to the model.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastloop import Plugin, Problem, Recommendation, SpeedupEstimate, hookimpl
from fastloop_plugins.toolkit import BERT_LIKE, model_type, transformers_model

if TYPE_CHECKING:
    from fastloop import Machine, Recipe, Run, StepProfile
    from torch import nn

logger = logging.getLogger("fastloop")


class CpuLayers(Plugin):
    """Computes norms and activations on a CPU in one pass. Replaces the forward of the modules around the products."""

    name = "cpu-layers"
    numerics = "reduced-precision"
    runs_before = ("cls-last-layer", "activation-checkpointing", "slot:strategy", "compile")
    for_inference = True

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """On a CPU with bf16 matrix units, for models like BERT in bf16 that are not compiled."""
        fits = machine.device == "cpu" and "bf16" in machine.fast_dtypes and "amp" in recipe.plugins
        if not fits or recipe.plugins.get("compile", False) is not False or model_type(recipe) not in BERT_LIKE:
            return None
        return Recommendation(why="one pass computes dropout, residual and layer norm")

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        fits = profile.device == "cpu" and "amp" in recipe.plugins and model_type(recipe) in BERT_LIKE
        if not fits or cls.name in recipe.plugins:
            return None
        norms = ("aten::native_layer_norm", "aten::native_layer_norm_backward")
        seconds = profile.spent((*norms, "aten::gelu", "aten::gelu_backward"))
        return SpeedupEstimate(
            seconds=0.5 * seconds,
            why=f"Norms and activations are {seconds / profile.seconds:.0%} of a step; one pass each computes them.",
        )

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        from fastloop_cpu._cpu_layers import use

        reason = self.reason_against(run, model)
        if reason is None and not use(model):
            reason = f"{type(model).__name__} has no layers that the kernels compute"
        if reason is not None:
            if self.name in run.recipe.selected:
                self.log.info("%s: the layers stay as they are", reason)
            else:  # the user asked for it
                self.log.warning(Problem(f"{reason}: the layers stay as they are.", code="no-effect"))

    @staticmethod
    def reason_against(run: Run, model: nn.Module) -> str | None:
        """Why the kernels cannot compute this model's layers; None: they may."""
        from fastloop_cpu._cpu_layers import SOURCE
        from fastloop_cpu._native import reason_against, unavailable_kernels

        inner = transformers_model(model)
        if inner is None or inner.config.model_type not in BERT_LIKE:
            return f"{type(model).__name__} is not one of {', '.join(BERT_LIKE)}"
        return reason_against(run, model) or unavailable_kernels(SOURCE)
