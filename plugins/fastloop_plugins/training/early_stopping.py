"""Stops training when a metric of the evaluation no longer improves.

    plugins:
      - early-stopping: {monitor: accuracy, patience: 3}

``mode: auto`` reads which values are better from the metric, as `checkpoint-best` does. The run ends with its last
weights; add ``checkpoint-best`` to restore the best ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastloop import Plugin, hookimpl, option
from fastloop.metric_modes import direction
from fastloop_plugins.training._monitor import Monitor

if TYPE_CHECKING:
    from fastloop import Run


class EarlyStopping(Plugin):
    """Stops training after ``patience`` evaluations without improvement, or at a threshold."""

    name = "early-stopping"
    numerics = "changes-training"
    on_resume = {"patience": "free", "min_delta": "free", "threshold": "free"}

    monitor: str = option("Metric of the evaluation.", default="loss")
    mode: Literal["auto", "min", "max"] = option(
        "Whether smaller or larger is better; auto: as the metric declares.", default="auto"
    )
    patience: int = option("Evaluations without improvement before stopping.", default=3, ge=1)
    min_delta: float = option("Smallest change that counts as an improvement.", default=0.0, ge=0)
    threshold: float | None = option("Stop as soon as the metric reaches this; null: no threshold.", default=None)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.monitored = Monitor(self.name, self.monitor, self.mode)
        self.best: float | None = None
        self.waited = 0

    @hookimpl
    def check_run(self, run: Run) -> None:
        self.monitored.check(run)

    @hookimpl
    def after_evaluate(self, run: Run, split: str, metrics: dict[str, float]) -> None:
        if split != "validation":
            return
        value = self.monitored.read(metrics)
        threshold = self.threshold
        if threshold is not None and self.monitored.reaches(threshold, value):
            run.state.request_stop(f"early-stopping: {self.monitored.name} {value:.6g} reached {threshold:g}")
        if self.monitored.better(value, self.best, by=self.min_delta):
            self.best = value
            self.waited = 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            metric = f"{self.monitored.name}{direction(self.monitored.mode)}"
            if self.best is None:
                reason = f"{metric} was no finite number in {self.waited} evaluations"
            else:
                reason = f"{metric} did not improve on {self.best:.6g} in {self.waited} evaluations"
            run.state.request_stop(f"early-stopping: {reason}")

    @hookimpl
    def save_state(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "metric": self.monitored.definition}

    @hookimpl
    def load_state(self, state: dict[str, Any]) -> None:
        from fastloop.checkpoint.state_form import check_form

        check_form(state, {"best": 0.0 if state["best"] is not None else None, "waited": 0})
        self.best = state["best"]
        self.waited = state["waited"]
        self.monitored.compare_definition(state.get("metric"))
