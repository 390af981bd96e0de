"""Keeps the weights that evaluated best, and puts them back for the final test and the exported model.

    plugins:
      - checkpoint-best: {monitor: accuracy, keep_checkpoints: 1}

``mode: auto`` reads which values are better from the metric: from ``higher_is_better`` of its torchmetrics class, or
from the task. If neither declares it, set ``min`` or ``max``.

The checkpoints lie in ``checkpoints/best-*`` of the run folder, which ``train.keep_checkpoints`` does not count.
``best`` in ``summary.json`` has step, metric, value, path and all metrics. A run that resumes from a checkpoint of
another run folder copies the best ones from there.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Plugin, Problem, UsageError, hookimpl, option
from fastloop.errors import SaveError
from fastloop.runtime.step_folders import remove_old_checkpoints, resume_remedy
from fastloop_plugins.training._monitor import Monitor

if TYPE_CHECKING:
    from fastloop import Run


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint of weights that are among the best.

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
    """Keeps the best weights by a metric of the evaluation, and ends with them.

    A run that resumes must find the weights that were the best when its checkpoint was saved. With a save every 2
    steps, and ``train.keep_checkpoints: 2``, these are in the run folder after step 6::

        evaluated after step     2      3      5
        loss                     0.4    0.5    0.3
        checkpoints to resume    step-4, where step 2 was the best; step-6, where step 5 is
        best weights             best-2, until step-4 is removed; best-5
    """

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
        self.kept: list[KeptCheckpoint] = []  # best first
        # step of a save -> the best steps then: {4: [2], 6: [5]} in the example
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
            self._copy_from_other_folder(run)
            problems = [checkpoint.verify(run.folder / self.path(kept.step)) for kept in self.kept]
        problems_of_main = run.processes.all_gather_object(problems)[0]
        for kept, problem in zip(list(self.kept), problems_of_main, strict=True):
            if problem is not None:
                self.log.warning(Problem(f"{self.path(kept.step)} is lost: {problem}.", code="damaged-checkpoint"))
                self.kept.remove(kept)
                run.state.best = self.best()
        del self.kept[self.keep_checkpoints :]  # a run that resumes may keep fewer than before
        self.remove_others(run)  # a killed run may have kept more than its newest checkpoint knows

    def _copy_from_other_folder(self, run: Run) -> None:
        """Copy the kept weights of another run folder if this run resumes from a checkpoint in there."""
        if run.resume_point is None:
            return
        from fastloop import checkpoint

        folder = run.resume_point.checkpoint.parent
        if folder.resolve() == (run.folder / "checkpoints").resolve():
            return
        for kept in self.kept:
            target = run.folder / self.path(kept.step)
            source = folder / target.name
            if not source.is_dir():  # the verification reports it
                continue
            try:
                checkpoint.copy(source, target)
            except SaveError as error:
                run.saver.report_failure(str(error))

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
        run.processes.barrier()  # until the main process has written them
        damage = checkpoint.verify(path, wait=not run.is_main)
        if damage is not None:
            raise UsageError(
                f"the best weights cannot be used: {damage}.",
                code="damaged-checkpoint",
                place=str(path),
                remedy=resume_remedy(run.folder),
            )
        weights, _ = checkpoint.read(path, resume.sharded_target(run), run.processes.host_group)
        run.strategy.load_model_state(run, weights)
        run.state.model_step = best.step
        run.state.model_weights = best.weights
        # The final evaluation came after the last save. A run that resumes from that save evaluates again, so the best
        # weights at that save stay.
        self.remove_others(run)

    @hookimpl
    def save_state(self, run: Run) -> dict[str, Any]:
        saved: dict[int, list[int]] = {}
        if run.is_main:
            self._add_save(run.state.step)
            saved = self._remaining_saves(run, saving=run.state.step)
        return {
            "kept": [asdict(kept) for kept in self.kept],
            "saved": saved,
            "metric": self.monitored.definition,
            "has_unsaved": self.has_unsaved,
        }

    def _add_save(self, step: int) -> None:
        """Note the best steps at a save. A second save of the same step, after an evaluation, may add some."""
        best_steps = list(self.best_at_saves.get(step, ()))
        for kept in self.kept:
            if kept.step not in best_steps:
                best_steps.append(kept.step)
        self.best_at_saves[step] = best_steps

    def _remaining_saves(self, run: Run, saving: int | None = None) -> dict[int, list[int]]:
        """``best_at_saves`` without the saves whose checkpoints are removed, see ``remaining_saves``."""
        keep = run.recipe.train.keep_checkpoints
        steps = remaining_saves(self.best_at_saves, self.steps_in_folder(run), keep, saving)
        return {step: self.best_at_saves[step] for step in steps}

    @hookimpl
    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        from fastloop.checkpoint.state_form import check_form

        kept = asdict(KeptCheckpoint(step=0, value=0.0, metrics={}, weights=""))
        check_form(state, {"kept": [kept], "saved": {0: [0]}, "has_unsaved": False})
        self.kept = [KeptCheckpoint(**fields) for fields in state["kept"]]
        self.best_at_saves = dict(state["saved"])
        self.has_unsaved = state.get("has_unsaved", False)  # older releases did not save it
        self.monitored.compare_definition(state.get("metric"))

    @staticmethod
    def path(step: int) -> str:
        """Where a step's weights are, from the run folder."""
        return f"checkpoints/best-{step:08d}"

    @staticmethod
    def steps_in_folder(run: Run) -> list[int]:
        """The steps of the complete checkpoints to resume from, which are in the run folder."""
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
        self.kept.insert(place, KeptCheckpoint(step, value, dict(metrics), run.state.model_weights))
        del self.kept[self.keep_checkpoints :]
        self.remove_others(run)
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

    def remove_others(self, run: Run) -> None:
        """Remove the folders of weights that are neither kept nor the best at a save. The main process does it."""
        if not run.is_main:
            return
        self.best_at_saves = self._remaining_saves(run)
        needed_steps = {kept.step for kept in self.kept}
        for best_steps in self.best_at_saves.values():
            needed_steps.update(best_steps)
        remove_old_checkpoints(run.folder, needed_steps, "best")


