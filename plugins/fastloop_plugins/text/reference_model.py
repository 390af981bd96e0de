"""A second model: the one before training, beside the one that is trained."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from fastloop import PluginError
from fastloop.probing import has_values, probing
from fastloop_plugins.models.wrapped import transformers_model

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run

logger = logging.getLogger("fastloop")

ROUNDING = 1e-4
"""Largest change of the logits by adapters that do nothing yet, as a share of the largest logit."""


class ReferenceModel:
    """The model before training, for losses that compare the trained model with it.

    With the adapters of `lora`, it is the model without them, and needs no memory. Otherwise it is a second model, with
    the same weights on every process; so it is if the run continues an adapter.

    `fastloop plan --device-memory` counts the second model if ``second_models`` of the plugin returns
    ``reference.models``.

    Create it in ``before_prepare``, after `lora` and before plugins that shard the model: a task declares ``runs_after
    = ("lora",)`` and ``runs_before = ("activation-checkpointing", "slot:strategy")``. A run that resumes gets the same
    one, because its checkpoint is loaded later. Every process must call it.

        @hookimpl
        def before_prepare(self, run, model):
            self.reference = ReferenceModel(run, model)

        with self.reference.computing(run) as model:
            logits = compute(model, batch).logits

    Args:
        model: The model of ``before_prepare``, a language model.

    Raises:
        PluginError: Only the main process has the weights.
    """

    def __init__(self, run: Run, model: nn.Module) -> None:
        self.copy: nn.Module | None = None
        by_rank = run.processes.all_gather_object(has_values(model))
        if any(by_rank) and not all(by_rank):
            raise PluginError(
                f"the model before training is needed as a second model, and {run.strategy.name!r} builds the model "
                "on the main process only.",
                code="unsupported-strategy",
                place=run.recipe.where,
                remedy="Set meta_device: false.",
            )
        if not has_idle_adapters(run, model):
            self.copy = copy.deepcopy(model).eval().requires_grad_(False)
            count = sum(parameter.numel() for parameter in self.copy.parameters())
            logger.info("the model before training stays in memory: %s parameters", f"{count:,}")

    @property
    def models(self) -> list[nn.Module]:
        """The second model, for ``Plugin.second_models``. Empty: it is the trained one without its adapters."""
        return [] if self.copy is None else [self.copy]

    @contextmanager
    def computing(self, run: Run) -> Iterator[Any]:
        """Yields the model before training. Inside the block, it is in eval mode, without gradients, and in the
        precision of the run. Every process must enter it, and compute as many batches: the weights of adapters may be
        sharded."""
        import torch

        from fastloop.evaluation_results import evaluating

        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(run.accelerator.autocast())
            if self.copy is None:
                stack.enter_context(evaluating(run.model))
                adapted: Any = run.unwrap_model()
                stack.enter_context(adapted.disable_adapter())
                yield run.model
            else:
                follow_attention(self.copy, run.unwrap_model())
                yield self.copy.to(run.device)


def follow_attention(model: nn.Module, trained: nn.Module) -> None:
    """Give a model the attention of the trained one. A plugin such as `packing` may have replaced that later, and their
    batches are the same."""
    own = transformers_model(model)
    attention = transformers_model(trained).config._attn_implementation
    if own.config._attn_implementation != attention:
        own.set_attn_implementation(attention)


def has_idle_adapters(run: Run, model: Any) -> bool:
    """Whether a model has adapters of peft that do not change its logits yet, as new ones. For a model without values,
    the options of `lora` decide."""
    import torch

    from fastloop_plugins.training.lora import LoRA

    if not hasattr(model, "disable_adapter"):
        return False
    if not has_values(model):
        adapters = [plugin for plugin in run.plugins if isinstance(plugin, LoRA)]
        return all(lora.begins_idle(run.recipe) for lora in adapters)
    ids = torch.arange(8)[None] % model.config.get_text_config().vocab_size
    with probing(model):
        with_adapters = model(input_ids=ids, use_cache=False).logits
        with model.disable_adapter():
            without = model(input_ids=ids, use_cache=False).logits
    return bool((with_adapters - without).abs().max() <= ROUNDING * without.abs().max())
