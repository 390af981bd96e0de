"""Shows the progress of a run: a bar on a terminal and in a notebook, plain lines elsewhere.

    plugins:
      - progress: {every: 10}

On by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, hookimpl, option

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID
    from torch import Tensor

    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop.runtime.host_copies import HostCopy
    from fastloop.scalars import LogMark


WINDOW = 30
"""Seconds after which the measurement of the speed begins anew, at the next update. So the speed that is shown is an
average over at most this time and the time between two updates."""


@dataclass(frozen=True)
class CopiedLoss:
    """The loss of a step, on its way to the host. ``epoch``: the index of the step's epoch, from 0."""

    step: int
    epoch: int
    loss: HostCopy


class Progress(Plugin):
    """Shows step, loss, samples/s, time left and best value."""

    name = "progress"
    read_only = True
    numerics = "bitwise"

    every: float = option("Seconds between two plain lines, without a terminal or notebook.", default=10.0, gt=0)
    refresh: float = option("Seconds between two updates of the bar.", default=0.25, gt=0)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.bar: Bar | NotebookBar | None = None
        self.next = 0.0  # time of the next update, by ``perf_counter``; infinite on other processes, which show nothing
        self.period = 0.0  # seconds between two updates
        self.copied: CopiedLoss | None = None
        self.console: Console  # this and the next attributes: from before_fit on
        self.mark: LogMark  # the training done when the measured time began
        self.task: TaskID

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str:
        return "every run shows its progress"

    @hookimpl
    def before_fit(self, run: Run) -> None:
        import rich

        from fastloop.log_points import read_mark

        self.console = rich.get_console()
        is_live = self.console.is_terminal or self.console.is_jupyter
        self.period = self.refresh if is_live else self.every
        self.next = perf_counter() + self.period if run.is_main else float("inf")
        self.mark = read_mark(run)
        if run.is_main and self.console.is_jupyter:
            self.bar = NotebookBar()
        elif run.is_main and self.console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn())
            self.bar = Progress(*columns, console=self.console, transient=True, refresh_per_second=1 / self.refresh)
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("starting", total=run.total_steps, completed=run.state.step)

    @hookimpl
    def after_step(self, run: Run, loss: Tensor) -> None:
        if perf_counter() < self.next:  # a step costs one clock reading
            return
        from fastloop.log_points import read_mark

        if self.copied is None:
            from fastloop.runtime.host_copies import HostCopy

            self.copied = CopiedLoss(run.state.step, run.state.epoch, HostCopy(loss))
            if run.device.type != "cpu":
                return  # it is shown after the next step, so that the host need not wait for this one
        text = self.describe(run, self.copied.step, self.copied.epoch, self.copied.loss.read().item())
        self.copied = None
        now = read_mark(run)
        if now.seconds - self.mark.seconds > WINDOW:
            self.mark = now
        if self.bar is not None:
            self.bar.update(self.task, completed=run.state.step, description=text)
        else:
            self.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
        self.next = perf_counter() + self.period

    def describe(self, run: Run, step: int, epoch: int, loss: float) -> str:
        """One line with the state of the run.

        Args:
            step: The step of the loss.
            epoch: The index of its epoch, from 0.
        """
        from fastloop.log_points import read_mark

        now = read_mark(run)
        elapsed = now.seconds - self.mark.seconds
        speed = (now.samples - self.mark.samples) / max(elapsed, 1e-9)
        of = f"/{run.total_steps}" if run.total_steps else ""
        of_epochs = f"/{run.schedule.epochs}" if run.schedule.epochs else ""
        parts = [
            f"step {step}{of}",
            f"epoch {epoch + 1}{of_epochs}",
            f"loss {loss:.4f}",
            f"{speed:.1f} samples/s",
        ]
        if run.total_steps and speed:
            left = (run.total_steps - run.state.step) * run.recipe.train.batch_size / speed
            parts.append(f"{_duration(left)} left")
        if run.state.best:
            best = run.state.best
            extreme = {"min": "lowest", "max": "highest"}.get(str(best.get("mode")), "best")
            parts.append(f"{extreme} {best['metric']} {best['value']:.4f}")
        return ", ".join(parts)

    @hookimpl
    def before_evaluate(self, run: Run, split: str) -> None:
        if self.bar is not None:
            self.bar.update(
                self.task, completed=run.state.step, description=f"step {run.state.step}, evaluating {split}"
            )

    @hookimpl
    def teardown(self, run: Run) -> None:
        if isinstance(self.bar, NotebookBar):  # it stays in the notebook
            values = [
                f"{split} {name} {value:.4f}"
                for split, metrics in run.state.metrics.items()
                for name, value in metrics.items()
            ]
            self.bar.update(
                self.task, completed=run.state.step, description=", ".join([f"step {run.state.step}", *values])
            )
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class NotebookBar:
    """A bar in the output of a notebook's cell, with the methods of rich's ``Progress``. It needs no widgets."""

    def __init__(self) -> None:
        self.text = ""
        self.done = 0
        self.total: int | None = None
        self.handle: Any  # of the output that is replaced

    def start(self) -> None:
        from IPython.display import display

        self.handle = display(self, display_id=True)

    def add_task(self, description: str, total: int | None, completed: int) -> TaskID:
        from rich.progress import TaskID

        self.total = total
        self.update(TaskID(0), completed, description)
        return TaskID(0)

    def update(self, task: TaskID, completed: int, description: str) -> None:
        self.done = completed
        self.text = description
        self.handle.update(self)

    def stop(self) -> None:
        """Leave the last state in the notebook."""

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        value = "" if self.total is None else f' value="{self.done}" max="{self.total}"'
        return f"<progress{value}></progress> {self.text}"
