"""A worker of a search: trains one trial after another, until the study has as many as it needs."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Sequence

import optuna
import typer
from optuna.trial import FrozenTrial, TrialState

from fastloop.problem import agree, counted, counted_of
from fastloop_tools.sweep.space import Axis
from fastloop_tools.sweep.study import (
    ERROR,
    RUNS,
    SURPLUS,
    WORKER,
    fail_lost_trials,
    is_counted,
    read_trials,
    trial_name,
)
from fastloop_tools.trials.runs import SweepSettings, TrialRun, stop

POLL_SECONDS = 1.0
"""Seconds between two looks at the trials of other workers, at the end of a search."""


class TrialFailed(Exception):
    """A run of the trial failed, or its value is not finite; or the search needs no more trials."""


@dataclasses.dataclass(frozen=True)
class Worker:
    """A worker of a search.

    Args:
        seeds: Seeds that each trial trains with; ``[None]``: the recipe's. A trial's value is its mean over them.
        count: Trials of the search, over all workers.
        after_trial: Called when a trial has ended.
    """

    study: optuna.Study
    axes: Sequence[Axis]
    seeds: Sequence[int | None]
    count: int
    settings: SweepSettings
    after_trial: Callable[[], None]

    def work(self) -> None:
        """Train trials until the study has as many as it needs. Then wait for the running trials of other workers, and
        replace lost ones."""
        self._report_earlier_trials()
        waits = False
        while True:
            trials = self._counted_trials()
            running = sum(trial.state == TrialState.RUNNING for trial in trials)
            if len(trials) < self.count:
                waits = False
                self.study.optimize(self.run_trial, n_trials=1, catch=(TrialFailed,))
                self.after_trial()
            elif running:
                if not waits:
                    typer.echo(f"waiting for {counted(running, 'running trial')} of other workers")
                waits = True
                time.sleep(POLL_SECONDS)
            else:
                return

    def _counted_trials(self) -> list[FrozenTrial]:
        """The trials of the study that count. Marks those of lost workers as failed first, so that they do not."""
        fail_lost_trials(self.study)
        return [trial for trial in read_trials(self.study) if is_counted(trial)]

    def _report_earlier_trials(self) -> None:
        """Print how many trials are done and how many remain, if the study has some of an earlier start or of other
        workers."""
        trials = self._counted_trials()
        if not read_trials(self.study):
            return
        running = sum(trial.state == TrialState.RUNNING for trial in trials)
        done = len(trials) - running
        remaining = max(self.count - len(trials), 0)
        line = f"The study goes on: {counted(done, 'trial')} {agree(done, 'is', 'are')} done"
        if running:
            line += f", {running} {agree(running, 'is', 'are')} running"
        left = counted_of(remaining, self.count, "trials")
        typer.echo(f"{line}, {left} {agree(remaining, 'remains', 'remain')}.")

    def run_trial(self, trial: optuna.Trial) -> float:
        """Train a trial with all seeds. Returns its value.

        Raises:
            TrialFailed: A run failed, its value is not finite, or other workers have begun the last trials meanwhile.
            typer.Exit: A signal stopped a run.
        """
        earlier = [other for other in read_trials(self.study) if other.number < trial.number]
        counted_before = sum(map(is_counted, earlier))
        if counted_before >= self.count:
            trial.set_user_attr(SURPLUS, True)
            raise TrialFailed
        trial.set_user_attr(WORKER, f"{socket.gethostname()}, process {os.getpid()}")
        values = {axis.key: axis.suggest(trial) for axis in self.axes}
        name = trial_name(trial.number)
        shown = " ".join(f"{key}={value}" for key, value in values.items())
        # from 1, without lost trials: the folder trial-0003 may have the third trial that counts
        typer.echo(f"trial {counted_before + 1} of {self.count}, in {name}: {shown}")
        for other in earlier:
            if other.state == TrialState.COMPLETE and other.params == trial.params:
                typer.echo(f"  the same as {trial_name(other.number)}: not trained again")
                trial.set_user_attr(RUNS, other.user_attrs[RUNS])
                return float(other.values[0])
        runs = [TrialRun(name if seed is None else f"{name}_seed-{seed}", values, seed) for seed in self.seeds]
        values_of_seeds = [self._run(trial, run, runs) for run in runs]
        return sum(values_of_seeds) / len(values_of_seeds)

    def _run(self, trial: optuna.Trial, run: TrialRun, runs: list[TrialRun]) -> float:
        """Train one run of a trial. Returns its value of the monitored metric.

        Args:
            runs: All runs of the trial, which the study records.

        Raises:
            TrialFailed: The run failed, or its value is not finite.
            typer.Exit: A signal stopped the run.
        """
        code = self.settings.train(run)
        self.settings.check_metric(run)
        trial.set_user_attr(RUNS, [dataclasses.asdict(run) for run in runs])
        if run.status == "stopped":
            typer.echo(
                f"The search was stopped in {trial_name(trial.number)}. Repeat the command to continue; another trial "
                "replaces this one."
            )
            raise stop(code)
        if run.status == "failed":
            trial.set_user_attr(ERROR, run.reason)
            raise TrialFailed(run.reason)
        assert run.metrics is not None
        return run.metrics[self.settings.monitor]
