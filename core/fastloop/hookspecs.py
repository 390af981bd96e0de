"""Every hook, in the order in which it fires. This is the contract between the loop and plugins.

    environment                                     # command line only, before the training process starts
    check_recipe                                    # `fastloop plan` calls this and the next line, too
    configure                                       # settings of the processes, the loaders and the optimizer
    before_resume                                   # only with --resume
    build_datasets
    for each split, train first: build_sampler, build_collator
    build_model
    before_prepare                                  # the model as built, on the CPU
    build_optimizer, build_scheduler
    (move to the device, apply autocast, run.strategy.prepare)
    after_prepare                                   # the prepared model, on its device
    build_metrics
    check_run                                       # everything is built, nothing is written yet
                                                    # a plugin that selects others tries compute_loss afterwards
    (load weights and optimizer,) load_state        # only with --resume

    before_fit                                      # a plugin may call compute_loss here, to try a batch
    when requested in before_fit, or interrupted before a resume: the evaluation, as below
    for each epoch:
        before_epoch
        for each optimizer step:
            before_step
            train_step                              # the core calls both helpers once; a plugin may repeat them
                run.accumulate_gradients:
                    for each micro-step: compute_loss, (backward)
                run.apply_gradients:
                    after_backward                  # gradients complete, unclipped
                    (clip)                          # with train.max_grad_norm: run.strategy.clip_gradients
                    before_optimizer_step           # run.gradient_norm() works here
                    (optimizer, zero_grad)
            (scheduler, counters)
            after_step; every train.log_every steps: log_scalars
            when an evaluation is due: before_evaluate, evaluate, after_evaluate, log_scalars
            when saving is due:     save_state, write_checkpoint
        after_epoch
        when due at the epoch's end: the same evaluation and saving
    when the final weights are not evaluated yet: the same evaluation
    after_fit                                       # a plugin may replace the weights here
    before_evaluate, evaluate, after_evaluate, log_scalars   # on the test split
    export_model                                    # into the run folder's model/
    log_scalars, write_summary                      # log_scalars: values of run.log() since the last log point, if any
    log_rows                                        # at any time: at once when a plugin calls run.log_rows
    recover                                         # when training or an evaluation raises
    teardown                                        # last, once: also after a failure, a stop signal or a failed build
    build_prediction_data, predict                  # only to predict; builds no optimizer, nor does evaluate

Kinds of hooks:

* *First* hooks return the first result that is not None, in the run's plugin order. Two plugins must not implement the
  same one, unless one wraps the other or lists the hook in ``Plugin.fallback_hooks``.
* *Chain* hooks may return a replacement, which is passed to the next plugin.
* All other hooks are called on every plugin, in order. The results of ``configure`` merge.

An implementation takes only the arguments it needs. To run code around a hook, mark the implementation
``@hookimpl(wrapper=True)``. ``environment``, ``configure``, chain hooks, ``save_state``, ``load_state`` and
``teardown`` cannot be wrapped. ``Plugin.hookspecs`` declares more hooks. With several processes, every hook except
``log_scalars`` and ``log_rows`` fires on each process, with the same counters, metrics and requests. A request of one
process (``run.state.request_stop``) applies to all. Every process must call collective operations
(``run.full_state_dict()``, ``run.processes.all_reduce_sum``). Only ``run.is_main`` writes files, and checkpoints hold
only its result of ``save_state``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import BatchSampler
    from torchmetrics import MetricCollection

    from fastloop.plugins.manager import PluginSet
    from fastloop.recipe import Recipe
    from fastloop.run import Run
    from fastloop.settings import Settings
    from fastloop.state import Batch, Output

hookspec = pluggy.HookspecMarker("fastloop")
first = hookspec(firstresult=True)

CHANGING_HOOKS = (
    "environment",
    "configure",
    "before_prepare",
    "after_prepare",
)
"""Hooks that change a run, beside the *first* hooks."""

UNWRAPPABLE_HOOKS = (*CHANGING_HOOKS, "save_state", "load_state", "teardown")
"""Hooks that are called on each plugin separately, so a wrapper has nothing to wrap."""

SHARED_FIRST_HOOKS = ("recover",)
"""*First* hooks that several plugins of a run may implement. Each returns None for errors that it cannot handle."""


@hookspec
def environment(recipe: Recipe) -> dict[str, str] | None:
    """Environment variables that must be set before a process starts, such as LD_PRELOAD. `fastloop train` restarts
    itself with the variables that are not set yet. The Python API does not call this hook. Implementations must not
    import torch."""


@hookspec
def check_recipe(recipe: Recipe, plugins: PluginSet) -> None:
    """Check ``model``, ``data`` and paths before anything is loaded. Raise ``RecipeError`` if one is wrong.

    Args:
        plugins: The plugins of the run: the argument ``plugins`` of ``Run``.
    """


@hookspec
def configure(recipe: Recipe, settings: Settings) -> Mapping[str, Any] | None:
    """Settings by name, such as ``{"mixed_precision": "bf16"}`` or ``{"optimizer": {"fused": True}}``. ``Settings``
    lists them. Two plugins must not set the same one, or the same key of a mapping."""


@hookspec
def before_resume(run: Run, folder: Path) -> None:
    """With --resume: fastloop will look for a checkpoint in ``folder``. A plugin may first put one there, on the main
    process."""


@first
def build_datasets(run: Run) -> Mapping[str, Any] | None:
    """First. Split -> dataset, map-style or iterable (``fastloop.data.DatasetProtocol``): ``train``; maybe
    ``validation``, ``test``."""


@first
def build_sampler(run: Run, split: str) -> BatchSampler | None:
    """First. The order of a map-style dataset: torch's ``BatchSampler`` around any sampler with a length.
    Its ``drop_last`` drops the samples at an epoch's end that do not fill a batch. The batch has ``train.batch_size``
    samples in training, and the sampler's own ``batch_size`` in evaluation. Without a sampler, training shuffles all
    samples by seed and epoch, and evaluation keeps the dataset's order."""


