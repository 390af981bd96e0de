"""Keeps the weights that evaluated best, and puts them back for the final test and the exported model.

    plugins:
      - checkpoint-best: {monitor: accuracy, keep: 1}

They lie in ``checkpoints/best-*`` of the run folder, which the rotation of resume checkpoints does not touch.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastloop import Plugin, UsageError, hookimpl, option
from fastloop_plugins._monitor import Monitor

if TYPE_CHECKING:
    from fastloop import Run

logger = logging.getLogger("fastloop")


class CheckpointBest(Plugin):
    """The best weights by a metric of the evaluation."""

    name = "checkpoint-best"
    parity = "exact"
    runs_after = ("ema",)  # inside its wrapper: the weights kept are those that were evaluated
    configures = "keeps the best weights, and ends with them"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        monitor: Annotated[str, option("Metric of the evaluation.")] = "loss"
        mode: Annotated[Literal["auto", "min", "max"], option("Whether smaller or larger is better; auto tells by the name.")] = "auto"
        keep: Annotated[int, option("How many of the best to keep.", ge=1)] = 1

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.monitor = Monitor(self.name, self.config.monitor, self.config.mode)
        self.kept: list[tuple[int, float]] = []  # (step, value), best first
        self.saved: list[tuple[int, float]] = []  # the same as of the newest resume checkpoint, which must find its folders

    @hookimpl
    def check_run(self, run: Run) -> None:
        self.monitor.check(run)

    @hookimpl
    def before_fit(self, run: Run) -> None:
        from fastloop import checkpoint

        for step, value in list(self.kept):
            if wrong := checkpoint.damage(run.folder / self.path(step)):
                logger.warning("checkpoint-best: %s is lost: %s", self.path(step), wrong)
                self.kept.remove((step, value))
        self.tidy(run)  # a killed run may have kept more than its newest checkpoint knows

    @hookimpl(wrapper=True)
    def evaluate(self, run: Run, split: str) -> Generator[None, dict[str, float], dict[str, float]]:
        metrics = yield
        if split == "evaluate":
            self.consider(run, metrics[self.monitor.name])
        return metrics

    @hookimpl
    def after_fit(self, run: Run) -> None:
        if not self.kept:
            logger.warning("checkpoint-best: no evaluation gave a %s that is a number: the last weights stay", self.monitor.name)
            return
        from fastloop import checkpoint

        path = run.folder / self.path(self.kept[0][0])
        run.wait()  # for the main process to have written them
        if wrong := checkpoint.damage(path):
            raise UsageError(f"{path}: the best weights cannot be used: {wrong}.")
        run.hooks.load_model_state(run=run, state=checkpoint.read(path)[0])
        self.saved = []
        self.tidy(run)

    @hookimpl
    def save_state(self) -> dict[str, Any]:
        self.saved = list(self.kept)
        return {"kept": self.kept}

    @hookimpl
    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        self.kept = state["kept"]
        self.saved = list(self.kept)

    @staticmethod
    def path(step: int) -> str:
        """Where a step's weights are, from the run folder."""
        return f"checkpoints/best-{step:08d}"

    def consider(self, run: Run, value: float) -> None:
        """Keep the weights in place when they are among the best."""
        from fastloop import checkpoint

        step = run.state.step
        worst = self.kept[-1][1] if len(self.kept) == self.config.keep else None
        if not self.monitor.better(value, worst):
            return
        weights = run.weights()
        if run.is_main:
            checkpoint.write(run.folder / self.path(step), weights, {"step": step, "value": value})
        place = next((index for index, (_, old) in enumerate(self.kept) if self.monitor.better(value, old)), len(self.kept))
        self.kept.insert(place, (step, value))
        del self.kept[self.config.keep :]
        self.tidy(run)
        run.state.best = {"step": self.kept[0][0], "value": self.kept[0][1], "path": self.path(self.kept[0][0])}

    def tidy(self, run: Run) -> None:
        """Remove what is no longer among the best; only after the new one is whole."""
        if not run.is_main:
            return
        names = {self.path(step).rpartition("/")[2] for step, _ in (*self.kept, *self.saved)}
        for folder in (run.folder / "checkpoints").glob("*best-*"):
            if folder.name not in names:
                shutil.rmtree(folder)
