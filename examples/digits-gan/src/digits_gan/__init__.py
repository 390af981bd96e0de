"""Trains a generative adversarial network: two networks, two optimizers, and two updates in each step.

    plugins:
      - gan: {beta1: 0.5}

The model has the submodules ``generator`` and ``discriminator``. For a batch of real samples it returns the
discriminator's scores of them and of as many generated ones, each (batch, 1). The generator learns first. The reported
loss is the discriminator's. Method: Goodfellow et al., "Generative Adversarial Nets", 2014, with the non-saturating
loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastloop import Batch, Output, Plugin, hookimpl, option

if TYPE_CHECKING:
    from fastloop import Run
    from torch import Tensor, nn
    from torch.optim import Optimizer


class GAN(Plugin):
    """Trains a generator and a discriminator in turn."""

    name = "gan"
    numerics = "changes-training"
    network = "discriminator"  # whose loss is computed

    beta1: float = option("First momentum of Adam, for both networks.", default=0.5, ge=0, lt=1)

    @hookimpl
    def build_optimizer(self, run: Run, model: nn.Module) -> dict[str, Optimizer]:
        from torch.optim import Adam

        arguments = {"lr": run.recipe.train.lr, "betas": (self.beta1, 0.999), **run.settings.optimizer}
        return {
            name: Adam(model.get_submodule(name).parameters(), **arguments) for name in ("discriminator", "generator")
        }

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: Any) -> Output:
        from torch.nn.functional import softplus

        real, fake = model(batch[0])
        if self.network == "generator":  # apply_gradients drops the gradients of the other network
            return Output(softplus(-fake).mean())
        return Output(softplus(-real).mean() + softplus(fake).mean())

    @hookimpl
    def train_step(self, run: Run, batches: list[Batch]) -> Tensor:
        for self.network in ("generator", "discriminator"):
            loss = run.accumulate_gradients(batches)
            run.apply_gradients(loss, self.network)
        return loss