@first
def build_collator(run: Run, split: str) -> Callable[[list[Any]], Batch | Any] | None:
    """First. A function that turns a list of samples into a ``Batch``, or just its inputs."""


@first
def build_model(run: Run) -> nn.Module | None:
    """First. The model, on the CPU, with its initial weights. If a pretrained model lacks some of them, set
    ``run.new_weights`` to their names: ``lora`` then trains them, and a run warns of those that are frozen."""


@hookspec
def before_prepare(run: Run, model: nn.Module) -> nn.Module | None:
    """Chain. Change or replace the model before the optimizer is built, such as to add adapters."""


@first
def build_optimizer(run: Run, model: nn.Module) -> Optimizer | Mapping[str, Optimizer] | None:
    """First. fastloop builds the recipe's ``train.optimizer``. ``run.settings.optimizer`` holds the arguments that
    plugins set. A dict of name -> optimizer becomes one optimizer of all their groups."""


@first
def build_scheduler(run: Run, optimizer: Optimizer) -> LRScheduler | Mapping[str, LRScheduler] | None:
    """First. The loop steps it once per step, not by a metric, and not after a skipped update. Without one, the
    learning rate is constant. A dict of an optimizer's name -> scheduler schedules each by its steps."""


@hookspec
def after_prepare(run: Run, model: nn.Module) -> nn.Module | None:
    """Chain. Change or replace the prepared model, for example to compile it. Its parameters must stay the ones that
    the optimizer steps; use ``before_prepare`` to replace parameters."""


@first
def build_metrics(run: Run) -> MetricCollection | None:
    """First. Torchmetrics, updated with ``Output.predictions`` and ``Output.targets`` of several batches. ``loss`` is
    always computed."""


@hookspec
def check_run(run: Run) -> None:
    """Check the built run before anything is written. Raise ``UsageError`` if it cannot train."""


@hookspec
def before_fit(run: Run) -> None:
    """Everything is built and, with --resume, loaded. A run that resumes keeps the ``requires_grad`` of the
    checkpoint's parameters, and the train or eval mode of its modules, unless a plugin that changes training is new in
    it."""


@hookspec
def before_epoch(run: Run) -> None:
    """``run.state.epoch`` is the epoch's index from 0. Fires again when a run resumes within an epoch."""


@hookspec
def before_step(run: Run, batches: list[Batch]) -> None:
    """The step's micro-batches on this process, on the device. A plugin may replace their ``inputs``, but not change
    the list. A batch may have ``samples`` 0, and that of a text task no ``attention_mask``: see ``Batch``."""


@first
def train_step(run: Run, batches: list[Batch]) -> Tensor | None:
    """First. The core calls ``run.accumulate_gradients(batches)``, then ``run.apply_gradients(loss)``, and returns
    the loss. A plugin may call both several times. Every process must make the same calls, and call
    ``apply_gradients`` at least once. Return the step's loss: 0-dim, detached, the mean over all processes. None
    leaves the whole step to the core. If it raises, ``recover`` may repeat the step: restore temporary changes of
    the weights in a ``finally`` block."""


@first
def compute_loss(run: Run, model: nn.Module, batch: Any) -> Output:  # type: ignore[empty-body]
    """First. Forward and loss of one micro-batch, in training and evaluation. ``batch`` is ``Batch.inputs`` on the
    device. Processes call it equally often in training, so a batch may have weight 0: see ``Batch.samples``."""


@hookspec
def after_backward(run: Run, loss: Tensor) -> None:
    """The gradients to apply are computed, not clipped, and in fp16 still multiplied by the loss scale. ``loss``: as in
    ``after_step``."""


@hookspec
def before_optimizer_step(run: Run, grad_norm: Tensor | None) -> None:
    """Gradients are final, and clipped with ``train.max_grad_norm``. Without it, they are still multiplied by the loss
    scale in fp16. ``grad_norm``: 0-dim, before clipping; None without ``train.max_grad_norm``. See
    ``run.gradient_norm()``."""


