"""Patches transformers models with fused Triton kernels: norms, gated activations, rotary embeddings, and the loss.

    plugins:
      - liger

For the architectures that liger-kernel supports (Llama, Qwen, Gemma, Mistral and others), on CUDA. Head and loss are
fused only if the model computes the loss from ``labels`` in the batch. For ``causal-lm`` and other tasks that declare
``next-token-loss``, add `fused-loss`. Liger patches functions of transformers for the entire process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastloop import Device, Package, Plugin, Problem, hookimpl

if TYPE_CHECKING:
    from torch import nn


class Liger(Plugin):
    """Puts the fused kernels of liger-kernel into the model."""

    name = "liger"
    numerics = "reassociated"
    runs_before = ("lora", "activation-checkpointing", "compile", "slot:strategy")
    requirements = (Device("cuda"), Package("liger-kernel", ">=0.5", extra="liger"))
    for_inference = True

    @hookimpl
    def before_prepare(self, model: nn.Module) -> None:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        from fastloop_plugins.text.next_token_loss import with_loss

        patched: Any = model
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            self.log.warning(
                Problem(
                    f"there are no kernels for {kind or type(model).__name__}: it stays as it is.", code="no-effect"
                )
            )
            return
        fused = type(model).__name__.endswith("ForCausalLM")  # the forward that comes with it is a language model's
        fused = fused and with_loss(model) is None  # else the forward of the task computes the loss
        _apply_liger_kernel_to_instance(model=patched, fused_linear_cross_entropy=fused)
        if fused:
            self.log.info("kernels for %s, the head and its loss in one", kind)
        else:
            self.log.info("kernels for %s", kind)
