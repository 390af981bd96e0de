"""Selects the attention kernel for the device and the precision, and logs the reason.

    plugins:
      - attention: {implementation: auto}

``auto`` selects FlashAttention 2 if its package is installed, on CUDA in half precision. On a CPU it selects
``blocked`` of the package ``fastloop-cpu``, if that is installed; it trains twice as fast as torch's kernel there.
Otherwise it selects torch's scaled_dot_product_attention (``sdpa``). For transformers models, whose names it takes. On
Hopper, ``sdpa`` prefers cuDNN's attention, which is slow at each new shape: keep shapes few, or set
``TORCH_CUDNN_SDPA_DEPRIORITIZED=1``.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Device, Package, Plugin, PluginError, Problem, SpeedupEstimate, When, hookimpl, option
from fastloop.problem import clause
from fastloop_plugins.models.wrapped import transformers_model

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop.speedup_estimates import StepProfile


FLASH = "flash_attention_2"


class Attention(Plugin):
    """Chooses the attention kernel of a transformers model."""

    name = "attention"
    numerics = "reassociated"
    runs_before = ("compile", "activation-checkpointing", "slot:strategy")
    requirements = (
        When(lambda plugin: plugin.implementation == FLASH, Package("flash-attn")),
        When(lambda plugin: plugin.implementation == FLASH, Device("cuda")),
        When(lambda plugin: plugin.implementation == "blocked", Device("cpu")),
        When(lambda plugin: plugin.implementation == "blocked", Package("fastloop-cpu", extra="cpu")),
    )
    for_inference = True

    implementation: Literal["auto", "sdpa", "eager", "flex_attention", "flash_attention_2", "blocked"] = option(
        "The kernel; auto: by device and precision.", default="auto"
    )

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        seconds = profile.spent(
            name for name in profile.operations if name.startswith("aten::") and "attention" in name
        )
        # on CUDA auto selects torch's kernel too, unless flash-attn is installed
        if cls.name in recipe.plugins or profile.device != "cpu" or not _has_blocked_attention():
            return None
        return SpeedupEstimate(
            seconds=0.5 * seconds,
            why=f"Attention is {seconds / profile.seconds:.0%} of a step; the blocked kernel trains twice as fast.",
        )

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        inner = transformers_model(model)
        if inner is None:
            self.log.warning(
                Problem(
                    f"{type(model).__name__} is not a transformers model: its attention stays as it is.",
                    code="no-effect",
                )
            )
            return
        wanted: str = self.implementation
        reason = "the recipe sets it"
        if wanted == "auto":
            wanted, reason = self.choose(run, inner)
        if wanted == "blocked":
            from fastloop_cpu import use_blocked_attention

            use_blocked_attention(model)
            self.log.info("blocked, since %s", reason)
            return
        try:
            inner.set_attn_implementation(wanted)
        except (ValueError, ImportError) as error:
            reason_of_transformers = clause(error).partition(". ")[0]  # advice for its own users follows
            raise PluginError(
                f"{wanted!r} does not serve this model: {reason_of_transformers}.",
                code="unsupported-model",
                place=f"{run.recipe.where}: plugins.attention.implementation",
                remedy="Use eager.",
            ) from None
        if not has_implementation(inner, wanted):
            raise PluginError(
                f"{type(inner).__name__} computes attention in its own way, which transformers cannot replace by "
                f"{wanted!r}.",
                code="unsupported-model",
                place=f"{run.recipe.where}: plugins.attention.implementation",
                remedy="Use eager.",
            )
        self.log.info("%s, since %s", wanted, reason)

    @staticmethod
    def choose(run: Run, model: Any) -> tuple[str, str]:
        """The implementation for this run, and the reason."""
        precision = run.accelerator.mixed_precision
        device = run.device.type
        if not getattr(model, "_supports_sdpa", False):
            return "eager", f"{type(model).__name__} supports no other"
        if device == "cpu" and "compile" in run.plugins.names():
            return "sdpa", "any other kernel would break compile's graph"
        if device == "cpu" and not _has_blocked_attention():
            return "sdpa", "the package fastloop-cpu is not installed"
        if device == "cpu":
            return "blocked", "the device is cpu"
        if device != "cuda":
            return "sdpa", f"the device is {device}"
        if precision not in ("bf16", "fp16"):
            return "sdpa", "FlashAttention 2 needs half precision"
        if importlib.util.find_spec("flash_attn") is None:
            return "sdpa", "the package flash-attn is not installed"
        if not getattr(model, "_supports_flash_attn", False):
            return "sdpa", f"{type(model).__name__} does not support FlashAttention 2"
        return FLASH, "the device is cuda and the precision is half"


def has_implementation(model: nn.Module, wanted: str) -> bool:
    """Whether a transformers model, or one that it contains, computes attention by an implementation."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == wanted:
            return True
    return False


def _has_blocked_attention() -> bool:
    """Whether the package with the attention ``blocked`` is installed."""
    return importlib.util.find_spec("fastloop_cpu") is not None
