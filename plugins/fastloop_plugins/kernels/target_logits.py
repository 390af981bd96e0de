"""Computes head and loss of a language model only at tokens that have a loss: those of answers, and no padding.

    plugins:
      - target-logits

For tasks that declare ``next-token-loss``, such as ``causal-lm`` on conversations or completions. The collator names
the tokens, so no device is read. The loss and its gradients equal those of the full computation up to rounding. Models
that change each logit after the head, such as Gemma 2, are computed, too.

Texts without a prompt have a loss at every token, and padding alone is left out. Under ``compile``, one graph computes
any number of tokens. `fused-loss` chooses the same tokens, and needs less memory and more time.

`auto` selects it for conversations and completions on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, Recommendation, hookimpl
from fastloop_plugins._task_traits import recipe_traits, require_trait

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run
    from fastloop.plugins.manager import PluginSet
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine


class TargetLogits(Plugin):
    """Computes head and loss only at tokens that have a loss."""

    name = "target-logits"
    numerics = "reassociated"
    conflicts = {
        "context-parallel": "it divides the tokens of each sequence over processes.",
        "fused-loss": "it chooses the same tokens itself.",
        "tensor-parallel": "it divides the head over processes.",
    }
    runs_after = ("lora", "packing", "torchao-fp8", "liger")
    runs_before = ("activation-checkpointing", "slot:strategy", "compile")
    for_inference = True

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """For conversations and completions on a CPU, where it was measured (docs/benchmarks.md, Fine-tuning of a chat
        model). Blocks of plain texts have a loss at every token."""
        if machine.device != "cpu" or not recipe_traits(recipe) >= {"next-token-loss", "padded"}:
            return None
        return Recommendation(why="only tokens with a loss pass the head")

    @hookimpl(tryfirst=True)  # before the task reads its data
    def check_recipe(self, recipe: Recipe, plugins: PluginSet) -> None:
        require_trait("next-token-loss", self, recipe, plugins)

    @hookimpl(wrapper=True, tryfirst=True)  # around that of `packing`
    def build_collator(self) -> Generator[None, Any, Callable[[list[Any]], Any]]:
        from fastloop_plugins.text.chosen_tokens import WithPlaces

        return WithPlaces((yield))

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        from fastloop_plugins.text.head_trial import try_head

        reason = try_head(run, model, self.name)
        if reason is not None:
            raise PluginError(
                f"{type(model).__name__} {reason}.",
                code="unsupported-model",
                place=f"{run.recipe.where}: plugins.target-logits",
                remedy="Leave target-logits out.",
            )
