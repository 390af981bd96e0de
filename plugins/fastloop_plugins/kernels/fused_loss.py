"""Computes head and cross entropy of a language model at once, in chunks of tokens, without the logits of all tokens.

    plugins:
      - fused-loss

A batch of 16 x 1,024 tokens of GPT-2 has 3.3 GB of float32 logits. With this plugin, only those of ``chunk_tokens``
tokens exist at a time, and only of tokens that have a loss; under ``compile``, of all tokens. For tasks that declare
``next-token-loss``, such as ``causal-lm``.

On CUDA, liger-kernel computes it, if it is installed (``pip install 'fastloop-train[liger]'``). Elsewhere, and with
``model.pad_vocab_to``, torch computes each chunk. A model that changes its logits after the head is refused.

It saves memory, not time, so ``auto`` does not select it. On two CPU cores, a chat model of 135M weights with 49,152
tokens trained at 0.95 of the speed of `target-logits` with 10% less memory, and its adapters at 0.98 with 29% less.
GPT-2 with 16 x 1,024 tokens and ``compile`` trained at 0.78 of the speed on an H200 with it (docs/benchmarks.md, GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, hookimpl, option
from fastloop_plugins._task_traits import require_trait

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Run
    from fastloop.plugins.manager import PluginSet
    from fastloop.recipe import Recipe
    from fastloop_plugins.text.next_token_loss import Reduction


CACHED_LOGITS = 2**22
"""Logits of a chunk on a CPU: 16 MiB of float32, which a last-level cache holds."""
FEWEST_TOKENS = 128
"""Fewest tokens of a chunk on a CPU. Matrix products of fewer rows took longer."""
DEVICE_TOKENS = 1024
"""Tokens of a chunk on an accelerator, which needs large matrix products."""


class FusedLoss(Plugin):
    """Computes head and loss in chunks, without all logits."""

    name = "fused-loss"
    numerics = "reassociated"
    runs_after = ("lora", "packing", "torchao-fp8", "liger")
    runs_before = ("activation-checkpointing", "slot:strategy", "compile")
    for_inference = True

    chunk_tokens: int | None = option(
        "Tokens whose logits exist at a time; null: as many as a CPU's cache holds, at least 128, and 1,024 on other "
        "devices. liger-kernel has its own number.",
        default=None,
        ge=1,
    )

    @hookimpl(tryfirst=True)  # before the task reads its data
    def check_recipe(self, recipe: Recipe, plugins: PluginSet) -> None:
        require_trait("next-token-loss", self, recipe, plugins)

    @hookimpl(wrapper=True, tryfirst=True)  # around that of `packing`
    def build_collator(self, run: Run) -> Generator[None, Any, Callable[[list[Any]], Any]]:
        from fastloop_plugins.text.chosen_tokens import WithPlaces

        collate: Callable[[list[Any]], Any] = yield
        if "compile" in run.plugins.names():  # it would build a graph for each number of tokens with a loss
            return collate
        return WithPlaces(collate)

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        from fastloop_plugins.text.chunked_loss import chunked_loss
        from fastloop_plugins.text.head_trial import try_head
        from fastloop_plugins.text.next_token_loss import with_loss

        changed = with_loss(model)
        vocabulary = None if changed is None else changed.vocabulary

        def loss(head: Any, states: Tensor, targets: Tensor, reduction: Reduction, temperature: float) -> Tensor:
            tokens = self.chunk_tokens or default_tokens(states.device.type, len(head.weight))
            return chunked_loss(head, states, targets, vocabulary, tokens)

        reason = try_head(run, model, self.name, loss)
        if reason is not None:
            raise PluginError(
                f"{type(model).__name__} {reason}.",
                code="unsupported-model",
                place=f"{run.recipe.where}: plugins.fused-loss",
                remedy="Leave fused-loss out.",
            )


def default_tokens(device: str, rows: int) -> int:
    """Tokens of a chunk, for a type of device and the rows of a head."""
    if device != "cpu":
        return DEVICE_TOKENS
    return max(FEWEST_TOKENS, CACHED_LOGITS // rows)
