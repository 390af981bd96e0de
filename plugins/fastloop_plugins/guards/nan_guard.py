"""Detects losses and gradients that are NaN or infinite, or a loss that stays high, and stops, skips or rolls back.

    plugins:
      - nan-guard: {action: rollback, limit: 3}

``skip`` leaves weights, optimizer, learning rate schedule and averages of the weights as they are. ``rollback`` loads
the newest checkpoint and resumes without the bad batch. ``bad_batches.jsonl`` in the run folder lists the samples of
such steps and of spikes. An overflow in fp16 is not a failure: loss scaling skips the step.

On a CPU and with ``skip``, each step is checked before its weights change; otherwise every ``every`` steps, at the end
of an epoch and before each checkpoint. On devices other than a CPU, ``skip`` costs a wait of the host at each step.

``max_loss: 8.0`` also ends a run that has diverged or never learns. At each log point (``train.log_every`` steps), the
loss of that step is compared. After ``max_loss_patience`` log points in a row above it, the run stops as with early
stopping: it is saved, evaluated and exported. With ``max_loss_action: error``, it fails instead. The host waits for the
device at each log point then, because the run must end in that step.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Literal

from fastloop import CheckpointError, FastloopError, Plugin, PluginError, Problem, hookimpl, option
from fastloop.problem import counted
from fastloop_plugins.guards._numbers import (
    MIN_WINDOW,
    NotFinite,
    Spikes,
    StepStart,
    UncheckedStep,
    copy_buffers,
    loss_and_norm,
    read_numbers,
    restore_buffers,
    write_record,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop import Batch, Run
    from fastloop.checkpoint import ResumePoint
    from fastloop.plugins.manager import PluginSet
    from fastloop.recipe import Recipe
    from fastloop_plugins.guards._numbers import SavedBuffer

logger = logging.getLogger("fastloop")


class NanGuard(Plugin):
    """Stops, skips or rolls back at NaN and infinite losses and gradients, and stops at a high loss."""

    name = "nan-guard"
    numerics = "bitwise"

    action: Literal["stop", "skip", "rollback"] = option(
        "What to do if a loss or gradient is not finite.", default="stop"
    )
    limit: int = option("How many times to skip or roll back before the run ends.", default=5, ge=1)
    every: int = option("Steps between two checks, on devices other than a CPU, without skip.", default=10, ge=1)
    spike: float = option("Standard deviations above the median from which a loss is a spike.", default=8.0, gt=0)
    window: int = option("Steps that the median is computed over.", default=100, ge=MIN_WINDOW)
    max_loss: float | None = option("The loss above which a log point counts as high.", default=None)
    max_loss_patience: int = option("High log points in a row before the run ends.", default=3, ge=1)
    max_loss_action: Literal["stop", "error"] = option("Whether such a run stops or fails.", default="stop")

    start: StepStart  # of the step
    buffers: list[SavedBuffer]  # of the model at the start of the step, to skip it
    loss: Tensor  # of the step, as in after_backward
    skips_step: bool  # whether this plugin skips the current step

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.unchecked: list[UncheckedStep] = []
        self.spikes = Spikes(self.window, self.spike)
        # of steps; acted: skipped or rolled back
        self.counts = {"not_finite": 0, "acted": 0, "overflows": 0, "spikes": 0}
        self.high_log_points = 0  # in a row, up to the newest

    @hookimpl
    def check_recipe(self, recipe: Recipe, plugins: PluginSet) -> None:
        names = plugins.names()
        place = f"{recipe.where}: plugins.nan-guard.action: {self.action}"
        if self.action == "skip" and "deepspeed" in names:
            raise PluginError(
                "'deepspeed' does not expose the gradients.",
                code="unsupported-strategy",
                place=place,
                remedy="Use stop or rollback.",
            )
        if self.action == "rollback" and "sample-audit" in names:
            raise PluginError(
                "'sample-audit' would count the samples of repeated steps twice.",
                code="excluded-plugin",
                place=place,
                remedy="Remove one of them.",
            )

    @hookimpl
    def before_step(self, run: Run, batches: list[Batch]) -> None:
        from fastloop.step_totals import add_up

        state = run.state
        drawn = add_up(batches).drawn
        self.start = StepStart(number=state.step + 1, epoch=state.epoch, samples=state.epoch_samples, drawn=drawn)
        self.skips_step = False
        if self.action == "skip":
            self.buffers = copy_buffers(run.model)

    @hookimpl
    def after_backward(self, loss: Tensor) -> None:
        self.loss = loss

    @hookimpl
    def before_optimizer_step(self, run: Run) -> None:
        numbers = loss_and_norm(run, self.loss)
        self.unchecked.append(UncheckedStep(self.start, numbers))
        if self.action == "skip" or run.device.type == "cpu" or self.start.number % self.every == 0:
            self.check_steps(run)

    @hookimpl
    def after_step(self, run: Run, loss: Tensor) -> None:
        if not self.skips_step and run.accelerator.scaler is not None and run.step_was_skipped():
            self.counts["overflows"] += 1
        if run.schedule.should_stop():
            self.check_steps(run)
        if self.max_loss is not None and run.state.step % run.recipe.train.log_every == 0:
            self.check_high_loss(run, loss.item(), self.max_loss)  # the same loss on all processes

    @hookimpl
    def after_epoch(self, run: Run) -> None:
        self.check_steps(run)

    @hookimpl
    def save_state(self, run: Run) -> dict[str, Any]:
        self.check_steps(run)  # before anything is written
        return {
            "losses": list(self.spikes.losses),
            "counts": self.counts,
            "high_log_points": self.high_log_points,
        }

    @hookimpl
    def load_state(self, state: dict[str, Any]) -> None:
        from fastloop.checkpoint.state_form import check_form

        check_form(state, {"losses": [0.0], "counts": self.counts, "high_log_points": 0})
        self.spikes.losses.clear()  # after a rollback: losses of steps that are repeated
        self.spikes.losses.extend(state["losses"])
        self.counts = dict(state["counts"])
        self.high_log_points = state["high_log_points"]

    def check_steps(self, run: Run) -> None:
        """Read the numbers of the unchecked steps, and act on them. All processes have the same numbers, and act alike.

        Raises:
            NotFinite: A step is not finite, and is not skipped.
        """
        steps = self.unchecked
        self.unchecked = []
        values = read_numbers([step.loss_and_norm for step in steps])
        for step, (loss, norm) in zip(steps, values, strict=True):
            if math.isfinite(loss) and math.isfinite(norm):
                self.record_spike(run, step.start, loss)
            else:
                self.act_on(run, step.start, loss, norm)

    def record_spike(self, run: Run, start: StepStart, loss: float) -> None:
        """Record a step in ``bad_batches.jsonl`` if its loss is a spike."""
        usual = self.spikes.add(loss)
        if usual is not None:
            self.counts["spikes"] += 1
            write_record(run, start, what="spike", loss=loss, usual=usual)

    def act_on(self, run: Run, start: StepStart, loss: float, norm: float) -> None:
        """Record a step that is not finite, and count it as skipped or end it.

        Raises:
            NotFinite: The step is not skipped. ``recover`` may roll back then.
        """
        self.counts["not_finite"] += 1
        write_record(run, start, what="not finite", loss=str(loss), grad_norm=str(norm))
        message = (
            f"step {start.number}: the loss is {loss}, the gradients' norm {norm}; bad_batches.jsonl in "
            f"{run.folder} names its samples."
        )
        if self.action != "skip" or self.limit_is_reached():
            raise NotFinite(message + self.describe_limit(), start)
        self.counts["acted"] += 1
        restore_buffers(self.buffers)
        run.skip_update()
        self.skips_step = True
        logger.warning(Problem(f"{message} fastloop skips it.", code="not-finite"))

    def check_high_loss(self, run: Run, loss: float, max_loss: float) -> None:
        """Count a log point with a high loss, and end the run after ``max_loss_patience`` of them in a row.

        Raises:
            FastloopError: The run ends, and ``max_loss_action`` is ``error``.
        """
        if loss <= max_loss:
            self.high_log_points = 0
            return
        self.high_log_points += 1  # NaN and infinity count, too
        if self.high_log_points < self.max_loss_patience:
            return
        reason = f"the loss is {loss:.6g}, and above {max_loss:g} at {self.high_log_points} log points in a row"
        if self.max_loss_action == "error":
            raise FastloopError(
                f"{reason}.",
                code="high-loss",
                place=f"{run.recipe.where}: plugins.nan-guard.max_loss: step {run.state.step}",
            )
        run.state.request_stop(f"nan-guard: {reason}")

    def limit_is_reached(self) -> bool:
        """Whether the run may skip or roll back no more."""
        return self.counts["acted"] == self.limit

    def describe_limit(self) -> str:
        """The end of the message of a run that may skip or roll back; empty for ``stop``."""
        if self.action == "stop":
            return ""
        done = "skipped a step" if self.action == "skip" else "rolled back"
        return f" The run has {done} {counted(self.counts['acted'], 'time')}; plugins.nan-guard.limit is {self.limit}."

    @hookimpl
    def recover(self, run: Run, error: Exception) -> bool | None:
        if not isinstance(error, NotFinite) or self.action != "rollback" or self.limit_is_reached():
            return None
        logger.warning(error.problem)
        counts = self.counts  # the checkpoint has older ones
        if not roll_back(run, skip=error.start):
            return None
        self.counts = {**counts, "acted": counts["acted"] + 1}
        self.unchecked.clear()
        return True

    @hookimpl
    def write_summary(self, summary: dict[str, Any]) -> None:
        summary["nan-guard"] = self.counts


def roll_back(run: Run, skip: StepStart) -> bool:
    """Load the newest checkpoint during training, and skip the step ``skip`` from then on.

    Returns False if the run has no checkpoint.
    """
    from fastloop.checkpoint import resume, saving

    saving.wait_for_save(run)
    newest = newest_checkpoint(run)
    if newest is None:
        return False
    left_out = [*run.state.left_out, [skip.epoch, skip.samples]]
    resume.load(run, newest)
    run.state.left_out = left_out  # the checkpoint does not have the step yet
    logger.warning(
        Problem(
            f"rolled back to step {run.state.step}: training continues without the step that failed.",
            code="rolled-back",
        )
    )
    return True


def newest_checkpoint(run: Run) -> ResumePoint | None:
    """The newest checkpoint of a run; None, which is logged: there is none.

    The main process looks it up for all, because other hosts may see late what it has just written.
    """
    from fastloop import checkpoint

    newest: ResumePoint | None = None
    if run.is_main:
        try:
            newest = checkpoint.find_newest(run.folder)
        except CheckpointError as error:
            logger.warning(Problem(f"there is nothing to roll back to: {error}", code=error.problem.code))
    by_rank: list[ResumePoint | None] = run.processes.all_gather_object(newest)
    return by_rank[0]
