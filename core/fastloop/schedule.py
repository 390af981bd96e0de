"""When a run logs, evaluates, saves and stops, by steps and epochs.

Methods change nothing: the caller that handles a request clears it.

Processes must decide alike, so nothing here reads a clock or a file. A plugin that does calls ``State.request_stop``,
``request_evaluate`` or ``request_save`` in a hook. ``Run._sync_requests`` shares these requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastloop.splits import VALIDATION
from fastloop.state import INTERRUPTED, State

if TYPE_CHECKING:
    from fastloop.recipe import Train


def run_length(steps_per_epoch: int | None, epochs: int | None, max_steps: int | None) -> int | None:
    """Optimizer steps of a whole run: the lower one of its limits.

    Args:
        steps_per_epoch: Optimizer steps of an epoch; None: unknown.
        epochs: The limit on epochs; None: there is none.
        max_steps: The limit on steps; None: there is none.

    Returns:
        The steps; None: unknown.
    """
    limits = []
    if max_steps is not None:
        limits.append(max_steps)
    if steps_per_epoch is not None and epochs is not None:
        limits.append(steps_per_epoch * epochs)
    return min(limits, default=None)


class Schedule:
    """The schedule of a run, from the recipe's ``train`` and the run's counters.

    Attributes:
        total_steps: Optimizer steps of the whole run; None: unknown.
        epochs: Epochs that the run begins; None: unknown.
        samples_per_epoch: Samples of an epoch; None: unknown, an epoch ends with the loader.
    """

    def __init__(
        self,
        train: Train,
        state: State,
        steps_per_epoch: int | None,
        samples_per_epoch: int | None,
        eval_loaders: Mapping[str, Any],
    ) -> None:
        self._train = train
        self._state = state
        self._periods: list[int] = []
        for steps in (train.max_steps, train.evaluate_every, train.save_every):
            if isinstance(steps, int):  # not "epoch"
                self._periods.append(steps)
        self.total_steps: int | None = run_length(steps_per_epoch, train.epochs, train.max_steps)
        self.samples_per_epoch = samples_per_epoch
        self._eval_loaders = eval_loaders
        self.epochs: int | None = train.epochs
        if train.epochs is None and train.max_steps is not None and steps_per_epoch is not None:
            self.epochs = math.ceil(train.max_steps / steps_per_epoch)

    @property
    def interrupted(self) -> str | None:
        """Name of the signal that stopped the run, such as ``SIGTERM``, or None. An interrupted run does not evaluate
        or export."""
        reason = self._state.stop_reason
        if reason is None or not reason.startswith(INTERRUPTED):
            return None
        return reason.rpartition(" ")[2]  # of "interrupted by SIGTERM"

    def _may_be_due(self) -> bool:
        """Whether ``evaluation_due``, ``save_due`` or ``should_stop`` may be true after this step. Most steps ask only
        this."""
        state = self._state
        if state.evaluate_requested or state.save_requested or state.stop_reason is not None:
            return True
        # at step 6, a period of 3 steps ends, and one of 4 steps does not
        return any(state.step % steps == 0 for steps in self._periods)

    def are_epochs_done(self) -> bool:
        """Whether all of ``train.epochs`` are done. Without a limit on epochs, only ``should_stop`` ends the run."""
        return self._train.epochs is not None and self._state.epoch >= self._train.epochs

    def should_stop(self) -> bool:
        """Whether training ends after this step."""
        limit = self._train.max_steps
        return self._state.stop_reason is not None or (limit is not None and self._state.step >= limit)

    def is_epoch_done(self) -> bool:
        """Whether every sample of the current epoch was drawn.

        If the data has no known length, only the end of the loader shows it. So call this after the loop over the
        loader, which ends with the data or by ``should_stop``. In the second case the epoch counts as incomplete.
        """
        if self.samples_per_epoch is None:
            return not self.should_stop()
        return self._state.epoch_samples >= self.samples_per_epoch

    def needs_evaluation(self) -> bool:
        """Whether the current weights can be evaluated and are not yet."""
        if VALIDATION not in self._eval_loaders or self.interrupted:
            return False
        return self._state.evaluated_at != self._state.step

    def evaluation_due(self, epoch_ended: bool = False) -> bool:
        """Whether to evaluate now."""
        every = self._train.evaluate_every
        if self._state.evaluate_requested:
            is_due = True
        elif every == "epoch":
            is_due = epoch_ended
        else:
            is_due = every is not None and self._state.step > 0 and self._state.step % every == 0
        return is_due and self.needs_evaluation()

    def save_due(self, epoch_ended: bool = False) -> bool:
        """Whether to save now. At the end of an epoch, the loop asks twice: after the last step, and with
        ``epoch_ended`` after the evaluation of the epoch, so that a checkpoint of the epoch has its metrics.

        With ``save_every: 4`` and epochs of 10 steps, the first call saves steps 4, 8, 12, ... With ``save_every:
        epoch``, the second call saves steps 10, 20, ... It also saves the last step of a run that ends with an epoch.
        """
        state = self._state
        every = self._train.save_every
        if state.save_requested:
            return True
        if every is None:
            return False
        if epoch_ended:
            return every == "epoch" or self.should_stop() or self.are_epochs_done()
        is_period_end = isinstance(every, int) and state.step % every == 0
        if is_period_end:
            return True
        # a run that stops saves its last step: here in the middle of an epoch, at its end with epoch_ended
        return self.should_stop() and not self.is_epoch_done()