@hookspec
def after_step(run: Run, loss: Tensor) -> None:
    """A step is done and counted. ``loss``: 0-dim, detached, the mean over all processes. Reading it on the host waits
    for the device. Parameters that ``run.optimizer`` does not hold still have their gradients, clipped. In fp16, these
    gradients are multiplied by the loss scale of ``before_optimizer_step``; the optimizer's step may have changed the
    scale. A plugin may apply them by an optimizer of its own. The next step clears them before ``before_step``."""


@hookspec
def log_scalars(run: Run, scalars: Mapping[str, float], step: int) -> None:
    """Name -> value, at a log point or after an evaluation. Fires on the main process only, so call no collective
    operation. Names of the core: ``train/loss`` (mean since the last log point), ``train/grad_norm`` (before
    clipping), ``train/lr`` (of the first parameter group: that of parameters without arguments of their own),
    ``train/samples_per_second``, ``train/tokens_per_second`` and ``train/memory_bytes``;
    ``validation/loss``, ``test/accuracy``, ... The plugin ``log`` writes them to ``metrics.jsonl`` without the part
    before ``/``: ``loss`` and ``lr`` of a step, and ``loss`` of an evaluation beside its ``split``.
    Values may be NaN or infinite. ``run.log("my-plugin/noise", value)`` adds one.

    On an accelerator, the values of a log point come when the device has computed them: at the next log point, or
    before an evaluation, a save or the end of the epoch. So read ``step``, not ``run.state.step``. A plugin that must
    act in that step declares ``waits_for_scalars``; the host then waits for the device at each log point.
    """


@hookspec
def log_rows(run: Run, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
    """Rows that a plugin gave to ``run.log_rows``, such as prompts with the answers of the model: column -> JSON value.
    Fires at once, on the main process only, so call no collective operation."""


@hookspec
def after_epoch(run: Run) -> None:
    """``run.state.epoch`` counts the completed epochs, including this one. The epoch's evaluation follows."""


@hookspec
def after_fit(run: Run) -> None:
    """Training has completed or stopped. The test split and the export use the weights as they are after this hook."""


@hookspec
def before_evaluate(run: Run, split: str) -> None:
    """An evaluation of ``validation`` or ``test`` begins."""


@first
def evaluate(run: Run, split: str) -> dict[str, float] | None:
    """First; the core implements it. Wrap it to evaluate other weights than the trained ones. A wrapper that adds
    metrics needs ``trylast=True``. When a signal stops the run, an exception passes through wrappers, and the run is
    saved afterwards. Restore what you changed in a ``finally`` block."""


@hookspec
def after_evaluate(run: Run, split: str, metrics: dict[str, float]) -> None:
    """An evaluation is done. ``metrics`` is a copy. Call ``run.state.request_stop`` here to stop training."""


@hookspec
def save_state(run: Run) -> dict[str, Any] | None:
    """State that this plugin needs to resume: tensors, numbers, strings, and lists, tuples and dicts of them."""


@first
def write_checkpoint(run: Run, folder: Path, model: dict[str, Tensor], state: dict[str, Any]) -> Future[None] | None:
    """First; the core writes before training continues. Write both to ``folder`` with ``saving.write``. To write while
    training continues, copy the tensors first: training changes them. The run waits for the future before the next
    save, before a rollback, and at its end."""


@hookspec
def load_state(run: Run, state: dict[str, Any]) -> None:
    """Restore the result of this plugin's ``save_state``; tensors are on the CPU. Also called when a run rolls back to
    a checkpoint. A ``ValueError`` or ``KeyError`` ends the run as a malformed state:
    ``fastloop.checkpoint.state_form.check_form`` raises one."""


@first
def export_model(run: Run, folder: Path) -> Path | None:
    """First. Write ``run.full_state_dict()`` for use outside fastloop. Every process must call that method; the main
    process writes."""


@first
def build_prediction_data(run: Run, source: Any, start: int, size: int) -> Iterable[Any] | None:
    """First. Map-style datasets of up to ``size`` samples, from sample ``start`` of ``source``: a file, texts, or None:
    a split."""


@first
def predict(run: Run, batch: Any) -> Mapping[str, Sequence[Any]] | None:
    """First. Column -> a prediction for each sample of the batch, or a tensor (samples, ...): ``Batch.inputs`` on the
    device, as in ``compute_loss``; no gradients."""


@hookspec
def write_summary(run: Run, summary: dict[str, Any]) -> None:
    """Add to ``summary.json``: JSON values under new keys. Changes of other keys are undone, with a warning."""


@first
def recover(run: Run, error: Exception, split: str | None) -> bool | None:
    """First. Training, or the evaluation of ``split``, raised. Return True to continue from ``run.state``'s counters
    without the step's gradients, or to repeat the evaluation. All processes must return the same answer, and none may
    be inside a collective operation."""


@hookspec
def teardown(run: Run) -> None:
    """The run is over: close files, end threads, restore settings. Fires once on every process, also when the run could
    not be built (see ``Run``) or ``on_error`` has disabled the plugin. Call no collective operation: other processes
    may be gone. An error does not stop the other plugins' teardown or replace the run's own error, but fails a run
    that succeeded."""
