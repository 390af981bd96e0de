"""Every hook, in the order in which it fires. This is the contract between the loop and plugins.

    environment                                     # on the command line, before the process really starts
    check_recipe                                    # everything here is also done by `fastloop plan`
    configure_accelerator, configure_dataloader, configure_optimizer

    build_datasets
    for each split, train first: build_sampler, build_collator
    build_model
    before_prepare                                  # the model as built, on the CPU
    build_optimizer, build_scheduler
    prepare                                         # the model and the optimizer onto the device, into the strategy
    after_prepare                                   # the model as trained, on its device
    build_metrics
    check_run                                       # all is built, nothing is written yet
    load_model_state, load_optimizer_state, load_state   # only with --resume

    before_fit
    for each split that is evaluated:               # only with metrics, to try them on one batch; not for iterable datasets
        compute_loss
    when a signal cut one off: the evaluation that is due
    for each epoch:
        before_epoch
        for each optimizer step:
            before_step
            for each micro-step:
                compute_loss, backward
            after_backward                          # gradients complete, unclipped
            clip_gradients                          # with train.max_grad_norm
            before_optimizer_step                   # run.gradient_norm() works here
            (optimizer, scheduler, zero_grad)
            after_step
            when evaluation is due: before_evaluate, evaluate, after_evaluate
            when saving is due:     optimizer_state, save_state, model_state, write_checkpoint
        after_epoch
        when due at the epoch's end: the same evaluation and saving
    when the last weights are not evaluated yet: the same evaluation
    after_fit                                       # a plugin may put other weights in place here
    before_evaluate, evaluate, after_evaluate       # on the test split
    export_model, model_state                       # into the run folder's model/
    write_summary

    recover                                         # when training or an evaluation raises
    on_exception                                    # instead of the rest, when anything above raises

Kinds. *Draft* hooks change the draft they get; two plugins that write one field is an error. *First* hooks return the first result
that is not None, asked in the run's plugin order. Two plugins that answer the same one is an error, unless one wraps the other or leaves
the hook to it (``Plugin.fallback_hooks``). *Chain* hooks may return a replacement, which the next plugin gets. The others are called on
every plugin, in order. An implementation takes only the arguments it needs.

With several processes every hook fires on each of them, with the same counters, metrics and requests: a request of one process
(``run.state.request_stop``) is a request of all. Every process must call collective operations (``run.full_state_dict()``,
``run.processes.all_reduce_sum``). Only ``run.is_main`` writes files. Of the results of ``save_state``, the main process's is kept.

What goes around something is a wrapper:
``@hookimpl(wrapper=True)`` on that hook (not on draft and chain hooks, ``save_state`` and ``load_state``).

Plugins may bring along hooks of their own: ``Plugin.hookspecs``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    from fastloop.recipe import Recipe
    from fastloop.run import Run
    from fastloop.state import AcceleratorDraft, Batch, DataLoaderDraft, OptimizerDraft, Output

hookspec = pluggy.HookspecMarker("fastloop")
first = hookspec(firstresult=True)

CHANGE = (
    "environment",
    "configure_accelerator",
    "configure_dataloader",
    "configure_optimizer",
    "before_prepare",
    "after_prepare",
)
"""Draft and chain hooks, and what is like them: beside the *first* hooks, those that are there to change a run."""

ONE_BY_ONE = (*CHANGE, "save_state", "load_state")
"""Called on each plugin by itself, so that there is nothing to wrap."""

ASKED_IN_TURN = ("recover",)
"""*First* hooks that any number of plugins of a run may answer: each returns None for what it has no remedy for."""


# -- configure ---------------------------------------------------------------------------------------------------------


@hookspec
def environment(recipe: Recipe) -> dict[str, str] | None:
    """Environment variables that count only when a process has them from its start, such as LD_PRELOAD: `fastloop train` starts itself
    again with those that are not set yet. Torch is not loaded here, and must not be. In Python nothing is started again."""


@hookspec
def check_recipe(recipe: Recipe) -> None:
    """Refuse what is wrong with ``model``, ``data`` or a path by raising ``RecipeError``, before anything is loaded."""


@hookspec
def configure_accelerator(draft: AcceleratorDraft) -> None:
    """Draft. Precision and Accelerate's handlers."""


