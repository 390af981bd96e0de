"""Keeps the weights that evaluated best, and puts them back for the final test and the exported model.

    plugins:
      - checkpoint-best: {monitor: accuracy, keep_checkpoints: 1}

``mode: auto`` reads which values are better from the metric: from ``higher_is_better`` of its torchmetrics class, or
from the task. If neither declares it, set ``min`` or ``max``.

The checkpoints lie in ``checkpoints/best-*`` of the run folder, which ``train.keep_checkpoints`` does not count.
``best`` in ``summary.json`` has step, metric, value, path and all metrics.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Plugin, Problem, UsageError, hookimpl, option
from fastloop.errors import SaveError
from fastloop_plugins.training._monitor import Monitor

if TYPE_CHECKING:
    from fastloop import Run


@dataclass(frozen=True)
class Kept:
    """A checkpoint that is kept.

    Attributes:
        value: That of the monitored metric.
        metrics: All metrics of the evaluation.
        weights: ``State.model_weights`` at the evaluation.
    """

    step: int
    value: float
    metrics: dict[str, float]
    weights: str


class CheckpointBest(Plugin):
    """Keeps the best weights by a metric of the evaluation, and ends with them."""

    name = "checkpoint-best"
    numerics = "bitwise"
    on_resume = {"monitor": "fixed", "mode": "fixed"}  # the values of the kept checkpoints are compared with new ones
    runs_after = ("ema",)  # inside its wrapper, so that it keeps the evaluated weights

    monitor: str = option("Metric of the evaluation.", default="loss")
    mode: Literal["auto", "min", "max"] = option(
        "Whether smaller or larger is better; auto: as the metric declares.", default="auto"
    )
    keep_checkpoints: int = option("Best checkpoints kept.", default=1, ge=1)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.monitored = Monitor(self.name, self.monitor, self.mode)
        self.kept: list[Kept] = []  # best first
        # step of a resume checkpoint -> steps of the best then: it must find their folders
        self.best_at_saves: dict[int, list[int]] = {}
        self.has_unsaved = False  # whether weights that were among the best could not be written

    @hookimpl
    def check_run(self, run: Run) -> None:
        self.monitored.check(run)

    @hookimpl
    def before_fit(self, run: Run) -> None:
        from fastloop import checkpoint

        problems: list[str | None] = []
        if run.is_main:
            problems = [checkpoint.verify(run.folder / self.path(one.step)) for one in self.kept]
        of_main = run.processes.all_gather_object(problems)[0]
        for one, wrong in zip(list(self.kept), of_main, strict=True):
            if wrong:
                self.log.warning(Problem(f"{self.path(one.step)} is lost: {wrong}.", code="damaged-checkpoint"))
                self.kept.remove(one)
                run.state.best = self.best()
        del self.kept[self.keep_checkpoints :]  # a run that resumes may keep fewer than before
        self.tidy(run)  # a killed run may have kept more than its newest checkpoint knows

    @hookimpl(wrapper=True)
    def evaluate(self, run: Run, split: str) -> Generator[None, dict[str, float], dict[str, float]]:
        metrics = yield
        if split == "validation":
            self.consider(run, metrics)
        return metrics

    @hookimpl
    def after_fit(self, run: Run) -> None:
        if not self.kept:
            problem = Problem(
                f"no evaluation gave a {self.monitored.name} that is a number: the last weights stay.",
                code="no-best-checkpoint",
            )
            if self.has_unsaved:
                problem = Problem("the best weights were not saved: the last weights stay.", code="no-best-checkpoint")
            self.log.warning(problem)
            return
        from fastloop import checkpoint
        from fastloop.checkpoint import resume

        best = self.kept[0]
        path = run.folder / self.path(best.step)
        run.processes.barrier()  # for the main process to have written them
        wrong = checkpoint.verify(path, wait=not run.is_main)
        if wrong:
            raise UsageError(f"the best weights cannot be used: {wrong}.", code="damaged-checkpoint", place=str(path))
        run.strategy.load_model_state(
            run, checkpoint.read(path, resume.sharded_target(run), run.processes.host_group)[0]
        )
        run.state.model_step = best.step
        run.state.model_weights = best.weights
        # what the last checkpoint names stays: the final evaluation came after it, and a resumed run repeats that
        self.tidy(run)

    @hookimpl
    def save_state(self, run: Run) -> dict[str, Any]:
        kept = [asdict(one) for one in self.kept]
        state = {"kept": kept, "saved": {}, "metric": self.monitored.definition, "has_unsaved": self.has_unsaved}
        if not run.is_main:
            return state
        # Step 2 is the best at the save of step 4, and step 5 at that of step 6: best_at_saves is {4: [2], 6: [5]}. A
        # run that resumes from step 4 needs the weights of step 2, which stay as long as the checkpoint of step 4.
        save_step = run.state.step
        best_steps = list(self.best_at_saves.get(save_step, ()))
        for one in self.kept:
            if one.step not in best_steps:
                best_steps.append(one.step)
        self.best_at_saves[save_step] = best_steps
        # with saves at steps 2, 4 and 6 and train.keep_checkpoints: 2, those at 4 and 6 remain after this one
        save_steps = sorted(self.best_at_saves.keys() & {save_step, *self.steps_to_resume_from(run)})
        remaining = save_steps[-run.recipe.train.keep_checkpoints :]
        state["saved"] = {step: self.best_at_saves[step] for step in remaining}
        return state

    @hookimpl
    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        from fastloop.checkpoint.form import check_form

        kept = asdict(Kept(step=0, value=0.0, metrics={}, weights=""))
        check_form(state, {"kept": [kept], "saved": {0: [0]}, "has_unsaved": False})
        self.kept = [Kept(**fields) for fields in state["kept"]]
        self.best_at_saves = dict(state["saved"])
        self.has_unsaved = state.get("has_unsaved", False)  # older releases did not save it
        self.monitored.compare_definition(state.get("metric"))

    @staticmethod
    def path(step: int) -> str:
        """Where a step's weights are, from the run folder."""
        return f"checkpoints/best-{step:08d}"

    @staticmethod
    def steps_to_resume_from(run: Run) -> list[int]:
        """The steps of the checkpoints to resume from."""
        from fastloop import checkpoint

        steps = [checkpoint.step_of(path) for path in checkpoint.checkpoints(run.folder)]
        return [step for step in steps if step is not None]

    def consider(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Keep the weights in place when they are among the best."""
        from fastloop import checkpoint

        value = self.monitored.read(metrics)
        step = run.state.step
        has_room = len(self.kept) < self.keep_checkpoints
        value_to_beat = None if has_room else self.kept[-1].value
        if not self.monitored.better(value, value_to_beat):
            return
        weights = run.strategy.model_state(run)
        failed = False
        try:
            checkpoint.write(
                run.folder / self.path(step),
                weights,
                {"step": step, "value": value},
                run.is_main,
                run.processes.host_group,
            )
        except SaveError as error:
            run.saver.report_failure(str(error))
            failed = True
        if any(run.processes.all_gather_object(failed)):  # it is not kept: on all processes
            self.has_unsaved = True
            return
        place = 0
        while place < len(self.kept) and not self.monitored.better(value, self.kept[place].value):
            place += 1
        self.kept.insert(place, Kept(step, value, dict(metrics), run.state.model_weights))
        del self.kept[self.keep_checkpoints :]
        self.tidy(run)
        run.state.best = self.best()

    def best(self) -> dict[str, Any] | None:
        """For ``run.state``."""
        if not self.kept:
            return None
        best = self.kept[0]
        return {
            "step": best.step,
            "metric": self.monitored.name,
            "mode": self.monitored.mode,
            "value": best.value,
            "path": self.path(best.step),
            "metrics": dict(best.metrics),
        }

    def tidy(self, run: Run) -> None:
        """Remove checkpoints that are no longer among the best, after the new one is complete."""
        if not run.is_main:
            return
        save_steps = self.steps_to_resume_from(run)
        newest = max(save_steps, default=-1)
        for save_step in list(self.best_at_saves):
            is_under_way = save_step > newest
            if save_step not in save_steps and not is_under_way:
                del self.best_at_saves[save_step]
        wanted = {one.step for one in self.kept}.union(*self.best_at_saves.values())
        folders = run.folder / "checkpoints"
        unwanted = list(folders.glob(".best-*.partial"))
        for folder in folders.glob("best-*"):
            step = folder.name.removeprefix("best-")
            if step.isdecimal() and int(step) not in wanted:
                unwanted.append(folder)
        for folder in unwanted:
            shutil.rmtree(folder, ignore_errors=True)
