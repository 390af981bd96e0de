"""Schedules the learning rate: linear, cosine or constant with warm-up, or a schedule of torch, transformers or yours.

    plugins:
      - lr-scheduler: {schedule: cosine, warmup: 0.06}

With ``s`` steps done, ``w`` warm-up steps and ``n`` steps in the run, the rate is ``lr * s / w`` during warm-up. Then
it is ``lr`` times, with ``p = (s - w) / (n - w)``: linear ``1 - p``, cosine ``(1 + cos(pi p)) / 2``, constant 1. Linear
and cosine are scaled to end at ``min_ratio``. Other schedules are a class of ``torch.optim.lr_scheduler``, a name of
``get_scheduler`` of transformers, or ``file.py:name``, called with ``(optimizer, **arguments)``:

    plugins:
      - lr-scheduler: {schedule: OneCycleLR, arguments: {pct_start: 0.1}}
      - lr-scheduler: {schedule: warmup_stable_decay, warmup: 0.05, arguments: {num_decay_steps: 100}}

The run sets ``total_steps``, ``T_max``, ``num_training_steps``, ``max_lr`` and ``num_warmup_steps``, and
``total_iters`` of ``PolynomialLR``, unless ``arguments`` does. Schedules step once an optimizer step, so ``step_size``
counts steps. A run resumes only with the same options. With ``CosineAnnealingLR``, ``OneCycleLR`` or ``PolynomialLR``,
it also needs the same number of steps. With other schedules, a run that is longer or shorter than before continues at
the rate that its new length has at this step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastloop import Plugin, RecipeError, UsageError, hookimpl, option
from fastloop_plugins.training._schedules import BUILT_IN, find_schedule, make_schedule, warmup_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from fastloop import Run
    from fastloop.recipe import Recipe


BUILT_IN_OPTIONS = {"linear": ("warmup", "min_ratio"), "cosine": ("warmup", "min_ratio"), "constant": ("warmup",)}
"""Built-in schedule -> the options that change it."""


class LRSchedule(Plugin):
    """Changes the learning rate over the run."""

    name = "lr-scheduler"
    numerics = "changes-training"

    schedule: str = option(
        "linear, cosine or constant; a class of torch, a name of transformers, or file.py:name.", default="linear"
    )
    warmup: int | float = option("Warm-up steps; a fraction below 1 is a share of the run's steps.", default=0, ge=0)
    min_ratio: float = option(
        "Final learning rate as a share of the peak: for linear and cosine.", default=0.0, ge=0, le=1
    )
    arguments: dict[str, Any] = option("Keyword arguments of another schedule than the three.", default_factory=dict)

    factory: Callable[..., LRScheduler]  # makes the schedule, if it is not built in; from check_recipe on

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        where = f"{recipe.where}: plugins.lr-scheduler"
        if self.schedule not in BUILT_IN:
            self.factory = find_schedule(self.schedule, self.arguments, recipe)
        elif self.arguments:
            raise RecipeError(
                f"{self.schedule} has only {' and '.join(BUILT_IN_OPTIONS[self.schedule])}.",
                code="unknown-option",
                place=f"{where}.arguments",
                remedy=f"Remove {min(self.arguments)!r}.",
            )
        if self.min_ratio and "min_ratio" not in BUILT_IN_OPTIONS.get(self.schedule, ()):
            raise RecipeError(
                f"is for linear and cosine, and the schedule is {self.schedule}.",
                code="unknown-option",
                place=f"{where}.min_ratio",
                remedy="Remove it." if self.schedule in BUILT_IN else "Use arguments.",
            )

    @hookimpl
    def build_scheduler(self, run: Run, optimizer: Optimizer) -> LRScheduler:
        from torch.optim.lr_scheduler import LambdaLR

        total = run.total_steps
        if self.schedule not in BUILT_IN:
            return make_schedule(self.schedule, self.factory, run, optimizer, self.warmup, self.arguments)
        if total is None and (self.schedule != "constant" or isinstance(self.warmup, float)):
            raise UsageError(
                "the data has no known length, so the run has no known end.",
                code="no-length",
                place=f"plugin {self.name!r}",
                remedy="Set train.max_steps.",
            )
        warmup = warmup_steps(self.warmup, total, run.recipe.where)

        def ratio(step: int) -> Any:
            if step < warmup:
                return step / warmup
            if self.schedule == "constant" or total is None:
                return 1.0
            progress = min((step - warmup) / max(total - warmup, 1), 1.0)
            return self.min_ratio + (1 - self.min_ratio) * BUILT_IN[self.schedule](progress)

        return LambdaLR(optimizer, ratio)

    @hookimpl
    def save_state(self, run: Run) -> dict[str, Any]:
        return {"total_steps": run.total_steps}

    @hookimpl
    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        from fastloop.checkpoint.state_form import check_form

        before = state["total_steps"]
        check_form(state, {"total_steps": 0 if before is not None else None})
        if before != run.total_steps:
            self.log.info(
                "the run has %s steps, and had %s: the schedule is that of the new length", run.total_steps, before
            )