@hookspec
def configure_dataloader(draft: DataLoaderDraft) -> None:
    """Draft. Workers, pinning, padding to a multiple."""


@hookspec
def configure_optimizer(draft: OptimizerDraft) -> None:
    """Draft. Further arguments of the optimizer."""


# -- build -------------------------------------------------------------------------------------------------------------


@first
def build_datasets(run: Run) -> Mapping[str, Any] | None:
    """First. Split -> torch dataset, map-style or iterable: ``train``, and optionally ``validation`` and ``test``. A dataset may also
    declare its samples' lengths, a fingerprint for --resume and more: see ``fastloop.data.DatasetProtocol``."""


@first
def build_sampler(run: Run, split: str) -> BatchSampler | None:
    """First. The order of a map-style dataset: torch's ``BatchSampler`` around any sampler with a length. Its ``drop_last`` leaves out an
    epoch's last samples that do not fill a batch: to train, one of ``train.batch_size``; to evaluate, one of its own ``batch_size``.
    Without a sampler, an epoch takes all samples: to train, in an order drawn by seed and epoch; to evaluate, in the dataset's order."""


@first
def build_collator(run: Run, split: str) -> Callable[[list[Any]], Batch | Any] | None:
    """First. Makes a batch of a list of samples of a split; returns a ``Batch``, or just its inputs."""


@first
def build_model(run: Run) -> nn.Module | None:
    """First. The model, on the CPU, with its initial weights."""


@hookspec
def before_prepare(run: Run, model: nn.Module) -> nn.Module | None:
    """Chain. Change or replace the model before there is an optimizer: adapters, sharding."""


@first
def build_optimizer(run: Run, model: nn.Module) -> Optimizer | None:
    """First. Without one, the recipe's ``train.optimizer`` is built. What plugins ask of it is in ``run.optimizer_arguments``."""


@first
def build_scheduler(run: Run, optimizer: Optimizer) -> LRScheduler | None:
    """First. Stepped once an optimizer step. Without one, the learning rate is constant."""


@first
def prepare(run: Run, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any] | None:
    """First; the core lets Accelerate do it. The model and the optimizer as the loop uses them. For strategies that Accelerate is not asked
    for: the optimizer needs ``step``, ``zero_grad`` and ``param_groups``, the model's forward must keep its arguments. The optimizer must
    step each parameter that the model trains, or the run ends with an error. Where ``param_groups`` hold other tensors, such as flat
    shards, its ``model_parameters()`` returns the parameters that it steps."""


@hookspec
def after_prepare(run: Run, model: nn.Module) -> nn.Module | None:
    """Chain. Change or replace the model when it is prepared: compilation. Its parameters stay those that the optimizer steps: replace
    parameters in ``before_prepare``."""


@first
def build_metrics(run: Run) -> MetricCollection | None:
    """First. Torchmetrics that evaluation updates with ``Output.predictions`` and ``Output.targets``, those of many batches put together.
    ``loss`` is always there."""


@hookspec
def check_run(run: Run) -> None:
    """Refuse what only the built run can tell, by raising ``UsageError``, before anything is written."""


# -- train -------------------------------------------------------------------------------------------------------------


@hookspec
def before_fit(run: Run) -> None:
    """All is built and, with --resume, loaded."""


@hookspec
def before_epoch(run: Run) -> None:
    """``run.state.epoch`` is the epoch's index from 0. Fires again for an epoch that a resumed run goes on with."""


@hookspec
def before_step(run: Run, batches: list[Batch]) -> None:
    """The step's micro-batches on this process, on the device."""


@first
def compute_loss(run: Run, model: nn.Module, batch: Any) -> Output | None:
    """First. Forward and loss of one micro-batch; ``batch`` is ``Batch.inputs`` on the device. Serves evaluation too."""


@first
def backward(run: Run, loss: Tensor) -> bool | None:
    """First; the core lets Accelerate do it. Gradients of one micro-batch; its ``loss`` is already scaled to its share of the step."""


@hookspec
def after_backward(run: Run, loss: Tensor) -> None:
    """Gradients of the whole step are there, before clipping. ``loss``: 0-dim, detached, the step's mean over all processes."""


