"""Divides the tokens of each sequence over processes, to train on sequences that one of them cannot hold.

    plugins:
      - fsdp
      - context-parallel: {size: 4}

Each ``size`` consecutive processes train on the same sequences. A process computes two slices of each, and gathers the
keys and values of all tokens for each layer. It holds a part of all other activations. Losses and gradients are those
of whole sequences, and with `packing` no document attends to another.

For causal language models with selectable attention and a loss for each token. The strategy is `ddp` or `fsdp`. Method:
the gathered form of Liu et al., "Ring Attention with Blockwise Transformers", 2023, with the slices of Grattafiori et
al., "The Llama 3 Herd of Models", 2024, section 3.3.2.
"""

from __future__ import annotations

from functools import partial, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, hookimpl, option
from fastloop_plugins._targets import IGNORED
from fastloop_plugins._task_traits import require_trait
from fastloop_plugins.strategies._tensor_group import SAME_SAMPLES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Run
    from fastloop.plugins.manager import PluginSet
    from fastloop.recipe import Recipe
    from fastloop_plugins.strategies._context_attention import SequenceSlices
    from fastloop_plugins.strategies._memory_context import ContextShare

OWN = "it computes attention over the processes itself."
WHOLE = ("packed", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "places")
"""Inputs that describe the whole batch: documents of a packed row, beside ``position_ids``, and tokens with a loss."""


class ContextParallel(Plugin):
    """Divides the tokens of each sequence over processes.

    Replaces attention, and lets the model's forward compute this process's tokens.
    """

    name = "context-parallel"
    numerics = "reassociated"
    runs_after = ("attention", "lora", "packing", "fused-loss", "liger")
    runs_before = ("activation-checkpointing", "slot:strategy", "compile")
    conflicts = {
        **SAME_SAMPLES,
        "cpu-attention": OWN,
        "deepspeed": "DeepSpeed counts the samples of every process.",
        "fast-dropout": OWN,
        "tensor-parallel": "both divide the processes. Set plugins.fsdp.tensor to divide layers.",
    }

    size: int | None = option("Consecutive processes that share a sequence; null: all.", default=None, ge=2)

    @classmethod
    def divide_sequences(cls, model: nn.Module, size: int) -> ContextShare:
        """For `fastloop plan`: make a model of fake tensors compute the tokens of one of ``size`` processes. The result
        counts the bytes that it sends in its attribute ``sent``."""
        from fastloop_plugins.strategies._memory_context import ContextShare
        from fastloop_plugins.text.next_token_loss import with_loss

        return ContextShare(with_loss(model), size)

    @hookimpl(tryfirst=True)  # before the task reads its data
    def check_recipe(self, recipe: Recipe, plugins: PluginSet) -> None:
        require_trait("next-token-loss", self, recipe, plugins)

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"processes_per_batch": self.size or 0}

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        import torch
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        from fastloop_plugins.strategies import _context_attention
        from fastloop_plugins.text.next_token_loss import with_loss

        where = f"{run.recipe.where}: plugins.context-parallel"
        if run.world_size == 1:
            self.log.info("one process, so there is nothing to divide")
            return
        inner = with_loss(model)
        if inner is None or not getattr(inner, "_supports_sdpa", False):
            raise PluginError(
                f"{type(model).__name__} has no selectable attention.",
                code="unsupported-model",
                place=where,
                remedy="Use fsdp alone.",
            )
        if getattr(inner.config.get_text_config(), "output_router_logits", False):
            raise PluginError(
                "the loss of a router needs whole sequences.",
                code="unsupported-model",
                place=where,
                remedy="Set output_router_logits: false.",
            )
        size = min(self.size or run.world_size, run.world_size)
        divide: Any = torch.distributed.new_subgroups
        group = divide(size)[0] if size < run.world_size else None
        slices = _context_attention.SequenceSlices(size, run.rank % size, group)
        AttentionInterface.register(_context_attention.NAME, partial(_context_attention.attention, slices))
        AttentionMaskInterface.register(_context_attention.NAME, _context_attention.mask)
        inner.set_attn_implementation(_context_attention.NAME)
        divide_forward(inner, slices)


def divide_forward(model: Any, slices: SequenceSlices) -> None:
    """Let the forward of a model with ``targets`` compute this process's tokens. Its loss is the process's share of the
    mean over all tokens, times the number of processes, which average their gradients."""
    import torch
    from torch.nn.functional import pad

    from fastloop_plugins.text.forward_passes import find_documents

    plain = model.forward.__func__

    @wraps(plain)
    def forward(
        self: nn.Module,
        input_ids: Tensor,
        targets: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        if targets is None:
            raise PluginError(
                "the model computes losses of divided sequences, and something needs its logits, such as to generate "
                "texts.",
                code="logits-divided",
                place="plugin 'context-parallel'",
                remedy="Leave one of both out.",
            )
        missing = -input_ids.shape[1] % (2 * slices.size)
        slices.documents = None
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        else:
            slices.documents = find_documents(pad(position_ids, (0, missing)))
        ids = slices.take(pad(input_ids, (0, missing)))
        positions = slices.take(pad(position_ids, (0, missing)))
        own = slices.take(pad(targets, (0, missing), value=IGNORED))
        count = (own != IGNORED).sum()
        whole = (targets != IGNORED).sum()
        own[:, :1] = torch.where(count == 0, 0, own[:, :1])  # the mean over no token is NaN; its share is 0
        others = {name: value for name, value in inputs.items() if name not in WHOLE}
        output = plain(self, ids, position_ids=positions, attention_mask=torch.ones_like(ids), targets=own, **others)
        output["loss"] = output.loss * (slices.size * count / whole)
        return output

    model.forward = MethodType(forward, model)
