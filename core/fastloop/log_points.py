"""Log points: every ``train.log_every`` steps, the core adds its values to the plugins' and calls ``log_scalars``.

``scalars.CORE_NAMES`` lists the values of the core. ``after_step`` measures them, except for ``train/grad_norm``: the
loop sets it, in ``loop.apply_gradients`` and ``loop.count_update``, before the optimizer steps. Plugins add theirs by
``Run.log``; ``scalars`` keeps and reduces them. ``loop.evaluate`` logs the metrics of an evaluation.

On the CPU a log point is logged in its own step. On an accelerator, the host would have to wait until the device has
computed the losses. So the log point copies them to the host, and they are logged at the next log point, when they have
long arrived:

    steps          1 ... 10         11 ... 20                 21 ... 25, end of the epoch
    logged         -                values of step 10         values of step 20

A pending log point is also logged before an evaluation, a save, the end of an epoch and an error. So lines stay in
order, a checkpoint follows the lines of all its log points, and no line is lost. With a plugin that declares
``waits_for_scalars``, the host waits, and each log point is logged in its own step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from fastloop.problem import Problem, typed_clause
from fastloop.runtime.memory import memory_held
from fastloop.scalars import CORE_NAMES, LoggedValues, LogMark

if TYPE_CHECKING:
    from fastloop.distributed.processes import Processes
    from fastloop.run import Run

log = logging.getLogger("fastloop")

PATIENCE = 10.0
"""Seconds that a failed run waits for a pending log point. The device may never come that far."""


class LogPoint:
    """The values of a log point, which may still be on their way from the device.

    Args:
        step: The number of its step.
        values: The losses, and the values of plugins, since the log point before.
        measured: Further values of the core: those that the host measures.
    """

    def __init__(self, step: int, values: LoggedValues, measured: Mapping[str, float]) -> None:
        self.step = step
        self.values = values
        self.measured = measured

    def read(self, processes: Processes) -> dict[str, float]:
        """The values for ``log_scalars``: those of the core first. Every process must call it.

        Raises:
            PluginError: Processes logged different names or reductions; raised on every process.
        """
        return self._ordered(self.values.reduce(processes))

    def read_alone(self) -> dict[str, float]:
        """As ``read``, without the values that other processes contribute to. They may have failed."""
        values, missing = self.values.reduce_alone()
        if missing:
            names = ", ".join(missing)
            log.warning(
                Problem(
                    f"values of all processes are not logged, because the run failed: {names}.",
                    code="values-not-logged",
                    place=f"step {self.step}",
                )
            )
        return self._ordered(values)

    def _ordered(self, values: dict[str, float]) -> dict[str, float]:
        """All values, those of the core first."""
        unordered = {**values, **self.measured}
        ordered = {}
        for name in CORE_NAMES:
            if name in unordered:
                ordered[name] = unordered[name]
        ordered.update(unordered)  # adds the values of plugins behind those of the core
        return ordered


def start(run: Run) -> None:
    """Measure the speed from now on."""
    run.scalars.mark = read_mark(run)


def read_mark(run: Run) -> LogMark:
    """The training done so far."""
    return LogMark(run.clock.read("train"), run.state.samples, run.state.tokens)


def after_step(run: Run, loss: Tensor) -> None:
    """Keep a step's loss. At a log point, log the values since the last one; on an accelerator, begin to copy them, and
    log the log point before. Every process must call it."""
    scalars = run.scalars
    if not scalars.enabled:
        return
    if run.processes.is_main:
        scalars.values.setdefault("train/loss", []).append(loss)
    if run.state.step % run.recipe.train.log_every != 0:
        return
    log_pending(run)
    before = scalars.mark
    now = read_mark(run)
    scalars.mark = now
    elapsed = max(now.seconds - before.seconds, 1e-9)
    first_group = run.optimizer.param_groups[0]  # that of parameters without arguments of their own
    if run.processes.is_main and "lr" in first_group:  # a user may call the rate otherwise
        lr = first_group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.to(run.device, non_blocking=True)
        scalars.values["train/lr"] = [lr]
    measured = {
        "train/samples_per_second": (now.samples - before.samples) / elapsed,
        "train/tokens_per_second": (now.tokens - before.tokens) / elapsed,
        "train/memory_bytes": memory_held(run.device),
    }
    run._pending_log_point = LogPoint(run.state.step, scalars.take(), measured)
    if run.device.type == "cpu" or scalars.needed_at_once:
        log_pending(run)


def log_pending(run: Run) -> None:
    """Log the log point whose values were left to arrive, if any. Every process must call it."""
    pending = run._pending_log_point
    run._pending_log_point = None
    if pending is not None:
        emit(run, pending.read(run.processes), pending.step)


def log_after_error(run: Run) -> None:
    """Log the pending log point of a run that failed. Other processes need not call it.

    A problem with it is only logged: the error of the run is the one to report.
    """
    pending = run._pending_log_point
    run._pending_log_point = None
    if pending is None:
        return
    failure = run.plugins.manager.failure
    try:
        if not pending.values.arrive_within(PATIENCE):
            log.warning(
                Problem(
                    f"the values of step {pending.step} are not logged: the device has not computed them.",
                    code="values-not-logged",
                )
            )
        elif run.world_size == 1:
            emit(run, pending.read(run.processes), pending.step)
        else:
            emit(run, pending.read_alone(), pending.step)
    except Exception as error:
        log.warning(
            Problem(
                f"the values of step {pending.step} are not logged: {typed_clause(error)}.",
                code="values-not-logged",
            )
        )
        run.plugins.manager.failure = failure  # the plugin that failed the run


def emit(run: Run, values: Mapping[str, float], step: int) -> None:
    """Call ``log_scalars`` on the main process."""
    if run.is_main:
        run.hooks.log_scalars(run=run, scalars=values, step=step)


def flush(run: Run) -> None:
    """Log the values of plugins since the last log point, at the end of a run. Every process must call it."""
    log_pending(run)
    for name in CORE_NAMES:
        run.scalars.values.pop(name, None)
    values = run.scalars.take().reduce(run.processes)
    if values:
        emit(run, values, run.state.step)
