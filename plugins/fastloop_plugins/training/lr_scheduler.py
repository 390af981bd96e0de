"""Schedules the learning rate: linear, cosine or constant, with warm-up.

    plugins:
      - lr-scheduler: {schedule: cosine, warmup: 0.06}

With ``s`` steps done, ``w`` warm-up steps and ``n`` steps in the run, the rate is ``lr * s / w`` during warm-up. Then it is ``lr`` times,
with ``p = (s - w) / (n - w)``: linear ``1 - p``, cosine ``(1 + cos(pi p)) / 2``, constant 1; scaled to end at ``min_ratio``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastloop import Plugin, UsageError, hookimpl, option

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from fastloop import Run


class LRSchedule(Plugin):
    """Builds a scheduler that is stepped once an optimizer step."""

    name = "lr-scheduler"
    numerics = "changes-training"
    description = "changes the learning rate over the run"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        schedule: Annotated[Literal["linear", "cosine", "constant"], option("Shape after warm-up.")] = "linear"
        warmup: Annotated[int | float, option("Warm-up steps; a fraction below 1 is a share of the run's steps.", ge=0)] = 0
        min_ratio: Annotated[float, option("Final learning rate as a share of the peak.", ge=0, le=1)] = 0.0

    @hookimpl
    def build_scheduler(self, run: Run, optimizer: Optimizer) -> LRScheduler:
        from torch.optim.lr_scheduler import LambdaLR

        total, warmup, config = run.total_steps, self.config.warmup, self.config
        if total is None and (config.schedule != "constant" or isinstance(warmup, float)):
            raise UsageError(f"plugin {self.name!r}: the data has no known length, so the run has no known end. Set train.max_steps.")
        if isinstance(warmup, float) and warmup < 1:
            warmup = math.ceil(warmup * (total or 0))

        def ratio(step: int) -> Any:
            if step < warmup:
                return step / warmup
            if config.schedule == "constant" or total is None:
                return 1.0
            progress = min((step - warmup) / max(total - warmup, 1), 1.0)
            shape = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
            return config.min_ratio + (1 - config.min_ratio) * shape

        return LambdaLR(optimizer, ratio)