def remaining_saves(
    saves: Collection[int], in_folder: Collection[int], keep: int, saving: int | None = None
) -> list[int]:
    """The steps of the saves from which a run can resume.

    Without ``saving``: at this moment. A checkpoint that is missing in the folder was removed if it is earlier than the
    newest one, and is still written if it is later::

        saves      in_folder    keep     remaining
        2 4 6      4 6          2        4 6          2 was removed
        2 4 6 8    4 6          2        4 6 8        8 is still written
        4 5        4 6          2        4 5          5 is still written; 6 is of the run before it resumed from step 4

    With ``saving``: after the save of this step, which removes the oldest checkpoints beyond ``keep``::

        saves      in_folder    keep     saving    remaining
        2 4 6      2 4          2        6         4 6          2 is removed
        2 4 6 8    2 4          2        8         4 8          6 was not written, so 4 stays in its place
        4 5        4 6          2        5         4 5          6 is removed
        4 6        4 6          2        6         4 6          6 is saved again, after an evaluation

    Args:
        saves: Their steps, in ascending order.
        in_folder: The steps of the complete checkpoints in the run folder.
        keep: ``train.keep_checkpoints``, which counts with ``saving``.
        saving: The step of a save that begins; None: none does.
    """
    if saving is not None:
        from fastloop import checkpoint

        written = [step for step in saves if step in in_folder or step == saving]
        return checkpoint.steps_to_keep(written, keep, saving)
    newest_written = max((step for step in saves if step in in_folder), default=-1)
    return [step for step in saves if step in in_folder or step > newest_written]
