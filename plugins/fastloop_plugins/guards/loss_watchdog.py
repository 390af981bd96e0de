"""Ends a run whose loss stays above a threshold: it has diverged, or never learns.

    plugins:
      - loss-watchdog: {threshold: 8.0, patience: 3}

At each log point (``train.log_every`` steps), the loss of that step is compared. After ``patience`` log points in a row
above the threshold, the run stops as with early stopping: it is saved, evaluated and exported. With ``action: error``,
it fails instead. NaN and infinity are above any threshold; ``nan-guard`` skips such steps or goes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastloop import FastloopError, Plugin, hookimpl, option

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop import Run


class LossWatchdog(Plugin):
    """Stops training, or raises an error, at a loss that stays above a threshold."""

    name = "loss-watchdog"
    numerics = "changes-training"
    on_resume = {"threshold": "free", "patience": "free", "action": "free"}
    description = "may stop training at a high loss"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        threshold: Annotated[float, option("The loss above which a log point counts.")]
        patience: Annotated[int, option("Log points in a row above the threshold.", ge=1)] = 3
        action: Annotated[Literal["stop", "error"], option("Whether the run stops or fails.")] = "stop"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.above = 0

    @hookimpl
    def after_step(self, run: Run, loss: Tensor) -> None:
        if run.state.step % run.recipe.train.log_every:
            return
        value = loss.item()  # the same on all processes
        self.above = 0 if value <= self.config.threshold else self.above + 1
        if self.above < self.config.patience:
            return
        found = f"the loss is {value:.6g}, and above {self.config.threshold:g} at {self.above} log points in a row"
        if self.config.action == "error":
            raise FastloopError(f"{run.recipe.where}: plugins.loss-watchdog: step {run.state.step}: {found}.")
        run.state.request_stop(f"loss-watchdog: {found}")

    @hookimpl
    def save_state(self) -> dict[str, Any]:
        return {"above": self.above}

    @hookimpl
    def load_state(self, state: dict[str, Any]) -> None:
        self.above = state["above"]
