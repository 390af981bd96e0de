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

from fastloop import checkpoint
from fastloop.checkpoint import resume
from fastloop.checks import metrics as scoring
from fastloop.results import Results
from fastloop.runtime.regions import region
from fastloop.state import Batch

if TYPE_CHECKING:
    from fastloop.run import Run

log = logging.getLogger("fastloop")
T = TypeVar("T")

LOOK = 8
"""Batches of an evaluation between two looks, on several processes, at whether one of them was asked to end."""


class CutOff(Exception):
    """The run is asked to end, and an evaluation with it."""


def fit(run: Run) -> None:
    """Train until the epochs or ``max_steps`` are done, or a plugin asks to stop; then evaluate what is not yet evaluated."""
    with resume.same_random_states(run.found is not None):
        run.hooks.before_fit(run=run)
    with run.clock("startup"):
        scoring.check(run)
    with run.clock("train"):
        if run.evaluation_due():  # an interrupted run was saved before it
            evaluate(run, "evaluate")
        recovering(run, lambda: train(run))
    if not run.interrupted and run.state.evaluated_at != run.state.step and "evaluate" in run.eval_loaders:
        evaluate(run, "evaluate")
    if run.interrupted and run.state.save_requested:  # the signal came in that evaluation
        resume.save(run)
    run.trained = True  # from here on there is nothing to go on with: a signal lets the run end
    resume.wait_for_writing(run)
    run.agree()
    if run.interrupted:
        return
    run.hooks.after_fit(run=run)


def train(run: Run) -> None:
    """The epochs that are left, from where the run's counters stand."""
    state, hooks = run.state, run.hooks
    while state.epoch < run.recipe.train.epochs and not run.stopping():
        with resume.same_random_states(state.epoch_samples > 0):
            hooks.before_epoch(run=run)
        for batches in run.placed(run.train_loader.steps(state.epoch, state.epoch_samples)):
            if run.leaves_out(batches):
                continue
            loss = train_step(run, batches)
            hooks.after_step(run=run, loss=loss)
            run.agree()
            if run.evaluation_due():
                evaluate(run, "evaluate")
            if run.saving_due():
                resume.save(run)
            if run.stopping():
                break
        if run.interrupted or not run.epoch_done():
            break
        state.epoch, state.epoch_samples = state.epoch + 1, 0
        hooks.after_epoch(run=run)
        if run.evaluation_due(epoch_ended=True):
            evaluate(run, "evaluate")
        if run.saving_due(epoch_ended=True):
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
                loss = output.loss if batch.weight == total else output.loss * (batch.weight / total)
            with region("backward"):
                hooks.backward(run=run, loss=loss)
        step_loss = loss.detach() if step_loss is None else step_loss + loss.detach()
    assert step_loss is not None
    step_loss = run.mean_over_processes(step_loss)
    hooks.after_backward(run=run, loss=step_loss)
    grad_norm, max_norm = None, run.recipe.train.clip_norm
    if max_norm is not None:
        with region("clip"):
            grad_norm = hooks.clip_gradients(run=run, max_norm=max_norm)
    hooks.before_optimizer_step(run=run, grad_norm=grad_norm)
    if run.update_check is not None:
        run.update_check.before_step(run)
    with region("optimizer"):
        optimizer.step()
        if run.scheduler is not None and not run.step_was_skipped():
            run.scheduler.step()
        optimizer.zero_grad()
    if run.update_check is not None:
        run.update_check.after_step(run)
    run.count(totals)
    return step_loss


def evaluate(run: Run, split: str) -> None:
    """Evaluate a split with all that plugins wrap around it. Cut off by a signal, it is due again, and drew no random numbers."""
    with run.clock("evaluate"), region("evaluate"):
        random_states = checkpoint.random_states()
        run.hooks.before_evaluate(run=run, split=split)
        try:
            metrics: dict[str, float] = recovering(run, lambda: run.hooks.evaluate(run=run, split=split), split)
        except CutOff:
            checkpoint.restore_random_states(random_states)
            run.state.request_evaluate()
            return
        run.state.metrics[split] = metrics
        if split == "evaluate":
            run.state.evaluated_at = run.state.step
        run.hooks.after_evaluate(run=run, split=split, metrics=metrics)
        run.agree()
        log.info("step %d, %s: %s", run.state.step, split, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


@torch.no_grad()
def evaluation_loop(run: Run, split: str) -> dict[str, float]:
    """Mean loss and the task's metrics over every sample of a split, each once, over all processes.

    No batch waits for the one before: the device is read after the last.

    Raises:
        CutOff: The run was asked to end meanwhile, on every process.
    """
    modes = [(module, module.training) for module in run.model.modules()]
    run.model.eval()
    results, loader = Results(run.metrics, partial(scoring.check_number, run, split)), run.eval_loaders[split]
    output = None
    try:
        for number, (batch,) in enumerate(run.placed([batch] for batch in loader.batches())):
            if run.world_size == 1 or (number % LOOK == 0 and loader.in_step):
                run.agree()
                if run.interrupted:
                    raise CutOff
            with region("loss"):
                output = run.hooks.compute_loss(run=run, model=run.model, batch=batch.inputs)
            with scoring.explained(run, split, output):
                results.add(output, batch.weight, batch.samples)
        with scoring.explained(run, split, output):
            *sums, metrics = results.read()
    finally:
        for module, training in modes:
            module.training = training
    total, weight = run.sum_over_processes(torch.tensor(sums, dtype=torch.float64)).tolist()
    return {"loss": total / weight if weight else float("nan"), **metrics}
