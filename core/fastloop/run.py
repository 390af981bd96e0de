"""The context that hooks receive: the parts of one execution of a recipe. ``lifecycle`` sets its fields, and ``loop``
those of the current step."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fastloop.checkpoint.frozen import FrozenParts
from fastloop.checkpoint.pending_save import CheckpointSaver
from fastloop.checkpoint.settings_record import SettingsRecord
from fastloop.checkpoint.store import ResumePoint
from fastloop.data import Loader, Loaders
from fastloop.data.equal_steps import equal_steps
from fastloop.distributed.buffers import SharedBuffers
from fastloop.distributed.processes import Processes
from fastloop.distributed.signals import StopSignals
from fastloop.distributed.skipped_steps import SkippedSteps
from fastloop.distributed.tensors import gather_full
from fastloop.errors import PluginError, SaveError
from fastloop.plugins.manager import PluginSet
from fastloop.problem import Problem, clause
from fastloop.recipe import Recipe
from fastloop.runtime import device_copies
from fastloop.runtime.clock import Clock
from fastloop.runtime.random_states import preserve_random_states
from fastloop.runtime.regions import region
from fastloop.runtime.step_folders import resume_remedy
from fastloop.scalars import Reduction, Scalars
from fastloop.schedule import Schedule
from fastloop.settings import Settings
from fastloop.state import INTERRUPTED, Batch, State
from fastloop.step_totals import StepTotals
from fastloop.unstepped import UnsteppedParameters

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torchmetrics import MetricCollection

    from fastloop.log_points import LogPoint
    from fastloop.state import RunOptimizer

log = logging.getLogger("fastloop")


class Reasons(NamedTuple):
    """The reasons of one process for which all processes stop or count a failed save. Each is None without one.

    Attributes:
        signal: Name of the signal that the process received.
        failure: Message of a failed save.
        stop: Reason of a plugin to stop.
    """

    signal: str | None
    failure: str | None
    stop: str | None


NO_REASONS = Reasons(None, None, None)


class Run:
    """The argument ``run`` of hooks. A field exists once its build step in ``hookspecs`` is done.

    After a failed build, ``teardown`` finds at least ``recipe``, ``plugins``, ``hooks``, ``strategy``, ``state``,
    ``folder``, ``processes`` (rank 0 of 1 before the accelerator is built), ``saver``, ``signals`` and ``scalars``. A
    plugin sets attributes that it needs there in ``__init__``.

    Attributes:
        recipe: The resolved recipe.
        plugins: The plugins of the run, in call order.
        hooks: Call a hook on all plugins: ``run.hooks.after_step(run=run, loss=loss)``.
        strategy: The plugin in the slot ``strategy``, or the default.
        state: Counters, metrics and requests.
        folder: The run folder.
        settings: Precision, loading of batches, and arguments of the optimizer.
        processes: Rank, world size and collective operations.
        accelerator: Accelerate's ``Accelerator``.
        device: The device of this process.
        clock: Seconds by phase.
        loaders: Datasets, samplers, collators and loaders by split.
        model: As trained: on its device, wrapped, compiled. ``unwrap_model()`` is the model as built.
        new_weights: Names of parameters, in the model that ``build_model`` returns, that start from random values
            because the pretrained model has none for them, such as those of a new head. The task sets it in
            ``build_model``. Empty for a model that is trained from scratch, and in inference.
        optimizer: Torch's optimizer, or a wrapper of it. ``run.optimizer["NAME"]`` for a dict.
        scheduler: Stepped by the loop, once a step. ``run.scheduler["NAME"]`` for a dict. None: a constant learning
            rate.
        metrics: The task's metrics, or None.
        schedule: When to evaluate, save and stop.
        saver: The pending and the newest complete checkpoint.
        signals: The stop signal of this process.
        settings_record: The settings with which the run was built, for its checkpoints.
        resume_point: The checkpoint to resume from: its folder ``checkpoint``, and ``skipped``, the warnings about
            damaged ones. None: the run starts anew.
        scalars: The values since the last log point; see ``log``.
        steps_to_compare: Optimizer steps left in which the processes compare what they read. After the last of them,
            they compare the weights; see ``compared_facts``.
        updates: Calls of ``apply_gradients`` in the current step.
        is_recording: Whether a plugin records the operations of the current step, to repeat them in later ones. Nothing
            may read a number from the device meanwhile.
    """

    def __init__(self, recipe: Recipe, plugins: PluginSet) -> None:
        self.recipe = recipe
        self.plugins = plugins
        self.hooks = plugins.hooks
        self.strategy = plugins.strategy
        self.state = State()
        self.folder = Path(recipe.output)
        self.processes = Processes()
        self.saver = CheckpointSaver()
        self.signals = StopSignals()
        self.resume_point: ResumePoint | None = None
        self.settings: Settings
        self.accelerator: Accelerator
        self.device: torch.device
        self.clock: Clock
        self.loaders: Loaders
        self._built_model: nn.Module
        self._built_modes: dict[str, bool]  # module -> whether it is in train mode, before training
        self.model: nn.Module
        self.new_weights: frozenset[str] = frozenset()
        self.optimizer: RunOptimizer
        self.scheduler: Any
        self.metrics: MetricCollection | None = None
        self.schedule: Schedule
        self.settings_record: SettingsRecord
        self._skipped_steps: SkippedSteps
        self._unstepped_parameters: UnsteppedParameters
        self._shared_buffers: SharedBuffers
        self.scalars = Scalars(
            enabled=any(plugins.each("log_scalars")),
            needed_at_once=any(plugin.waits_for_scalars for plugin in plugins),
        )
        self.is_recording = False
        # set by the loop
        self.steps_to_compare = 0
        self._frozen: FrozenParts | None = None  # those of a checkpoint, until the hooks that fire again have fired
        self._weights_before: dict[str, Tensor] = {}  # a part of each, until the processes compared them
        self.updates = 0
        self._totals: StepTotals | None = None  # of the current step
        self._is_log_point = False  # whether a log point follows the current step
        self._gradients_are_final = False  # from clipping to the optimizer's step, where gradient_norm may be called
        self._gradient_norm: Tensor | None = None  # of the current update; None: it was not computed yet
        self._pending_log_point: LogPoint | None = None
        # set by ``close_after`` and ``execute``
        self._exit_stack: ExitStack  # releases the run folder's lock and restores the handlers of signals, at the end
        self._summary: dict[str, Any] | None = None
        self._exported = False

    @property
    def rank(self) -> int:
        """Index of this process, from 0."""
        return self.processes.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.processes.world_size

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and logs."""
        return self.processes.is_main

    @property
    def datasets(self) -> dict[str, Any]:
        """Split -> dataset."""
        return self.loaders.datasets

    @property
    def train_loader(self) -> Loader:
        """Loader of the training split."""
        return self.loaders.train

    @property
    def eval_loaders(self) -> dict[str, Loader]:
        """Split -> loader, for ``validation`` and ``test``."""
        return self.loaders.evaluation

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the complete run; None: unknown."""
        return self.schedule.total_steps

    def unwrap_model(self) -> nn.Module:
        """The model as built, without wrappers."""
        return self._built_model

    @contextmanager
    def substitute_model(self, model: nn.Module) -> Iterator[None]:
        """Make ``unwrap_model()`` return another model inside the block."""
        original = self._built_model
        self._built_model = model
        try:
            yield
        finally:
            self._built_model = original

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's full weights on the CPU, for the main process to write; empty on the others. Every process must
        call it."""
        weights = {}
        for name, tensor in self.strategy.model_state(self).items():
            full = gather_full(tensor)  # one at a time, to keep at most one full tensor on the device
            if self.is_main:
                weights[name] = full.cpu()
        return weights

    def training_batches(self, epoch: int = 0) -> Generator[Batch, None, None]:
        """Read the micro-batches of a training epoch apart from the loop, on the device: to re-estimate the statistics
        of batch norm, for example. Every process must call it, and read as many.

        The loop keeps its place in the data, and the random states are restored after the last batch or when the
        iterator is closed. So the training stays the same. The batches are those that the loop trains on in this epoch.

        Raises:
            DataError: A sample could not be read.
        """
        states = preserve_random_states(own=self.loaders.own_generators)
        try:
            with closing(self.loaders.copy_train()) as loader, states:
                yield from chain.from_iterable(self._steps(loader, epoch, 0))
        finally:
            self.loaders.train.forget_epoch()

    def _steps(self, loader: Loader, epoch: int, start: int) -> Iterable[list[Batch]]:
        """The micro-batches of each step of a training epoch, on the device: as many on each process.

        Args:
            start: Samples of the epoch to leave out at its beginning.
        """
        steps = self.to_device(loader.steps(epoch, start))
        return equal_steps(steps, loader, self.loaders.processes)

    def to_device(self, steps: Iterable[list[Batch]]) -> Iterable[list[Batch]]:
        """Move the micro-batches of each step to the device."""
        placing = self.settings.placing
        if placing is not None:
            return placing(steps, self._to_device)
        return steps if self.device.type == "cpu" else map(self._to_device, steps)

    def _to_device(self, batches: list[Batch]) -> list[Batch]:
        with region("to device"):
            for batch in batches:
                batch.inputs, batch._buffer = device_copies.to_device(
                    batch.inputs, batch._buffer, self.device, non_blocking=self.settings.pin_memory
                )
        return batches

    def _start_totals(self, batches: list[Batch]) -> StepTotals:
        """Start to sum over the micro-batches of a step. Every process must call it."""
        self._totals = StepTotals(batches, self.loaders.processes)
        return self._totals

    def _totals_of(self, batches: list[Batch]) -> StepTotals:
        """The sums over micro-batches: those of the current step, unless a plugin has made other ones."""
        if self._totals is not None and self._totals.batches is batches:
            return self._totals
        return self._start_totals(batches)

    def accumulate_gradients(self, batches: list[Batch]) -> Tensor:
        """Add the gradients of a step's micro-batches to ``grad``. Every process must call it.

        Each micro-batch's mean loss is weighted by its samples or target tokens. The result is the gradient of the mean
        over the full step, however it is split over micro-batches and processes. Gradients are reduced once, at the
        last micro-batch. A second call of a step adds to the gradients; call ``run.optimizer.zero_grad()`` in between
        to replace them. In fp16, gradients stay multiplied by the loss scale, and they may be infinite.

        Dropout draws new random numbers in each call. To draw the same ones again, restore the states of
        ``fastloop.runtime.random_states.random_states()`` that you took before the first call.

        Args:
            batches: Micro-batches on the device: the argument of ``train_step``, or other ones. Every process needs as
                many of them. Do not change ``loss_weight`` between two calls with the same list.

        Returns:
            The step's mean loss over all processes: 0-dim, detached, on the device, not multiplied by the loss scale.
        """
        import fastloop.loop  # which imports what builds on this module

        return fastloop.loop.accumulate_gradients(self, batches)

    def apply_gradients(self, loss: Tensor, optimizer: str | None = None) -> None:
        """Change the weights by the gradients, then clear the gradients. Every process must call it.

        Calls ``after_backward``, clips to ``train.max_grad_norm``, calls ``before_optimizer_step``, and steps the
        optimizer. Parameters that ``run.optimizer`` does not hold keep their gradients until the next
        ``accumulate_gradients`` or the next step, so a plugin may apply them.

        Args:
            loss: The argument ``loss`` of ``after_backward``: the result of ``accumulate_gradients``.
            optimizer: The name of the only optimizer to step, where ``build_optimizer`` returned a dict. The gradients
                of the others are cleared first, so clipping, ``gradient_norm()`` and hooks see only the gradients that
                are applied. None: step all.

        Raises:
            PluginError: There is no optimizer of this name, or none of its parameters has a gradient.
        """
        import fastloop.loop

        fastloop.loop.apply_gradients(self, loss, optimizer)

    def count_update(self, grad_norm: Tensor | None) -> None:
        """Count an update that repeated the recorded operations of ``apply_gradients``, instead of calling it.

        Args:
            grad_norm: The total norm of the gradients before clipping, 0-dim. It is logged at a log point. None: it is
                not known.
        """
        import fastloop.loop

        fastloop.loop.count_update(self, grad_norm)

    def gradient_norm(self) -> Tensor:
        """Total 2-norm of the gradients of an update before clipping: 0-dim, float, on the device. Call it in
        ``before_optimizer_step``.

        It is computed once in an update; with ``train.max_grad_norm``, clipping has computed it. Gradients keep their
        bits. Every process must call it. In fp16 loss scaling is undone, and an overflow gives infinity. Reading the
        value on the host waits for the device.

        Raises:
            PluginError: It was called outside ``before_optimizer_step``.
        """
        if not self._gradients_are_final:
            problem = "run.gradient_norm() was called where a step's gradients are not final."
            raise PluginError(
                f"{problem} Call it in before_optimizer_step, and keep its result.", code="gradients-gone"
            )
        if self._gradient_norm is None:
            with region("gradient norm"):
                self._gradient_norm = self.strategy.gradient_norm(self)
        return self._gradient_norm.to(self.device, non_blocking=True)

    def skip_update(self) -> None:
        """Leave the weights and the optimizer as they are, instead of applying the gradients of this update. Call it in
        ``before_optimizer_step``, on every process. See ``step_was_skipped``."""
        self._skipped_steps.request()

    def step_was_skipped(self) -> bool:
        """Whether the newest step left the weights as they were, because a plugin called ``skip_update`` or fp16's loss
        scaling found an overflow. The learning rate schedule and averages of the weights then stay, too. The counters
        include a skipped step and its samples. With loss scaling and a fused optimizer, the first call after a step
        waits for the device."""
        return self._skipped_steps.is_step_skipped()

    def log(self, name: str, value: float | Tensor, reduce: Reduction = "mean") -> None:
        """Log a value under a name of your own, such as ``my-plugin/noise``. Plugins receive it in ``log_scalars``, at
        the next log point.

        A log point follows every ``train.log_every`` steps; remaining values follow at the end of a completed run.
        Values logged during an evaluation are ignored: its metrics are logged instead. A checkpoint contains the values
        since the last log point.

        Args:
            value: A real number or 0-dim tensor. A tensor is detached and stays on its device; the host reads all
                values of a log point together. A ``DTensor`` must be logged by every process. A device tensor has at
                least float32 precision.
            reduce: How to combine the values since the last log point, over steps and processes: ``mean``, ``sum`` or
                ``max``. With these, every process must log the same names between two log points. ``main``: the mean on
                the main process, without communication; other processes may log the name, too.

        Raises:
            PluginError: The value is not a real number, the name belongs to the core or was logged with another
                reduction, or (at a log point) processes logged different names.
        """
        self.scalars.add(name, value, reduce, self.device)

    def log_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log rows of values, such as prompts with the answers of the model. Plugins receive them at once, in the hook
        ``log_rows``: `log` appends them to ``rows/NAME.jsonl`` in the run folder.

        Rows of other processes than the main one are ignored.

        Args:
            name: A name for all rows of this kind, such as ``samples``: small letters, digits, ``-`` and ``_``.
            rows: Column -> a value of JSON.

        Raises:
            PluginError: The name has other characters, or a row holds a value that JSON has not.
        """
        if not self.is_main:
            return
        if re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name) is None:
            raise PluginError(
                code="wrong-format",
                place="run.log_rows",
                found=f"the name {name!r}",
                expected="small letters, digits, - and _, such as 'samples'",
            )
        for row in rows:
            try:
                json.dumps(row)
            except (TypeError, ValueError) as error:
                raise PluginError(
                    f"run.log_rows({name!r}): a row is no JSON: {clause(error)}.",
                    code="not-json",
                    remedy="Convert its values.",
                ) from None
        self.hooks.log_rows(run=self, name=name, rows=rows, step=self.state.step)

    @property
    def interrupted(self) -> str | None:
        """Name of the signal that stopped the run, or None. An interrupted run does not evaluate or export."""
        return self.schedule.interrupted

    def _sync_requests(self) -> None:
        """Apply the requests, signals and failed saves of each process to all. Every process must call it.

        ``CheckpointSaver.poll`` notes how the pending save of this process ended, and ``_exchange`` shares that. Then
        ``_handle_failed_save`` and ``_handle_signal`` act on it. Each function call costs time in each step.

        Raises:
            SaveError: A save failed on any process, and ``train.on_save_error`` is ``stop``.
        """
        saver = self.saver
        if saver.pending is not None:
            saver.poll()
        failure = saver.failure
        saver.failure = None
        signal_name = self.signals.name
        if self.processes.world_size > 1:
            shared = self._exchange(Reasons(signal_name, failure, self.state.stop_reason))
            failure = shared.failure
            signal_name = shared.signal
        if failure is not None:
            self._handle_failed_save(failure)
        if signal_name is not None and not self.signals.finishing:
            self._handle_signal(signal_name)

    def _exchange(self, own: Reasons) -> Reasons:
        """Share the requests of all processes in ``state``, and return their reasons: for each, that of the first
        process that has one."""
        state = self.state
        has_reason = own != NO_REASONS
        flags = torch.tensor([has_reason, state.evaluate_requested, state.save_requested]).long()
        any_reason, any_evaluation, any_save = self.processes.all_reduce_sum(flags).tolist()
        state.evaluate_requested = bool(any_evaluation)
        state.save_requested = bool(any_save)
        if not any_reason:  # as in a usual step, which exchanges three numbers only
            return NO_REASONS
        every = self.processes.all_gather_object(own)
        state.stop_reason = first_given(reasons.stop for reasons in every)
        return Reasons(
            first_given(reasons.signal for reasons in every),
            first_given(reasons.failure for reasons in every),
            state.stop_reason,
        )

    def _handle_failed_save(self, failure: str) -> None:
        """Count a failed save of any process. Raises a ``SaveError`` if it ends the run."""
        self.saver.errors += 1
        if self.recipe.train.on_save_error == "stop":
            remedy = f"Free disk space. {resume_remedy(self.folder)}"
            raise SaveError(f"{failure}.", code="save-failed", remedy=remedy)
        log.warning(Problem(f"{failure}. Training continues; earlier checkpoints are intact.", code="save-failed"))

    def _handle_signal(self, signal_name: str) -> None:
        """Stop and save after a signal that any process received."""
        self.signals.wait_until_logged()
        self.state.stop_reason = f"{INTERRUPTED} by {signal_name}"
        self.state.request_save()


def first_given(reasons: Iterable[str | None]) -> str | None:
    """The reason of the first process that has one; None: none has."""
    return next((reason for reason in reasons if reason is not None), None)
