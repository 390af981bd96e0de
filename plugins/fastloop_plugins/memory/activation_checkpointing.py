"""Recomputes activations of the model's repeated blocks in backward instead of storing them: less memory, more time.

    plugins:
      - activation-checkpointing: {every: 1}

Dropout draws the same numbers both times. For transformers models, the key-value cache is off during training, which
can change the last bits. Method: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, Problem, hookimpl, option
from fastloop.problem import agree
from fastloop_plugins.models.blocks import outermost, transformer_blocks

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run


UPDATED_BUFFERS = {"num_batches_tracked", "_u", "weight_u"}
"""Names of buffers that a forward in train mode updates: ``num_batches_tracked`` of batch norm with running statistics,
``_u`` and ``weight_u`` of spectral norm. A second forward would update them again."""


class ActivationCheckpointing(Plugin):
    """Recomputes activations in backward. Wraps the forward of each block in torch's checkpoint."""

    name = "activation-checkpointing"
    numerics = "bitwise"
    runs_after = ("lora",)

    blocks: list[str] | None = option("Classes of the modules to recompute; null: the repeated blocks.", default=None)
    every: int = option("Recompute only every n-th block.", default=1, ge=1)

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        where = f"{run.recipe.where}: plugins.activation-checkpointing.blocks"
        repeated_blocks = outermost(transformer_blocks(model, self.blocks, where))  # each recomputes its inner blocks
        blocks = repeated_blocks[:: self.every]  # of blocks 0 to 4 with every=2: 0, 2 and 4
        if not blocks:
            self.log.warning(
                Problem(
                    f"{type(model).__name__} has no list of repeated blocks: nothing is recomputed.",
                    code="no-blocks",
                    remedy="Set blocks.",
                )
            )
            return
        stateful = [block for block in blocks if updates_buffers(block)]
        if stateful:
            self.log.warning(
                Problem(
                    f"{len(stateful)} of {len(blocks)} blocks ({type(stateful[0]).__name__}) "
                    f"{agree(len(stateful), 'has', 'have')} batch or spectral norm, which must not see a batch twice: "
                    f"{agree(len(stateful), 'it is', 'they are')} not recomputed.",
                    code="not-recomputed",
                )
            )
        for block in blocks:
            # without a wrapper module, so names of weights stay and hooks on the block fire once
            if block not in stateful:
                block.forward = partial(recomputed, block, block.forward)
        for module in model.modules():
            if hasattr(module, "config") and "use_cache" in inspect.signature(module.forward).parameters:
                module.register_forward_pre_hook(without_cache, with_kwargs=True)

    @hookimpl
    def check_run(self, run: Run) -> None:
        for plugin in run.plugins:
            backend = plugin.option_values().get("backend", "") if plugin.name == "compile" else ""
            if "eager" in backend and "aot" not in backend:
                raise PluginError(
                    f"{backend!r} does not support activation checkpointing: dropout would draw other numbers in "
                    "backward.",
                    code="conflicting-values",
                    place=f"{run.recipe.where}: plugins.compile.backend",
                    remedy="Use 'aot_eager' or 'inductor'.",
                )


def updates_buffers(block: nn.Module) -> bool:
    """Whether a forward of the block in train mode updates buffers."""
    return any(name.rpartition(".")[2] in UPDATED_BUFFERS for name, _ in block.named_buffers())


def recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A block's forward that keeps only its inputs for backward."""
    import torch
    from torch.utils.checkpoint import checkpoint

    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    kept: dict[str, Any] = {name: None if is_empty_cache(value) else value for name, value in kwargs.items()}
    return checkpoint(forward, *args, use_reentrant=False, **kept)


def is_empty_cache(value: Any) -> bool:
    """Whether an argument of a block is transformers' cache without tokens. XLM makes one for each forward, without an
    option."""
    return hasattr(value, "get_seq_length") and value.get_seq_length() == 0


def without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Disable the cache of keys and values for generation. Training does not use it, and a second forward would extend
    it again."""
    return (args, kwargs | {"use_cache": False}) if module.training else None
