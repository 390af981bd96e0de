"""The loop. There is one, for every plugin and strategy.

for each epoch:
    for the micro-batches of each step:
        for each micro-batch:
            compute the loss, scale it to its share of the step, backward
        clip, step the optimizer, step the scheduler
        evaluate and save when due
    evaluate and save when due

A signal that asks the run to end counts at a step's end, and within an evaluation, which is then done again by the run that goes on.
Where training or an evaluation raises and a plugin recovers from it, training goes on from the run's counters, an evaluation begins again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from fastloop.checkpoint import resume
from fastloop.checks import metrics as metric_checks
from fastloop.evaluation import EvaluationResults, evaluating
from fastloop.runtime.random_states import preserve_random_states, random_states, restore_random_states
from fastloop.runtime.regions import region
from fastloop.state import Batch

if TYPE_CHECKING:
    from fastloop.run import Run

log = logging.getLogger("fastloop")
T = TypeVar("T")

POLL_EVERY = 8
"""Batches of an evaluation between two exchanges of requests, with several processes."""


class EvaluationInterrupted(Exception):
    """A signal asked the run to end during an evaluation."""


def fit(run: Run) -> None:
    """Train until the epochs or ``max_steps`` are done, or a plugin asks to stop; then evaluate what is not yet evaluated."""
    with preserve_random_states(run.resume_point is not None):
        run.hooks.before_fit(run=run)
    with run.clock("startup"):
        metric_checks.check(run)
    with run.clock("train"):
        if run.schedule.evaluation_due():  # an interrupted run was saved before it
            evaluate(run, "validation")
        recovering(run, lambda: train(run))
    if run.schedule.needs_evaluation():
        evaluate(run, "validation")
    if run.interrupted and run.state.save_requested:  # the signal came in that evaluation
        resume.save(run)
    run.signals.finish()  # from here on there is nothing to save: a signal lets the run end
    resume.wait_for_save(run)
    run.sync_requests()
    if run.interrupted:
        return
    run.hooks.after_fit(run=run)


def train(run: Run) -> None:
    """Train the remaining epochs, from the run's counters on."""
    state, hooks, schedule = run.state, run.hooks, run.schedule
    while state.epoch < run.recipe.train.epochs and not schedule.should_stop():
        with preserve_random_states(state.epoch_samples > 0):
            hooks.before_epoch(run=run)
        for batches in run.to_device(run.train_loader.steps(state.epoch, state.epoch_samples)):
            if run.should_skip_step(batches):
                state.skip_samples(run.totals(batches))
                continue
            loss = train_step(run, batches)
            hooks.after_step(run=run, loss=loss)
            run.sync_requests()
            if schedule.evaluation_due():
                evaluate(run, "validation")
            if schedule.save_due():
                resume.save(run)
            if schedule.should_stop():
                break
        if run.interrupted or not schedule.is_epoch_done():
            break
        state.epoch, state.epoch_samples = state.epoch + 1, 0
        hooks.after_epoch(run=run)
        if schedule.evaluation_due(epoch_ended=True):
            evaluate(run, "validation")
        if schedule.save_due(epoch_ended=True):
            resume.save(run)


def recovering(run: Run, part: Callable[[], T], split: str | None = None) -> T:
    """Do a part of the run, again when a plugin has recovered from what it raised. ``split``: what is evaluated; None: training."""
    while True:
        try:
            return part()
        except Exception as error:
            if not run.hooks.recover(run=run, error=error, split=split):
                raise
        run.optimizer.zero_grad()  # of the step that failed


def train_step(run: Run, batches: list[Batch]) -> Tensor:
    """One optimizer step over its micro-batches, which are on the device.

    Each micro-batch's mean loss counts by its weight (samples, or target tokens), so the step's gradient is that of the mean over the
    whole step, however it was split.

    Returns:
        The step's mean loss over all processes: 0-dim, detached, on the device.
    """
    hooks, optimizer = run.hooks, run.optimizer
    hooks.before_step(run=run, batches=batches)
    totals = run.totals(batches)
    total = (totals.weight or 1) / run.world_size  # gradients are averaged over processes, whose shares may differ
    step_loss: Tensor | None = None
    for index, batch in enumerate(batches):
        with run.gradient_sync(last=index == len(batches) - 1):
            with region("loss"):
                output = hooks.compute_loss(run=run, model=run.model, batch=batch.inputs)
                loss = output.loss if batch.loss_weight == total else output.loss * (batch.loss_weight / total)
            with region("backward"):
                hooks.backward(run=run, loss=loss)
        step_loss = loss.detach() if step_loss is None else step_loss + loss.detach()
    assert step_loss is not None
    step_loss = run.processes.all_reduce_mean(step_loss)
    hooks.after_backward(run=run, loss=step_loss)
    with run.clipped_gradients() as grad_norm:
        hooks.before_optimizer_step(run=run, grad_norm=grad_norm)
    run.update_check.before_step()
    with region("optimizer"):
        optimizer.step()
        if run.scheduler is not None and not run.step_was_skipped():
            run.scheduler.step()
        optimizer.zero_grad()
    run.update_check.after_step(run.step_was_skipped)
    run.state.count_step(totals)
    return step_loss


def evaluate(run: Run, split: str) -> None:
    """Evaluate a split with all that plugins wrap around it. Cut off by a signal, it is due again, and drew no random numbers."""
    with run.clock("evaluate"), region("evaluate"):
        if split == "validation":
            run.state.evaluate_requested = False
        states = random_states()
        run.hooks.before_evaluate(run=run, split=split)
        try:
            metrics: dict[str, float] = recovering(run, lambda: run.hooks.evaluate(run=run, split=split), split)
        except EvaluationInterrupted:
            restore_random_states(states)
            run.state.request_evaluate()
            return
        run.state.metrics[split] = metrics
        if split == "validation":
            run.state.evaluated_at = run.state.step
        run.hooks.after_evaluate(run=run, split=split, metrics=metrics)
        run.sync_requests()
        log.info("step %d, %s: %s", run.state.step, split, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


@torch.no_grad()
def evaluation_loop(run: Run, split: str) -> dict[str, float]:
    """Mean loss and the task's metrics over every sample of a split, each once, over all processes.

    No batch waits for the one before: the device is read after the last.

    Raises:
        EvaluationInterrupted: The run was asked to end meanwhile, on every process.
    """
    results, loader = EvaluationResults(run.metrics, partial(metric_checks.check_number, run, split)), run.eval_loaders[split]
    output = None
    with evaluating(run.model):
        for number, (batch,) in enumerate(run.to_device([batch] for batch in loader.batches())):
            if run.world_size == 1 or (number % POLL_EVERY == 0 and loader.in_step):
                run.sync_requests()
                if run.interrupted:
                    raise EvaluationInterrupted
            with region("loss"):
                output = run.hooks.compute_loss(run=run, model=run.model, batch=batch.inputs)
            with metric_checks.explained(run, split, output):
                results.add(output, batch.loss_weight, batch.samples)
        with metric_checks.explained(run, split, output):
            *sums, metrics = results.read()
    total, weight = run.processes.all_reduce_sum(torch.tensor(sums, dtype=torch.float64)).tolist()
    return {"loss": total / weight if weight else float("nan"), **metrics}
