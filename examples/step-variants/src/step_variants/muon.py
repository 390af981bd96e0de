"""Muon for the matrices of a model, and AdamW for everything else.

    plugins:
      - muon: {momentum: 0.95}

Muon orthogonalizes the update of a 2-D weight. Embeddings, heads, biases and norms keep AdamW. Both use ``train.lr``
and ``train.weight_decay``: Muon's updates are scaled to the size of AdamW's. Methods: Jordan et al., "Muon: An
optimizer for hidden layers in neural networks", 2024; the scale is that of Liu et al., "Muon is Scalable for LLM
Training", 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastloop import Plugin, PluginError, hookimpl, option

if TYPE_CHECKING:
    from fastloop import Run
    from torch import nn
    from torch.optim import Optimizer


class Muon(Plugin):
    """Steps matrices with Muon, and the rest with AdamW."""

    name = "muon"
    numerics = "changes-training"

    momentum: float = option("Momentum of Muon.", default=0.95, ge=0, lt=1)
    adamw: list[str] = option(
        "Matrices whose names contain one of these keep AdamW.",
        default_factory=lambda: ["embed", "head", "classifier"],
    )

    @hookimpl
    def build_optimizer(self, run: Run, model: nn.Module) -> dict[str, Optimizer]:
        from torch import optim

        train = run.recipe.train
        matrices = []
        rest = []
        for name, weight in model.named_parameters():
            is_matrix = weight.ndim == 2 and not any(part in name for part in self.adamw)
            (matrices if is_matrix else rest).append(weight)
        matrices, rest = ([weight for weight in weights if weight.requires_grad] for weights in (matrices, rest))
        if not matrices or not rest:
            found = f"{len(matrices)} matrices for Muon and {len(rest)} other weights for AdamW"
            raise PluginError(f"{run.recipe.where}: plugins.muon.adamw: found {found}. Both need some.")
        shared = {"lr": train.lr, "weight_decay": train.weight_decay}
        return {
            "muon": optim.Muon(matrices, momentum=self.momentum, adjust_lr_fn="match_rms_adamw", **shared),
            "adamw": optim.AdamW(rest, **shared, **run.settings.optimizer),
        }
