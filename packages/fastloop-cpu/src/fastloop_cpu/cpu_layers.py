"""Computes what lies between the products of a layer in one pass each, on a CPU.

    plugins:
      - amp: {dtype: bf16}
      - cpu-layers

The plugin is for BERT, DistilBERT, RoBERTa, XLM-R, CamemBERT and ELECTRA: one kernel computes bias, dropout, residual
and layer norm, another one bias and GELU. Hidden states stay in bf16 from product to product.

It is also for the decoders Llama, Mistral, Qwen2 and Qwen3. One kernel computes residual and RMS norm, another one the
gated activation (SwiGLU), and a third one the rotary embedding. The residual stream stays in float32. Linear layers may
have adapters.

It needs a processor with AVX512-BF16, a C compiler and bf16 precision. Otherwise the plugin logs the reason and changes
nothing. Weights that a strategy divides or gathers are left to the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastloop import Plugin, Recommendation, SpeedupEstimate, hookimpl
from fastloop_plugins.toolkit import BERT_LIKE, model_type, transformers_model

from fastloop_cpu._precision import computes_in_bf16, report_no_effect

if TYPE_CHECKING:
    from fastloop import Machine, Recipe, Run, StepProfile
    from torch import nn

DECODERS = ("llama", "mistral", "qwen2", "qwen3")
"""Types of transformers models with the formulas of Llama's layer."""
MODEL_TYPES = (*BERT_LIKE, *DECODERS)
"""Types of models that the kernels compute."""
ENCODER_OPERATIONS = (
    "aten::native_layer_norm",
    "aten::native_layer_norm_backward",
    "aten::gelu",
    "aten::gelu_backward",
)
"""Operations of torch that the kernels replace in models like BERT."""
DECODER_OPERATIONS = (
    "aten::mul",
    "aten::pow",
    "aten::mean",
    "aten::silu",
    "aten::silu_backward",
    "aten::neg",
    "aten::cat",
)
"""Operations of torch that the kernels replace in models like Llama: those of norm, activation and rotary embedding."""


class CpuLayers(Plugin):
    """Computes norms and activations on a CPU in one pass. Replaces the forward of the modules around the products."""

    name = "cpu-layers"
    numerics = "reduced-precision"
    runs_before = ("cls-last-layer", "activation-checkpointing", "slot:strategy", "compile")
    for_inference = True

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """On a CPU with bf16 matrix units, for models like BERT or Llama in bf16 that are not compiled."""
        fits = machine.device == "cpu" and "bf16" in machine.fast_dtypes and computes_in_bf16(recipe)
        if not fits or recipe.has_plugin("compile") or model_type(recipe) not in MODEL_TYPES:
            return None
        return Recommendation(why="one pass computes residual and norm, another one the activation")

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        kind = model_type(recipe)
        fits = profile.device == "cpu" and computes_in_bf16(recipe) and kind in MODEL_TYPES
        if not fits or cls.name in recipe.plugins:
            return None
        seconds = profile.spent(ENCODER_OPERATIONS if kind in BERT_LIKE else DECODER_OPERATIONS)
        return SpeedupEstimate(
            seconds=0.5 * seconds,
            why=f"Norms and activations are {seconds / profile.seconds:.0%} of a step; one pass each computes them.",
        )

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        reason = self.reason_against(run, model)
        if reason is None and not kernels_of(model).use(model):
            reason = f"{type(model).__name__} has no layers that the kernels compute"
        if reason is not None:
            report_no_effect(self, run, f"{reason}: the layers stay as they are.")

    @staticmethod
    def reason_against(run: Run, model: nn.Module) -> str | None:
        """Why the kernels cannot compute this model's layers; None: they may."""
        from fastloop_cpu._native import reason_against, unavailable_kernels

        kernels = kernels_of(model)
        if kernels is None:
            return f"{type(model).__name__} is not one of {', '.join(MODEL_TYPES)}"
        return reason_against(run, model) or unavailable_kernels(kernels.SOURCE)


def kernels_of(model: nn.Module) -> Any:
    """The module of this package that replaces layers of models of this type; None: there is none."""
    from fastloop_cpu import _cpu_decoder, _cpu_layers

    inner = transformers_model(model)
    kind = None if inner is None else inner.config.model_type
    if kind in DECODERS:
        return _cpu_decoder
    return _cpu_layers if kind in BERT_LIKE else None
