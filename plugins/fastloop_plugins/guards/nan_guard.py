"""Watches the numbers: a loss or gradient that is NaN or infinite stops the run, is skipped, or has it go back. Spikes are recorded.

    plugins:
      - nan-guard: {action: rollback, limit: 3}

``stop`` ends the run. ``skip`` leaves weights and optimizer as they are, as if the step's batch were not there. ``rollback`` loads the
newest checkpoint, before which all was finite, and goes on from there without that batch. ``bad_batches.jsonl`` in the run folder names the
samples of each such step, and of those whose loss is a spike. An overflow of fp16 is no failure: loss scaling skips the step, and the
summary's ``nan-guard`` counts it.

On a CPU each step is looked at before its weights change. On other devices steps are looked at every ``every`` steps, at an epoch's end and
before each checkpoint, so that the host does not wait for the device: training goes on till then. ``skip`` is decided on the device
where the optimizer can do that (fused Adam, AdamW, SGD); with another one the host waits at each step.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastloop import Plugin, PluginError, hookimpl, option
from fastloop_plugins.guards._numbers import LEAST, NotFinite, Spikes, of_step, read, unchanged, write

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop import Run

logger = logging.getLogger("fastloop")


class NanGuard(Plugin):
    """NaN and infinity: stop, skip or go back."""

    name = "nan-guard"
    numerics = "bitwise"
    description = "acts on NaN and infinite losses and gradients"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        action: Annotated[Literal["stop", "skip", "rollback"], option("What to do about a step that is not finite.")] = "stop"
        limit: Annotated[int, option("How many times to skip or go back before the run ends.", ge=1)] = 5
        every: Annotated[int, option("Steps between two looks, on other devices than a CPU.", ge=1)] = 10
        spike: Annotated[float, option("A loss this far above the median is a spike, in standard deviations.", gt=0)] = 8.0
        window: Annotated[int, option("Steps that the median is of.", ge=LEAST)] = 100

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.waiting: list[tuple[int, list[int], Tensor]] = []  # steps not looked at yet: number, place, loss and gradient norm
        self.spikes = Spikes(self.config.window, self.config.spike)
        self.counts = {"not_finite": 0, "acted": 0, "overflows": 0, "spikes": 0}

    @hookimpl
    def check_run(self, run: Run) -> None:
        names, action = run.plugins.names(), self.config.action
        where = f"{run.recipe.where}: plugins.nan-guard.action: {action}:"
        if action == "skip" and "deepspeed" in names:
            raise PluginError(f"{where} 'deepspeed' keeps the gradients to itself. Take stop or rollback.")
        if action == "rollback" and "sample-audit" in names:
            raise PluginError(f"{where} 'sample-audit' would count the steps that are done again as repeated. Remove one of them.")
        self.by_itself = bool(getattr(run.optimizer, "_step_supports_amp_scaling", False))
        if action == "skip" and run.device.type != "cpu" and not self.by_itself and run.accelerator.scaler is None:
            logger.warning("nan-guard: this optimizer cannot skip a step by itself: the host waits for the device at each. Make it fused.")

    @hookimpl
    def before_step(self, run: Run) -> None:
        self.place = [run.state.epoch, run.state.epoch_samples]
        if self.config.action == "skip":  # batch norm takes a batch in before it is known to be bad
            self.buffers = [(buffer, buffer.clone()) for buffer in run.model.buffers() if buffer.is_floating_point()]

    @hookimpl
    def after_backward(self, loss: Tensor) -> None:
        self.loss = loss

    @hookimpl
    def before_optimizer_step(self, run: Run) -> None:
        numbers = of_step(run, self.loss)
        self.waiting.append((run.state.step + 1, self.place, numbers))
        if self.config.action == "skip":
            unchanged(run, ~numbers.isfinite().all(), self.buffers, self.by_itself)
        if run.device.type == "cpu" or (run.state.step + 1) % self.config.every == 0:
            self.look(run)

    @hookimpl
    def after_step(self, run: Run) -> None:
        self.counts["overflows"] += run.step_was_skipped()
        if run.schedule.should_stop():
            self.look(run)

    @hookimpl
    def after_epoch(self, run: Run) -> None:
        self.look(run)

    @hookimpl
    def save_state(self, run: Run) -> dict[str, Any]:
        self.look(run)  # before anything is written
        return {"losses": list(self.spikes.losses), "counts": self.counts}

    @hookimpl
    def load_state(self, state: dict[str, Any]) -> None:
        self.spikes.losses.clear()  # when it goes back: those of steps that are done again
        self.spikes.losses.extend(state["losses"])
        self.counts = dict(state["counts"])

    def look(self, run: Run) -> None:
        """Read the numbers of the steps that wait, and act on them. All processes have the same numbers, so they act alike.

        Raises:
            NotFinite: A step is not finite, and is not skipped.
        """
        waiting, self.waiting = self.waiting, []
        for (number, place, _), (loss, norm) in zip(waiting, read([numbers for _, _, numbers in waiting]), strict=True):
            if math.isfinite(loss) and math.isfinite(norm):
                if (usual := self.spikes.usual(loss)) is not None:
                    self.counts["spikes"] += 1
                    write(run, number, place, what="spike", loss=loss, usual=usual)
                continue
            self.counts["not_finite"] += 1
            write(run, number, place, what="not finite", loss=str(loss), grad_norm=str(norm))
            said = f"step {number}: the loss is {loss}, the gradients' norm {norm}; bad_batches.jsonl in {run.folder} names its samples."
            if self.config.action != "skip" or self.counts["acted"] == self.config.limit:
                raise NotFinite(said + self.so_far(), place)
            self.counts["acted"] += 1
            logger.warning("%s It is skipped.", said)

    def so_far(self) -> str:
        """Why a run ends that may skip or go back."""
        done = {"skip": "skipped a step", "rollback": "gone back"}.get(self.config.action)
        return f" The run has {done} {self.counts['acted']} times; plugins.nan-guard.limit is {self.config.limit}." if done else ""

    @hookimpl
    def recover(self, run: Run, error: Exception) -> bool | None:
        if not isinstance(error, NotFinite) or self.config.action != "rollback" or self.counts["acted"] == self.config.limit:
            return None
        from fastloop.checkpoint import resume

        logger.warning("%s", error)
        counts = self.counts
        if not resume.go_back(run, leave_out=error.place):
            return None
        self.counts = counts | {"acted": counts["acted"] + 1}
        self.waiting.clear()
        return True

    @hookimpl
    def write_summary(self, summary: dict[str, Any]) -> None:
        summary["nan-guard"] = self.counts
