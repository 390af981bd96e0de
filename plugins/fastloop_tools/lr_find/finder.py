"""The learning-rate range test: a few steps with growing rates, and the rate that their losses suggest.

Method: Smith, "Cyclical Learning Rates for Training Neural Networks", 2017 (arXiv:1506.01186). The stop rule and the
suggestion are those of fastai's ``lr_find``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fastloop.checkpoint.build_record import without_parameters
from fastloop.plugins.plugin import Plugin, hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from fastloop.run import Run

DECAY = 0.9
"""Share of the old average that a new loss keeps in the rule to stop: an average over about 10 steps."""
DIVERGED = 4.0
"""The loss has diverged if its average is above this multiple of the lowest average, as in fastai."""
WINDOW = 0.05
"""Steps on each side that a smoothed loss averages, as a share of all steps. An average of past losses alone would lag,
and so suggest a higher rate."""
SAFETY = 10.0
"""The suggested rate is the one of the lowest loss divided by this, as in fastai: there, the loss is about to
diverge."""
SKIPPED = 5
"""Steps at the start that suggest nothing. Their mean is the loss before training."""


@dataclass(frozen=True)
class Suggestion:
    """The rates that a range test suggests, as values of ``train.lr``: ``lr`` is ``minimum``, the rate of the lowest
    smoothed loss, divided by ``SAFETY``. ``at_end``: that was the last step, so a higher rate may be better."""

    lr: float
    minimum: float
    at_end: bool


class LRFinder(Plugin):
    """Raises the learning rate exponentially from ``low`` to ``high`` in ``steps`` steps, and stops when the loss
    diverges.

    Parameter groups keep the ratio of their rates to ``train.lr``. It replaces the recipe's schedule, evaluates nothing
    and exports nothing. ``rates`` and ``losses`` have a value for each step, the losses means over all processes.
    """

    name = "lr-find"

    def __init__(self, low: float, high: float, steps: int) -> None:
        super().__init__()
        self.low, self.high, self.steps = low, high, steps
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.diverged = False
        self._sum, self._lowest = 0.0, math.inf

    def rate(self, step: int) -> float:
        """The rate of a step, counted from 0."""
        return math.exp(math.log(self.low) + step / (self.steps - 1) * math.log(self.high / self.low))

    @hookimpl(wrapper=True)
    def build_scheduler(self, run: Run, optimizer: Optimizer) -> Generator[None, Any, Any]:
        from torch.optim.lr_scheduler import LambdaLR

        groups = optimizer.param_groups
        settings = [copy.deepcopy(without_parameters(group)) for group in groups]
        yield  # a schedule of the recipe may change rates and momenta here
        for group, before in zip(groups, settings, strict=True):
            for key in group.keys() - before.keys() - {"params"}:
                del group[key]
            group.update(before)
        self.scheduler = LambdaLR(optimizer, lambda step: self.rate(step) / run.recipe.train.lr)
        return self.scheduler

    @hookimpl(trylast=True)  # after the checks of plugins that read an evaluation
    def check_run(self, run: Run) -> None:
        run.eval_loaders.clear()

    @hookimpl
    def before_step(self) -> None:
        self.current = self.rate(self.scheduler.last_epoch)

    @hookimpl
    def after_step(self, run: Run, loss: Tensor) -> None:
        self.rates.append(self.current)
        self.losses.append(float(loss))
        self._sum = DECAY * self._sum + (1 - DECAY) * self.losses[-1]
        average = self._sum / (1 - DECAY ** len(self.losses))
        self._lowest = min(self._lowest, average)
        if not math.isfinite(average) or average > DIVERGED * self._lowest:
            self.diverged = True
            run.state.request_stop("lr-find: the loss diverged")

    @hookimpl
    def export_model(self, folder: Path) -> Path:
        return folder  # nothing is exported


def smooth(losses: Sequence[float], steps: int) -> list[float]:
    """The mean of each loss and its neighbours. ``steps`` of a complete test give the size of the window."""
    side = max(1, round(WINDOW * steps))
    return [fmean(losses[max(0, index - side) : index + side + 1]) for index in range(len(losses))]


def suggest(rates: Sequence[float], losses: Sequence[float], steps: int) -> Suggestion | None:
    """The rates that a range test suggests; None if the loss did not fall by more than its noise.

    Args:
        losses: The loss of each step. Values from the first one that is not finite are ignored.
        steps: The steps of a complete test.
    """
    count = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    if count < 2 * SKIPPED:
        return None
    losses = losses[:count]
    smoothed = smooth(losses, steps)
    best = min(range(SKIPPED, count), key=smoothed.__getitem__)
    noise = math.sqrt(fmean((loss - mean) ** 2 for loss, mean in zip(losses[: best + 1], smoothed, strict=False)))
    if fmean(losses[:SKIPPED]) - smoothed[best] <= noise:
        return None
    return Suggestion(rates[best] / SAFETY, rates[best], best == len(rates) - 1)