@first
def clip_gradients(run: Run, max_norm: float) -> Tensor | None:
    """First; the core answers. Clip the gradients' total 2-norm to ``max_norm``; returns the norm before, 0-dim. With ``inf``, change no
    gradient: ``run.gradient_norm()`` asks for the norm alone."""


@hookspec
def before_optimizer_step(run: Run, grad_norm: Tensor | None) -> None:
    """Gradients are final. ``grad_norm``: 0-dim, their norm before clipping; None without ``train.max_grad_norm``. Call
    ``run.gradient_norm()`` for the norm in either case."""


@hookspec
def after_step(run: Run, loss: Tensor) -> None:
    """An optimizer step is done and counted. Reading ``loss`` on the host waits for the device: do it rarely."""


@hookspec
def after_epoch(run: Run) -> None:
    """``run.state.epoch`` counts the completed epochs, this one included. The epoch's evaluation comes after."""


@hookspec
def after_fit(run: Run) -> None:
    """Training is over, completed or stopped. The test split and the exported model see the weights as left here."""


# -- evaluate ----------------------------------------------------------------------------------------------------------


@hookspec
def before_evaluate(run: Run, split: str) -> None:
    """An evaluation of ``evaluate`` or ``test`` begins."""


@first
def evaluate(run: Run, split: str) -> dict[str, float] | None:
    """First; the core answers. Wrap it to evaluate other weights than those in training; innermost (``trylast=True``), to add metrics.

    An exception that passes through cuts an evaluation off when the run is asked to end, and the run is saved after it: put back what
    you changed in a ``finally``."""


@hookspec
def after_evaluate(run: Run, split: str, metrics: dict[str, float]) -> None:
    """An evaluation is done. The place to stop training."""


# -- state -------------------------------------------------------------------------------------------------------------


@first
def model_state(run: Run) -> dict[str, Tensor] | None:
    """First; the core answers. The weights under the model's own names: whole, sharded as ``DTensor``, or on the main process alone."""


@first
def load_model_state(run: Run, state: dict[str, Tensor]) -> bool | None:
    """First; the core answers. Take over weights, whole or sharded alike; returns True."""


@first
def optimizer_state(run: Run) -> dict[str, Any] | None:
    """First; the core answers. In the form of torch's ``Optimizer.state_dict()``, whatever the strategy: so runs go on under another."""


@first
def load_optimizer_state(run: Run, state: dict[str, Any]) -> bool | None:
    """First; the core answers. Take over what ``optimizer_state`` returned, maybe under another strategy; returns True."""


@hookspec
def save_state(run: Run) -> dict[str, Any] | None:
    """What this plugin needs to go on: tensors, numbers, strings, lists, tuples and dicts of them. Kept by plugin name."""


@first
def write_checkpoint(run: Run, folder: Path, model: dict[str, Tensor], state: dict[str, Any]) -> Future[None] | None:
    """First; the core does it at once. Write both to ``folder`` with ``resume.write``, now or while training goes on: then from a copy,
    since the tensors are those in training. The future is waited for before the next save, before the run goes back to a checkpoint, and
    at its end."""


@hookspec
def load_state(run: Run, state: dict[str, Any]) -> None:
    """What this plugin's ``save_state`` returned, on the CPU. Also while a run trains, when a plugin has it go back to a checkpoint."""


@first
def export_model(run: Run, folder: Path) -> Path | None:
    """First. Write ``run.full_state_dict()`` for use outside fastloop: every process asks for them, the main one writes."""


@hookspec
def write_summary(run: Run, summary: dict[str, Any]) -> None:
    """Add to ``summary.json``: JSON values."""


@first
def recover(run: Run, error: Exception, split: str | None) -> bool | None:
    """First. Training, or the evaluation of ``split``, raised. Returns True where the run can go on: training then does so from where
    ``run.state`` stands, reading the epoch under way from there, and an evaluation begins again. The step's gradients are dropped then.
    With several processes all must come to the same answer, and none may be inside an exchange with the others."""


@hookspec
def on_exception(run: Run, error: BaseException) -> None:
    """The run failed; the error goes on to the caller after this."""
