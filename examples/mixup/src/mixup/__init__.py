"""Mixes pairs of training samples in the collator, so that worker processes do it. Evaluation sees unmixed samples.

    plugins:
      - mixup: {alpha: 0.2}

A micro-batch is mixed with a permutation of itself: ``share * inputs + (1 - share) * inputs[order]``. Its loss is the
same mean of the task's losses against both targets. Method: Zhang et al., "mixup: Beyond Empirical Risk Minimization",
2018.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from fastloop import Output, Plugin, hookimpl, option

if TYPE_CHECKING:
    from fastloop import Run
    from torch import nn

Mixed = namedtuple("Mixed", ("inputs", "targets", "partners", "share"))


def mix(collate: Callable[[list[Any]], Any], alpha: float, samples: list[Any]) -> Mixed:
    """A collator. ``share`` is 0-dim float32; ``partners`` are the targets of ``inputs[order]``."""
    import torch

    (inputs, targets), order = collate(samples), torch.randperm(len(samples))
    share = torch.distributions.Beta(alpha, alpha).sample()
    return Mixed(share * inputs + (1 - share) * inputs[order], targets, targets[order], share)


class Mixup(Plugin):
    """Mixes pairs of training samples. The loss is that of both targets."""

    name = "mixup"
    numerics = "changes-training"

    alpha: float = option("Of Beta(alpha, alpha): small values leave most samples almost unmixed.", default=0.2, gt=0)

    @hookimpl(wrapper=True)
    def build_collator(self, split: str) -> Generator[None, Any, Any]:
        collate = yield
        return partial(mix, collate, self.alpha) if split == "train" else collate

    @hookimpl
    def compute_loss(self, run: Run, model: nn.Module, batch: Any) -> Output | None:
        if not isinstance(batch, Mixed):  # evaluation, and the calls below: the task computes the loss
            return None
        from torch.nn import Identity

        scores = model(batch.inputs)
        task = partial(run.hooks.compute_loss, run=run, model=Identity().eval())
        ours = task(batch=(scores, batch.targets))
        theirs = task(batch=(scores, batch.partners))
        return Output(batch.share * ours.loss + (1 - batch.share) * theirs.loss, scores)
