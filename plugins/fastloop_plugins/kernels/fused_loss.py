"""Computes head and cross entropy of a language model at once, in chunks of tokens, without the logits of all tokens.

    plugins:
      - fused-loss

A batch of 16 x 1,024 tokens of GPT-2 has 3.3 GB of float32 logits. With this plugin, only those of ``chunk_tokens``
tokens exist at a time. For tasks that declare ``next-token-loss``, such as ``causal-lm``.

On CUDA, liger-kernel computes it, if it is installed (``pip install 'fastloop-train[liger]'``). Elsewhere, and with
``model.pad_vocab_to``, torch computes each chunk. A model that changes its logits after the head is refused.

It saves memory, not time, so ``auto`` does not select it: GPT-2 with 16 x 1,024 tokens and ``compile`` trained at 0.78
of the speed on an H200 with it (docs/benchmarks.md, GPU).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, hookimpl, option
from fastloop_plugins._task_traits import require_trait

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run
    from fastloop.plugins.manager import PluginSet
    from fastloop.recipe import Recipe

TOLERANCE = 1e-4
"""Largest relative difference of the two losses by rounding. A change of the logits gives 1e-3 and more."""
CHANGES = ("logit", "softcap", "logits_scaling", "lm_head_multiplier")
"""Parts of the names of a model's options that change its logits after the head."""


class FusedLoss(Plugin):
    """Replaces the forward of the head."""

    name = "fused-loss"
    numerics = "reassociated"
    runs_after = ("lora", "packing", "torchao-fp8", "liger")
    runs_before = ("activation-checkpointing", "slot:strategy", "compile")
    for_inference = True
    description = "computes head and loss in chunks, without all logits"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        chunk_tokens: int = option(
            "Tokens whose logits exist at a time; liger-kernel has its own number.", default=1024, ge=1
        )

    @hookimpl(tryfirst=True)  # before the task reads its data
    def check_recipe(self, recipe: Recipe, plugins: PluginSet) -> None:
        require_trait("next-token-loss", self, recipe, plugins)

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        reason = next(filter(None, run.processes.all_gather_object(self.adapt(model))), None)
        if reason is not None:
            raise PluginError(
                f"{run.recipe.where}: plugins.fused-loss: {type(model).__name__} {reason}. Leave fused-loss out."
            )

    def adapt(self, model: nn.Module) -> str | None:
        """Adapt the model and try it; returns the reason against it. Only processes with weights try it."""
        from torch import nn

        from fastloop_plugins.kernels._chunked_loss import chunked_loss
        from fastloop_plugins.text.next_token_loss import compute_in_head, with_loss

        if (found := with_loss(model)) is None:
            return "computes no loss in its forward: its task did not call add_loss"
        head = found.get_output_embeddings()
        if type(head) is not nn.Linear:
            return f"has the head {type(head).__name__}, and fused-loss computes a torch.nn.Linear"
        compute = partial(chunked_loss, vocabulary=found.vocabulary, chunk=self.config.chunk_tokens)
        if any(parameter.is_meta for parameter in model.parameters()):
            compute_in_head(found, head, compute)
            return None
        expected = self.loss(found)
        compute_in_head(found, head, compute)
        try:
            change = abs(self.loss(found) / expected - 1)
        except Exception as error:  # models may do anything with what the head returns
            return (
                f"computes with its logits after the head ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}){options(found)}"
            )
        if change <= TOLERANCE:
            return None
        return f"changes its logits after the head: its loss differs by {100 * change:.2g}%{options(found)}"

    @staticmethod
    def loss(model: Any) -> float:
        """The model's loss of a few tokens, without dropout. One of them is ignored."""
        import torch

        from fastloop.probing import probing

        generator = torch.Generator().manual_seed(0)
        tokens = min(100, model.vocabulary or model.config.get_text_config().vocab_size)
        ids, targets = torch.randint(tokens, (2, 2, 8), generator=generator)
        targets[0, 3] = -100
        with probing(model):
            if "flash" in str(model.config._attn_implementation):
                model.set_attn_implementation("sdpa")  # FlashAttention needs CUDA, and the model is on the CPU
            return float(model(input_ids=ids, targets=targets, use_cache=False).loss)


def options(model: Any) -> str:
    """The options of a model that may change its logits, for a message."""
    fields = model.config.get_text_config().to_dict().items()
    found = [
        f"{name}: {value}"
        for name, value in fields
        if any(part in name for part in CHANGES) and isinstance(value, int | float)
    ]
    found = [field for field in found if not field.startswith("output_router_logits")]
    return f" (its options: {', '.join(found)})" if found else ""
