"""The training loop, for every plugin and strategy.

before_fit
evaluate when before_fit requests it, or the run resumes from an interrupted evaluation
for each epoch:
    for the micro-batches of each step:                 # take_step
        for each micro-batch:                           # accumulate_gradients
            compute the loss, scale it to its share of the step, backward
        clip, step the optimizer                        # apply_gradients
        step the scheduler, count the step
        log, evaluate and save when due
    evaluate and save when due
evaluate the final weights, unless they are evaluated
after_fit

A stop signal takes effect before the first step, at the end of a step or within an evaluation. The resumed run repeats
that evaluation.
If training or an evaluation raises and a plugin recovers, training continues from the run's counters, or the evaluation
starts again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fastloop import log_points
from fastloop.checkpoint import frozen, saving
from fastloop.data.equal_steps import equal_steps
from fastloop.distributed import compared_facts
from fastloop.errors import DataError, PluginError
from fastloop.evaluation_results import EvaluationResults, evaluating, keeping_casts
from fastloop.plugins.plugin import hookimpl
from fastloop.problem import Problem, counted
from fastloop.runtime.random_states import preserve_random_states
from fastloop.runtime.regions import NO_CONTEXT, region
from fastloop.splits import TRAIN, VALIDATION, name_metrics
from fastloop.state import Batch

if TYPE_CHECKING:
    from fastloop.data import Loader
    from fastloop.run import Run

log = logging.getLogger("fastloop")
T = TypeVar("T")

POLL_EVERY = 8
"""Evaluation batches between two calls of ``run._sync_requests``, with several processes."""


class EvaluationInterrupted(Exception):
    """A signal stopped the run during an evaluation."""


def fit(run: Run) -> None:
    """Train until the epochs or ``max_steps`` are done, or a plugin requests a stop. Then evaluate the final
    weights."""
    with preserve_random_states():  # a resumed run calls it again, and imports may draw random numbers
        run.hooks.before_fit(run=run)
        frozen.undo_changes(run, "before_fit")
    run._sync_requests()  # those of before_fit
    log_points.start(run)
    if run.world_size > 1:  # in the first steps, the processes compare what they read, and then how weights changed
        run.steps_to_compare = compared_facts.STEPS
        run._weights_before = compared_facts.sample_weights(run)
    with run.clock("train"):
        if run.schedule.evaluation_due():  # before_fit requested it, or the run resumes from an interrupted one
            evaluate(run, VALIDATION)
        retry_after_recovery(run, lambda: train(run))
    if run.steps_to_compare > 0:  # training ended before that many steps
        _check_weights(run)
    if run.schedule.needs_evaluation():
        evaluate(run, VALIDATION)
    if run.interrupted and run.state.save_requested:  # by a signal during that evaluation
        saving.save(run)
    run.signals.finishing = True  # nothing is left to save: from here on, a signal lets the run end
    saving.wait_for_save(run)
    run._sync_requests()
    if run.interrupted:
        return
    if run.state.stop_reason is not None:
        reason = run.state.stop_reason
        log.info("stopped at step %d: %s", run.state.step, reason, extra={"stop_reason": reason})
    run._shared_buffers.share()
    run.hooks.after_fit(run=run)
    limit = run.recipe.train.max_steps
    if limit is not None and run.state.step < limit and run.state.stop_reason is None:
        log.warning(
            Problem(
                f"train.epochs = {run.recipe.train.epochs} ended after {counted(run.state.step, 'step')}, before "
                f"train.max_steps = {limit}.",
                code="too-few-steps",
                place=run.recipe.where,
                remedy="To train that many, remove train.epochs or raise it.",
            )
        )


def train(run: Run) -> None:
    """Train the remaining epochs, starting at the run's counters.

    Raises:
        DataError: An epoch gave no sample.
    """
    state = run.state
    hooks = run.hooks
    schedule = run.schedule
    while not schedule.are_epochs_done() and not schedule.should_stop():
        with preserve_random_states(state.epoch_samples > 0):
            hooks.before_epoch(run=run)
        if state.epoch_samples > 0:  # it fires again within an epoch
            frozen.undo_changes(run, "before_epoch")
        run._frozen = None
        for batches in run._steps(run.train_loader, state.epoch, state.epoch_samples):
            if state.left_out and state._is_step_left_out():
                totals = run._start_totals(batches).get()
                state.skip_samples(totals)
                if totals.unreadable:
                    count_unreadable(run, batches)
                continue
            loss = take_step(run, batches)
            if run.steps_to_compare > 0:
                compared_facts.check_step(run, batches)
            hooks.after_step(run=run, loss=loss)
            if run.steps_to_compare > 0:
                run.steps_to_compare -= 1
                # Weights are compared after the last of these steps: DDP names unused parameters in its second step.
                # The hooks of the step come before, because one may average the weights of the processes.
                if run.steps_to_compare == 0:
                    _check_weights(run)
            log_points.after_step(run, loss)
            run._sync_requests()
            if not schedule._may_be_due():
                continue
            if schedule.evaluation_due():
                evaluate(run, VALIDATION)
            if schedule.save_due():
                saving.save(run)
            if schedule.should_stop():
                break
        log_points.log_pending(run)
        if run.interrupted or not schedule.is_epoch_done():
            break
        if state.epoch_samples == 0:
            raise no_sample(run, TRAIN)
        run.train_loader.check_length(state.epoch_samples)
        state.epoch += 1
        state.epoch_samples = 0
        hooks.after_epoch(run=run)
        if schedule.evaluation_due(epoch_ended=True):
            evaluate(run, VALIDATION)
        if schedule.save_due(epoch_ended=True):
            saving.save(run)


def _check_weights(run: Run) -> None:
    compared_facts.check_weights(run, run._weights_before)
    run._weights_before = {}
    run.steps_to_compare = 0


def retry_after_recovery(run: Run, function: Callable[[], T], split: str | None = None) -> T:
    """Call ``function``, and call it again after a plugin recovered from its error. ``split``: the split to evaluate;
    None: training."""
    while True:
        try:
            return function()
        except Exception as error:
            log_points.log_after_error(run)
            if not run.hooks.recover(run=run, error=error, split=split):
                raise
        run.optimizer.zero_grad()  # drop the gradients of the failed step
        run._gradients_are_final = False
        run._unstepped_parameters.clear_gradients(run.state.step + 1)


def take_step(run: Run, batches: list[Batch]) -> Tensor:
    """Do one step over its micro-batches, which are on the device: by the ``train_step`` hook, then the scheduler and
    the counters.

    Returns:
        The step's mean loss over all processes: 0-dim, detached, on the device.
    """
    if run._unstepped_parameters.has_kept_gradients:  # of the step before
        run._unstepped_parameters.clear_kept_gradients()
    run.hooks.before_step(run=run, batches=batches)
    totals = run._start_totals(batches)  # exchanged between processes during the first forward pass
    run.updates = 0
    run._skipped_steps.skipped = []
    number = run.state.step + 1  # with log_every 10, step 10 is a log point: state.step is 9 until count_step
    run._is_log_point = run.scalars.enabled and number % run.recipe.train.log_every == 0
    loss = run.hooks.train_step(run=run, batches=batches)
    if run.scheduler is not None and not run.step_was_skipped():
        with region("optimizer"):
            run.scheduler.step()
    step_totals = totals.get()
    run.state.count_step(step_totals)
    if step_totals.unreadable:
        count_unreadable(run, batches)
    return loss


def count_unreadable(run: Run, batches: list[Batch]) -> None:
    """Count the samples of a step that could not be read. Every process must call it if one of them has such a
    sample."""
    ids: list[int] = []
    for batch in batches:
        ids += [int(index) for index, _ in batch.unreadable]
    for ids_of_process in run.loaders.processes.all_gather_object(ids):
        run.state.count_unreadable(ids_of_process)


@hookimpl(trylast=True)
def train_step(run: Run, batches: list[Batch]) -> Tensor:
    """Accumulate the gradients of the micro-batches, and change the weights by them."""
    loss = accumulate_gradients(run, batches)
    apply_gradients(run, loss)
    return loss


def accumulate_gradients(run: Run, batches: list[Batch]) -> Tensor:
    """Forward and backward of each micro-batch; see ``Run.accumulate_gradients``.

    ``StepSampler.steps`` in ``data/sampler.py`` decides how many micro-batches a step has, for a map-style dataset. For
    an iterable one, ``Loader.steps`` counts them.

    Processes that hold different samples average their gradients, and that mean must be the gradient of the step's mean
    loss. Two processes, with two micro-batches each, of these numbers of targets::

        process 0    2, 3        process 1    4, 3        12 targets, a mean of 6 for each process

    The losses of process 0 count by 2/6 and 3/6, and those of process 1 by 4/6 and 3/6. The mean over both processes
    counts them by 2/12, 3/12, 4/12 and 3/12.
    """
    if run._unstepped_parameters.has_kept_gradients:  # of an earlier update of this step
        run._unstepped_parameters.clear_kept_gradients()
    totals = run._totals_of(batches)
    run._shared_buffers.before_pass()
    world_size = run.processes.world_size
    # world_size counts all processes, and sample_shares those that read different samples. With 4 processes, of which
    # each 2 divide a model and train on the same samples, there are 2 shares.
    sample_shares = run.loaders.processes.world_size
    step_loss: Tensor | None = None
    for index, batch in enumerate(batches):
        reduces_gradients = index == len(batches) - 1  # once a step
        context: AbstractContextManager[Any] = NO_CONTEXT
        if world_size > 1 and not reduces_gradients:
            context = run.accelerator.no_sync(run.model)
        with context:
            with region("loss"):
                output = run.hooks.compute_loss(run=run, model=run.model, batch=batch.inputs)
                mean_weight = totals.get().weight / sample_shares  # get waits, so it follows a forward pass
                loss = share_of_loss(output.loss, batch.loss_weight, mean_weight)
            with region("backward"):
                run.strategy.backward(run, loss)
        step_loss = loss.detach() if step_loss is None else step_loss + loss.detach()
    assert step_loss is not None
    return step_loss if world_size == 1 else run.processes.all_reduce_mean(step_loss)


def share_of_loss(loss: Tensor, weight: float, total: float) -> Tensor:
    """The part of a micro-batch in the loss of its step.

    A micro-batch with the loss 2.0, and 3 of the step's 12 targets, adds 0.5. One without a target adds 0, although a
    mean over no target is NaN. If no micro-batch has a target, the loss of the step is NaN.

    Args:
        loss: The mean over the micro-batch.
        weight: The ``loss_weight`` of the micro-batch.
        total: That of the step; with several processes, the mean over those that hold different samples.
    """
    if total == 0:
        return loss * weight  # NaN times 0 stays NaN
    if weight == total:
        return loss
    if weight == 0:
        return loss.nan_to_num() * 0.0  # part of the graph: other processes reduce the gradients of this pass, too
    return loss * (weight / total)


def apply_gradients(run: Run, loss: Tensor, optimizer: str | None = None) -> None:
    """Clip the gradients, step the optimizer and clear its gradients; see ``Run.apply_gradients``."""
    if optimizer is not None:
        _select_optimizer(run, optimizer)
    run.hooks.after_backward(run=run, loss=loss)
    max_norm = run.recipe.train.max_grad_norm
    grad_norm = None
    if max_norm is not None:
        with region("clip"):
            grad_norm = run.strategy.clip_gradients(run, max_norm)
    run._gradient_norm = grad_norm
    run._gradients_are_final = True
    if run._is_log_point:
        run.scalars.set_gradient_norm(run.gradient_norm(), run.is_main)
    run.hooks.before_optimizer_step(run=run, grad_norm=grad_norm)
    with region("optimizer"):
        run._skipped_steps.step_optimizer()
        run.optimizer.zero_grad()
    run._gradients_are_final = False
    if not run._unstepped_parameters.all_are_stepped:  # zero_grad has left gradients, which a plugin may apply now
        run._unstepped_parameters.keep_gradients(run.state.step + 1)
    run.updates += 1


def _select_optimizer(run: Run, name: str) -> None:
    """Let the next update step one optimizer alone, of those that ``build_optimizer`` returned."""
    optimizers = getattr(run.optimizer, "optimizer", run.optimizer)  # without the wrapper that scales losses
    if not hasattr(optimizers, "select"):
        raise PluginError(
            f"found the name {name!r}, but the run has one optimizer.",
            code="unknown-optimizer",
            place="run.apply_gradients",
            remedy="Let build_optimizer return a dict of name -> optimizer.",
        )
    optimizers.select(name)


def count_update(run: Run, grad_norm: Tensor | None) -> None:
    """Count an update that repeated recorded operations; see ``Run.count_update``."""
    if run._is_log_point and grad_norm is not None:
        run.scalars.set_gradient_norm(grad_norm.clone(), run.is_main)
    run.updates += 1


def evaluate(run: Run, split: str) -> None:
    """Evaluate a split through the ``evaluate`` hook. If a signal interrupts it, it stays due. The random states are
    restored."""
    states = preserve_random_states(own=run.loaders.own_generators)  # evaluation data may be random
    with run.clock("evaluate"), region("evaluate"), states:
        if split == VALIDATION:
            run.state.evaluate_requested = False
        log_points.log_pending(run)
        run._shared_buffers.share()
        run.hooks.before_evaluate(run=run, split=split)
        try:
            with run.scalars.paused():
                metrics = retry_after_recovery(run, lambda: run.hooks.evaluate(run=run, split=split), split)
        except EvaluationInterrupted:
            run.state.request_evaluate()
            return
        run.state.metrics[split] = dict(metrics)
        if split == VALIDATION:
            run.state.evaluated_at = run.state.step
        run.hooks.after_evaluate(run=run, split=split, metrics=metrics)
        log_points.emit(run, name_metrics(split, metrics), run.state.step)
        run._sync_requests()
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        if run.recipe.inference is None:
            log.info("step %d, %s: %s", run.state.step, split, shown)
        else:  # a run that only evaluates has no steps
            log.info("%s: %s", split, shown)


def evaluation_batches(run: Run, loader: Loader) -> Iterator[Batch]:
    """The batches of an evaluated split, on the device.

    Raises:
        ProcessesDisagree: An iterable dataset gives processes different samples.
        EvaluationInterrupted: A signal stopped the run; raised on every process.
    """
    batches = islice(loader.batches(), run.settings.max_evaluation_batches)
    steps = run.to_device([batch] for batch in batches)  # it moves the batches of a step together
    if run.strategy.forwards_together:
        steps = equal_steps(steps, loader, run.loaders.processes)
    for number, (batch,) in enumerate(steps):
        if number == 0 and run.world_size > 1 and loader.stream is not None and loader.in_step:
            compared_facts.check_stream(run, loader, batch)
        if run.world_size == 1 or (number % POLL_EVERY == 0 and loader.in_step):
            run._sync_requests()
            if run.interrupted:
                raise EvaluationInterrupted
        yield batch


@hookimpl(specname="evaluate", trylast=True)
@torch.no_grad()
def evaluation_loop(run: Run, split: str) -> dict[str, float]:
    """Mean loss and the task's metrics over all processes, counting every sample of the split once.

    The host reads the device only after the last batch.

    Raises:
        DataError: The split gave no sample.
        EvaluationInterrupted: A signal stopped the run; raised on every process.
        MetricError: A metric failed, or its value is not one number.
        ProcessesDisagree: A metric keeps states that processes cannot gather.
    """
    results = EvaluationResults(run.metrics, run.recipe.where, split, run.processes)
    with evaluating(run.model), keeping_casts(run.world_size):
        for batch in evaluation_batches(run, run.eval_loaders[split]):
            with region("loss"):
                output = run.hooks.compute_loss(run=run, model=run.model, batch=batch.inputs)
            results.add(output, batch.loss_weight, batch.samples)
        own = results.read()
    own_sums = torch.tensor([own.loss_sum, own.weight, results.samples], dtype=torch.float64)
    loss_sum, weight, samples = run.processes.all_reduce_sum(own_sums).tolist()
    if not samples:
        raise no_sample(run, split)
    loss = loss_sum / weight if weight else math.nan  # no sample has a target
    return {"loss": loss, **own.metrics}


def no_sample(run: Run, split: str) -> DataError:
    """The error of an epoch or an evaluation without a sample."""
    dataset = type(run.datasets[split]).__name__
    pass_of_split = f"epoch {run.state.epoch}" if split == TRAIN else "its evaluation"
    return DataError(
        f"the {split} split ({dataset}) gave no sample in {pass_of_split}.",
        code="empty-split",
        place=f"{run.recipe.where}: data",
        expected="at least one, or one full step with train.drop_last",
        remedy=(
            "An iterable dataset must begin again at each call of its __iter__: it may not return an iterator that it "
            "keeps."
        ),
    )
