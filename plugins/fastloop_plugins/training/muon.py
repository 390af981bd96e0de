"""Steps 2-D weights with Muon, and the rest with AdamW. On by default if ``train.optimizer`` is ``Muon``.

    train: {optimizer: {name: Muon, momentum: 0.95}, lr: 0.001}
    plugins:
      - muon-optimizer: {adamw: ["head.*"]}      # optional: 2-D weights that AdamW steps

AdamW also steps embeddings and the output layer of a language model; for a classifier's, set ``adamw``. Both use
``train.lr`` and ``train.weight_decay``: by default, ``adjust_lr_fn: match_rms_adamw`` scales Muon's updates to the size
of AdamW's. The arguments in ``train.optimizer`` are Muon's. Several processes need ``ddp``: sharded weights are
refused.

Methods: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is Scalable
for LLM Training", 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastloop import Plugin, RecipeError, hookimpl, option
from fastloop.problem import clause

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from fastloop import Run
    from fastloop.recipe import Recipe


class MuonOptimizer(Plugin):
    """Steps 2-D weights with Muon, and the rest with AdamW.

    Does nothing for other optimizers than Muon: the recipe's key changes training.
    """

    name = "muon-optimizer"
    numerics = "bitwise"
    fallback_hooks = ("build_optimizer",)

    adamw: list[str] = option("Patterns of 2-D weights that AdamW steps, such as head.*.", default_factory=list)

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        return "train.optimizer is Muon" if recipe.train.optimizer_name == "Muon" else None

    @hookimpl
    def build_optimizer(self, run: Run, model: nn.Module) -> dict[str, Optimizer] | None:
        from torch import nn, optim
        from torch.distributed.tensor import DTensor

        from fastloop.optimizers.named import optimizer_keywords
        from fastloop_plugins.training._batched_muon import BatchedMuon
        from fastloop_plugins.training._patterns import matching, parameters_by_name

        if run.recipe.train.optimizer_name != "Muon":
            return None
        where = f"{run.recipe.where}: plugins.muon-optimizer.adamw"
        parameters = parameters_by_name(model)
        kept: set[int] = set()  # ids of the parameters that AdamW steps although they are 2-D
        for pattern in self.adamw:
            kept.update(id(parameters[name]) for name in matching(pattern, parameters, where))
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                kept.update(map(id, module.parameters()))
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is not None:
            kept.update(map(id, head.parameters()))
        trained = [weight for weight in parameters.values() if weight.requires_grad]
        matrices = [weight for weight in trained if weight.ndim == 2 and id(weight) not in kept]
        rest = [weight for weight in trained if weight.ndim != 2 or id(weight) in kept]
        if not matrices:
            raise RecipeError(
                "no 2-D weight is left for Muon.",
                code="unsupported-model",
                place=where if self.adamw else f"{run.recipe.where}: train.optimizer",
                remedy="Use another optimizer: train.optimizer=AdamW.",
            )
        if any(isinstance(weight, DTensor) for weight in matrices):
            raise RecipeError(
                "Muon on sharded weights gives other updates.",
                code="unsupported-strategy",
                place=f"{run.recipe.where}: train.optimizer",
                remedy="Use ddp instead of fsdp.",
            )
        arguments = {"adjust_lr_fn": "match_rms_adamw", **optimizer_keywords(run.recipe)}
        try:
            muon = BatchedMuon(matrices, **arguments)
        except (TypeError, ValueError) as error:
            raise RecipeError(
                f"Muon was called with {arguments}: {clause(error)}.",
                code="call-failed",
                place=f"{run.recipe.where}: train.optimizer",
            ) from error
        optimizers: dict[str, Optimizer] = {"muon": muon}
        if rest:
            # one kernel instead of a dozen: embeddings are a third of GPT-2
            fused = run.device.type in ("cpu", "cuda")
            optimizers["adamw"] = optim.AdamW(
                rest, lr=arguments["lr"], weight_decay=arguments["weight_decay"], fused=fused
            )
        return optimizers
