"""Sharpness-aware minimization: each step applies the gradient at the worst point near the weights.

    plugins:
      - sam: {rho: 0.05}

The first pass computes the gradient ``g`` and moves the weights by ``rho * g / ||g||``. The second pass computes the
gradient there, with the same dropout, and the optimizer applies it to the original weights. A step takes twice the
time. Method: Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization", 2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastloop import Batch, Plugin, hookimpl, option

if TYPE_CHECKING:
    from fastloop import Run
    from torch import Tensor


class SAM(Plugin):
    """Applies gradients of the worst point near the weights. Each step passes twice over its micro-batches."""

    name = "sam"
    numerics = "changes-training"
    conflicts = {"deepspeed": "DeepSpeed does not expose the gradients."}

    rho: float = option("Distance of the second pass from the weights, as a 2-norm.", default=0.05, gt=0)

    @hookimpl
    def train_step(self, run: Run, batches: list[Batch]) -> Tensor:
        import torch
        from fastloop.distributed.tensors import total_norm
        from fastloop.runtime.random_states import random_states, restore_random_states

        states = random_states()
        loss = run.accumulate_gradients(batches)
        weights = [weight for weight in run.model.parameters() if weight.grad is not None]
        originals = [weight.detach().clone() for weight in weights]
        try:
            with torch.no_grad():
                norm = total_norm(weight.grad for weight in weights)  # loss scaling cancels out below
                for weight in weights:
                    weight.add_(weight.grad * (self.rho / (norm + 1e-12)))
            run.optimizer.zero_grad()
            restore_random_states(states)
            run.accumulate_gradients(batches)
        finally:
            with torch.no_grad():
                for weight, original in zip(weights, originals, strict=True):
                    weight.copy_(original)
        run.apply_gradients(loss)
        return loss
