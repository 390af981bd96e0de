"""Computes attention on a CPU in one kernel: scores, softmax, dropout and sums stay in the core's cache.

    plugins:
      - amp: {dtype: bf16}
      - packing
      - cpu-attention

The kernel computes all sequences of a packed row, or a batch of sequences of equal length, in one call. Batches with a
padding mask keep the model's attention. Its products are oneDNN's, which use AMX if the processor has it.

It needs a processor with AVX512-BF16, a C compiler, bf16 precision, and heads of 32, 64 or 128 features. Otherwise the
plugin logs the reason and changes nothing. Method: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and
Work Partitioning", 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastloop import Plugin, Recommendation, SpeedupEstimate, hookimpl
from fastloop_plugins.toolkit import model_type, transformers_model

from fastloop_cpu._precision import computes_in_bf16, report_no_effect

if TYPE_CHECKING:
    from fastloop import Machine, Recipe, Run, StepProfile
    from torch import nn


REPLACED = ("sdpa", "fast_dropout", "fastloop_blocked", "packed_sdpa", "packed_fast_dropout", "packed_fastloop_blocked")
"""Implementations that the kernel replaces. Each computes the same attention."""


class CpuAttention(Plugin):
    """Computes attention on a CPU in one kernel."""

    name = "cpu-attention"
    numerics = "reduced-precision"
    runs_after = ("attention", "fast-dropout", "cls-last-layer", "packing", "lora")
    runs_before = ("activation-checkpointing", "slot:strategy", "compile")
    for_inference = True

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """On a CPU with bf16 matrix units, for transformers models in bf16 that are not compiled."""
        fits = machine.device == "cpu" and "bf16" in machine.fast_dtypes
        if not fits or not computes_in_bf16(recipe) or recipe.has_plugin("compile") or model_type(recipe) is None:
            return None
        return Recommendation(why="one kernel computes attention with dropout")

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        if (
            cls.name in recipe.plugins
            or profile.device != "cpu"
            or not computes_in_bf16(recipe)
            or model_type(recipe) is None
        ):
            return None
        seconds = profile.spent(("aten::bmm", "aten::_softmax", "aten::_softmax_backward_data"))
        return SpeedupEstimate(
            seconds=0.6 * seconds,
            why=f"Products and softmax of attention are {seconds / profile.seconds:.0%} of a step; one kernel "
            "does both.",
        )

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        reason = self.reason_against(run, model)
        if reason is not None:
            report_no_effect(self, run, f"{reason}: attention stays as it is.")
            return
        from fastloop_cpu._cpu_attention import use

        inner = transformers_model(model)
        use(inner, f"cpu_{inner.config._attn_implementation}")

    @staticmethod
    def reason_against(run: Run, model: nn.Module) -> str | None:
        """Why the kernel cannot compute this model's attention; None: it can."""
        from fastloop_plugins.toolkit import head_size

        from fastloop_cpu._cpu_attention import HEAD_SIZES, unavailable
        from fastloop_cpu._native import reason_against

        inner = transformers_model(model)
        if inner is None or not getattr(inner, "_supports_sdpa", False):
            return f"{type(model).__name__} has no selectable attention"
        current = inner.config._attn_implementation
        if current not in REPLACED:
            return f"the model's attention is {current!r}"
        reason = reason_against(run, model)
        if reason:
            return reason
        size = head_size(inner.config)
        if size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            return (
                f"heads have {size} features, not {sizes}"
                if size
                else f"the model's config gives no single head size (of {sizes})"
            )
        return unavailable()
