"""One execution of a recipe: what is built for it, its folder, and its life from the recipe to ``summary.json``."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import send_to_device, set_seed
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import BatchSampler, IterableDataset

from fastloop import checkpoint, loop
from fastloop.checkpoint import folder, resume
from fastloop.checks.optimizer import OptimizerCheck
from fastloop.checks.skipped_steps import SkippedSteps
from fastloop.checks.updates import UpdateCheck
from fastloop.data import Loader, fingerprint
from fastloop.distributed import launch
from fastloop.distributed.accelerator import build_accelerator, micro_batches
from fastloop.errors import PluginError, ProcessLost, RecipeError, SaveError, UsageError
from fastloop.hooks import Resolution
from fastloop.recipe import Recipe
from fastloop.runtime.clock import Clock
from fastloop.runtime.regions import each, region
from fastloop.state import INTERRUPTED, Batch, DataLoaderDraft, OptimizerDraft, State

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

log = logging.getLogger("fastloop")

ALONE: AbstractContextManager[Any] = nullcontext()


class Totals(NamedTuple):
    """What the micro-batches of a step add up to; see ``Batch``."""

    weight: int
    samples: int
    tokens: int
    unreadable: int


class Run:
    """What hooks get as ``run``. Everything is built by the constructor, in the order of ``hookspecs``.

    Attributes:
        recipe: The resolved recipe.
        resolution: The plugins.
        hooks: Calls a hook on all of them.
        state: Counters and requests.
        folder: The run folder.
        accelerator: Accelerate's ``Accelerator``.
        loading: How batches are loaded: the finished ``DataLoaderDraft``.
        optimizer_arguments: From the finished ``OptimizerDraft``: what the optimizer's class gets beside ``lr`` and ``weight_decay``.
        datasets: Split -> dataset.
        samplers: Split -> its ``BatchSampler``, or None for our own order.
        collators: Split -> collator.
        model: As trained: on its device, wrapped, compiled. ``unwrapped()`` is the model as built.
        optimizer: Torch's optimizer, or Accelerate's wrapper where loss scaling or a strategy needs it.
        scheduler: Stepped by the loop, never prepared by Accelerate (which would step it once a process).
        metrics: The task's metrics, or None.
        trained: Whether training is over, and plugins may put other weights in place.
        signalled: The signal that asked this process to end; ``agree`` acts on it.
        writing: The checkpoint being written on this process; ``agree`` acts on its failure.
        saved_at: Step of the newest checkpoint that is known to be there; None: there is none.
        save_failure: What could not be saved, until ``agree`` acts on it.
        save_errors: How many saves failed, on any process.
        host_group: The processes' group for what is on the CPU; None: the default one, or there is one process.
        total_steps: Optimizer steps of the whole run; None for data of unknown length without ``max_steps``.
        clock: Seconds by what they were spent on.
        update_check: Examines the first optimizer steps; None once each trained parameter is known to change.

    Raises:
        UsageError: Anything wrong with what was asked; nothing is written then.
    """

    def __init__(self, recipe: Recipe, resolution: Resolution, resume_from: Path | None = None) -> None:
        started = perf_counter()
        self.recipe, self.resolution, self.hooks = recipe, resolution, resolution.hooks
        self.state, self.folder = State(), Path(recipe.output)
        self.trained, self.world_size = False, 1
        self.signalled: str | None = None
        self._told: threading.Event | None = None
        self.writing: futures.Future[None] | None = None
        self.writing_step = 0
        self.saved_at: int | None = None
        self.save_failure: str | None = None
        self.save_errors = 0
        self.lock: folder.Lock | None = None
        self.loaders: list[Loader] = []
        with resolution.blaming(), self._connected():
            self.hooks.check_recipe(recipe=recipe)
            self.found = resume.find(self, resume_from) if resume_from is not None else None
            folder.check(self)
            self._build_accelerator()
            set_seed(recipe.train.seed)
            self._build_loaders()
            self._build_model()
            self.metrics: MetricCollection | None = self.hooks.build_metrics(run=self)
            if self.metrics is not None:
                self.metrics.to(self.device)
            self.hooks.check_run(run=self)
        set_seed(recipe.train.seed + self.rank)  # training draws the same numbers however the model was made
        self.clock.seconds["startup"] = perf_counter() - started

    # -- building ------------------------------------------------------------------------------------------------------

    def _build_accelerator(self) -> None:
        self.accelerator = build_accelerator(self.recipe, self.resolution)
        device = self.accelerator.device
        self.device: torch.device = device if device.type != "cpu" else torch.device("cpu")  # which has no index
        self.world_size = self.accelerator.num_processes
        self.rank: int = self.accelerator.process_index
        self.is_main: bool = self.accelerator.is_main_process
        self.host_group = torch.distributed.new_group(backend="gloo") if self.world_size > 1 and self.device.type != "cpu" else None
        self.clock = Clock(torch.accelerator.synchronize if self.device.type != "cpu" else lambda: None)
        self.device_batch_size, self.micro_steps = micro_batches(self.recipe, self.world_size)
        loading = DataLoaderDraft(pin_memory=self.device.type == "cuda")
        self.loading: DataLoaderDraft = self.resolution.draft("configure_dataloader", loading)
        self.optimizer_arguments: Mapping[str, Any] = self.resolution.draft("configure_optimizer", OptimizerDraft()).arguments

    def _build_loaders(self) -> None:
        train = self.recipe.train
        self.datasets: dict[str, Any] = dict(self.hooks.build_datasets(run=self) or {})
        if "train" not in self.datasets:
            raise PluginError(f"{self.recipe.where}: no plugin built a training dataset. The task in use: {self._task()}.")
        for split, dataset in self.datasets.items():
            if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__") and len(dataset) == 0:
                raise RecipeError(f"{self.recipe.where}: data: the {split} split is empty. Expected at least one sample.")
        self.samplers: dict[str, BatchSampler | None] = {}
        self.collators: dict[str, Any] = {}
        for split in sorted(self.datasets, key=lambda split: split != "train"):  # train first: plugins adapt the others to it
            self.samplers[split] = self.hooks.build_sampler(run=self, split=split)
            self.collators[split] = self.hooks.build_collator(run=self, split=split)
        self.train_loader = self.loader("train", self.device_batch_size)
        self.eval_loaders = {split: self.loader(split, self._eval_batch_size(split)) for split in self.datasets if split != "train"}
        self._check_same_order()
        steps = self.train_loader.steps_per_epoch()
        limits = [limit for limit in (train.max_steps, steps and steps * train.epochs) if limit is not None]
        self.total_steps: int | None = min(limits) if limits else None

    def _eval_batch_size(self, split: str) -> int:
        sampler = self.samplers[split]
        return self.recipe.train.eval_batch_size or (sampler.batch_size if sampler is not None else self.device_batch_size)

    def _check_same_order(self) -> None:
        """Every process must draw the same samples.

        Raises:
            UsageError: A sampler gives another order on another process.
        """
        for split, orders in ((split, {found[split] for found in self.gather(self.orders)}) for split in self.orders):
            if len(orders) > 1:
                raise UsageError(
                    f"the {split} split's sampler gives another order on each process. It must not depend on the process: not on its rank, "
                    "nor on the order of a set of strings (PYTHONHASHSEED)."
                )

    @cached_property
    def orders(self) -> dict[str, str]:
        """Split -> what the order of its samples is known again by; empty for our own."""
        loaders = {"train": self.train_loader, **self.eval_loaders}
        return {split: loader.sampler.fingerprint() if loader.sampler is not None else "" for split, loader in loaders.items()}

    def loader(self, split: str, size: int, pieces: int = 1) -> Loader:
        """A loader of a split in micro-batches of ``size`` samples; those that a plugin splits are cut into ``pieces`` further ones."""
        train = self.recipe.train
        loader = Loader(
            self.datasets[split],
            self.collators[split],
            self.loading,
            batch_size=train.batch_size if split == "train" else size * self.world_size,
            device_batch_size=size,
            pieces=pieces,
            rank=self.rank,
            world_size=self.world_size,
            seed=train.seed,
            shuffle=split == "train",
            split=split,
            sampler=self.samplers[split],
        )
        self.loaders.append(loader)
        return loader

    def divide(self, split: str, size: int, pieces: int = 1) -> None:
        """From here on read a split in other micro-batches. A step keeps its samples; see ``loader``."""
        old = self.train_loader if split == "train" else self.eval_loaders[split]
        old.close()
        self.loaders.remove(old)
        loader = self.loader(split, size, pieces)
        if split == "train":
            self.train_loader, self.device_batch_size, self.micro_steps = loader, size, loader.micro_steps
        else:
            self.eval_loaders[split] = loader

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Split -> what its dataset is known again by at --resume."""
        return {split: f"{fingerprint(dataset)} {self.orders[split]}".strip() for split, dataset in self.datasets.items()}

    def _task(self) -> str:
        return next((plugin.name for plugin in self.resolution.plugins if plugin.slot == "task"), "none")

    def _build_model(self) -> None:
        model = self.hooks.build_model(run=self)
        if model is None:
            raise PluginError(f"{self.recipe.where}: no plugin built a model. The task in use: {self._task()}.")
        _train_mode(model)
        model = self.resolution.chain("before_prepare", model, run=self)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise PluginError(f"{self.recipe.where}: the model has no parameter that is trained.")
        optimizer = self.hooks.build_optimizer(run=self, model=model)
        check = OptimizerCheck(self, model, optimizer)
        self.scheduler = self.hooks.build_scheduler(run=self, optimizer=optimizer)
        self.optimizer: Any
        self._built: nn.Module = model
        model, self.optimizer = self.hooks.prepare(run=self, model=model, optimizer=optimizer)
        check.prepared(model)
        self.model: nn.Module = self.resolution.chain("after_prepare", model, check.after_prepare, run=self)
        self.skipped_steps = SkippedSteps(self.optimizer, self.accelerator.scaler)
        self.update_check: UpdateCheck | None = UpdateCheck(check.accepted)

    def unwrapped(self) -> nn.Module:
        """The model as built, without what Accelerate, a strategy or a compiler put around it."""
        return self._built

    def weights(self) -> dict[str, Tensor]:
        """The model's weights, whole, on the CPU, for the main process to write; empty on the others. Every process must come by."""
        state: dict[str, Tensor] = self.hooks.model_state(run=self)
        weights = {}
        for name, tensor in state.items():
            full = checkpoint.whole(tensor)  # one at a time: the device never holds two
            if self.is_main:
                weights[name] = full.cpu()
        return weights

    # -- what the loop asks ----------------------------------------------------------------------------------------------

    def metric_names(self) -> list[str]:
        """What an evaluation measures."""
        added = [name for plugin in self.resolution.plugins for name in plugin.adds_metrics]
        return ["loss", *(map(str, self.metrics) if self.metrics is not None else ()), *added]

    def placed(self, steps: Iterable[list[Batch]]) -> Iterable[list[Batch]]:
        """The steps' batches with their inputs on the device."""
        steps = each("data", steps)
        return map(self._place, steps) if self.loading.placing is None else self.loading.placing(steps, self._place)

    def _place(self, batches: list[Batch]) -> list[Batch]:
        if self.device.type != "cpu":
            with region("to device"):
                for batch in batches:
                    batch.inputs = send_to_device(batch.inputs, self.device, non_blocking=self.loading.pin_memory)
        return batches

    def totals(self, batches: list[Batch]) -> Totals:
        """What a step's micro-batches add up to, over all processes."""
        weight = samples = tokens = unreadable = 0
        for batch in batches:
            weight, samples, tokens = weight + batch.weight, samples + batch.samples, tokens + batch.tokens
            unreadable += len(batch.unreadable)
        if self.world_size == 1:
            return Totals(weight, samples, tokens, unreadable)
        sums = torch.tensor([weight, samples, tokens, unreadable], dtype=torch.int64)
        return Totals(*map(int, self.sum_over_processes(sums).tolist()))

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Holds back the exchange of gradients between processes until a step's last micro-step."""
        if self.world_size == 1 or last:
            return ALONE
        held: AbstractContextManager[Any] = self.accelerator.no_sync(self.model)
        return held

    def sum_over_processes(self, tensor: Tensor) -> Tensor:
        """The sum of a CPU tensor over all processes. It does not wait for the device."""
        if self.world_size > 1:
            tensor = tensor.clone()
            torch.distributed.all_reduce(tensor, group=self.host_group)
        return tensor

    def mean_over_processes(self, tensor: Tensor) -> Tensor:
        """The mean of a tensor on the device over all processes, in place. The host does not wait for it."""
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)
            tensor /= self.world_size
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Each process's value, by rank, on every process. It goes through pickle."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value, group=self.host_group)
        return values

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.world_size > 1:
            torch.distributed.barrier(group=self.host_group)

    def agree(self) -> None:
        """Make requests the same on all processes: what one was asked for, all do. Signals, and saves that failed, count from here on.

        Raises:
            SaveError: A save failed on one of them, and ``train.on_save_error`` says stop.
        """
        state, signalled = self.state, self.signalled
        resume.look(self)
        failure, self.save_failure = self.save_failure, None
        if self.world_size > 1:
            reasons = (signalled, failure, state.stop_reason)
            wishes = torch.tensor([*(reason is not None for reason in reasons), state.evaluate_requested, state.save_requested])
            *any_reason, state.evaluate_requested, state.save_requested = map(bool, self.sum_over_processes(wishes.long()).tolist())
            if any(any_reason):
                signalled, failure, state.stop_reason = (next(filter(None, each), None) for each in zip(*self.gather(reasons), strict=True))
        if failure is not None:
            self.save_errors += 1
            if self.recipe.train.on_save_error == "stop":
                raise SaveError(f"{failure}. Make room, and go on with --resume.")
            log.warning("%s. Training goes on; what was saved before is whole", failure)
        if signalled is not None and not self.trained:
            if self._told is not None:
                self._told.wait(1)
            state.stop_reason = f"{INTERRUPTED} by {signalled}"
            state.request_save()

    def step_was_skipped(self) -> bool:
        """Whether fp16's loss scaling found an overflow and skipped the newest optimizer step. The step and its samples count all the
        same. With a fused optimizer the first call after a step waits for the device."""
        return self.skipped_steps.newest()

    def count(self, totals: Totals) -> None:
        """Add a finished step to the counters."""
        state = self.state
        state.step += 1
        state.samples += totals.samples
        state.epoch_samples += totals.samples + totals.unreadable
        state.tokens += totals.tokens
        state.unreadable += totals.unreadable

    def leaves_out(self, batches: list[Batch]) -> bool:
        """Whether the step that begins here is not to be trained. Its samples count as drawn."""
        state = self.state
        if [state.epoch, state.epoch_samples] not in state.left_out:
            return False
        totals = self.totals(batches)
        state.epoch_samples += totals.samples + totals.unreadable
        return True

    def epoch_done(self) -> bool:
        """Whether every sample of the epoch under way was drawn. Data of unknown length is done when the loader ends."""
        sampler = self.train_loader.sampler
        return not self.stopping() if sampler is None else self.state.epoch_samples >= sampler.size

    @property
    def interrupted(self) -> str | None:
        """The signal by which the run was asked to end: no further evaluation, no export. None: it was not."""
        reason = self.state.stop_reason or ""
        return reason.rpartition(" ")[2] if reason.startswith(INTERRUPTED) else None

    def stopping(self) -> bool:
        """Whether training ends after this step."""
        limit = self.recipe.train.max_steps
        return self.state.stop_reason is not None or (limit is not None and self.state.step >= limit)

    def evaluation_due(self, epoch_ended: bool = False) -> bool:
        """Whether to evaluate now."""
        state, every = self.state, self.recipe.train.evaluate_every
        if "evaluate" not in self.eval_loaders or state.evaluated_at == state.step or self.interrupted:
            return False
        if state.evaluate_requested:
            state.evaluate_requested = False
            return True
        return epoch_ended if every == "epoch" else every is not None and state.step > 0 and state.step % every == 0

    def saving_due(self, epoch_ended: bool = False) -> bool:
        """Whether to save now: when asked, when ``train.save_every`` says so, and at the run's end."""
        state, every = self.state, self.recipe.train.save_every
        if state.save_requested:
            state.save_requested = False
            return True
        if every is None:
            return False
        if epoch_ended:
            return every == "epoch" or self.stopping() or state.epoch >= self.recipe.train.epochs
        if isinstance(every, int) and state.step % every == 0:
            return True
        return self.stopping() and not self.epoch_done()  # else the epoch's end saves

    # -- the whole life --------------------------------------------------------------------------------------------------

    def execute(self) -> dict[str, Any]:
        """Train, test, export, summarise. Returns the summary, which is also in the run folder.

        Raises:
            FastloopError: The run failed; the summary says so too.
        """
        try:
            with self.resolution.blaming(), self._connected():
                if self.found is not None:
                    resume.load(self, *self.found)
                folder.make(self)
                self.wait()
            return self._execute()
        finally:
            if self.lock is not None:
                self.lock.release()

    def _execute(self) -> dict[str, Any]:
        try:
            with self.resolution.blaming(), self._connected():
                loop.fit(self)
                if not self.interrupted:
                    if "test" in self.eval_loaders:
                        loop.evaluate(self, "test")
                    self._export()
                self._tell_disabled()  # no process ends while another still needs it
        except BaseException as error:
            at_once = isinstance(error, KeyboardInterrupt | SystemExit)
            if self.writing is not None and not at_once:
                futures.wait([self.writing])  # the run can go on from it
            self.hooks.on_exception(run=self, error=error)
            try:
                folder.summarise(self, "stopped" if at_once else "failed", str(error) or type(error).__name__)
            except SaveError as another:
                log.error("%s", another)  # what came first counts for more
            raise
        finally:
            for loader in self.loaders:
                loader.close()
        return folder.summarise(self, "stopped" if self.state.stop_reason else "completed", self.state.stop_reason)

    def _tell_disabled(self) -> None:
        """Have every process know which plugins were disabled on others."""
        known = self.resolution.disabled
        for rank, disabled in enumerate(self.gather(known)):
            for name, why in disabled.items():
                if name not in known:
                    known[name] = f"process {rank}: {why}"
                    log.warning("%s. It was disabled there", known[name])

    def _export(self) -> None:
        try:
            self.hooks.export_model(run=self, folder=self.folder / "model")
        except (OSError, SafetensorError) as error:
            raise SaveError(f"{self.folder / 'model'} was not written: {error}. Make room, and go on with --resume.") from error

    def close(self) -> None:
        """Leave the group of processes, when nothing is to be run in it any more."""
        if self.world_size > 1:
            torch.distributed.destroy_process_group()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """What goes wrong because another process is gone is said as such: the cause is in that process's message."""
        try:
            yield
        except (RuntimeError, torch.distributed.DistError) as error:
            if self.world_size == 1 or not (isinstance(error, torch.distributed.DistError) or "gloo" in str(error)):
                raise
            raise ProcessLost(f"process {self.rank} of {self.world_size} lost the connection to another, which ended first.") from error

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """While inside, Ctrl-C, SIGTERM and SIGUSR1 save at the step's end and stop; the same one once more stops at once.

        When training is over there is nothing left to save, so the first one lets the test and the export end.
        """
        first: dict[int, float] = {}
        over = threading.Event()
        launched = self.world_size > 1 or "LOCAL_RANK" in os.environ

        def ask(signum: int, frame: Any) -> None:
            if signum in first and launched and perf_counter() - first[signum] < 1:
                return  # launchers pass on what a terminal or a scheduler sent to all already
            if signum in first:
                launch.stop_now(signum, frame)
            first[signum] = perf_counter()
            if self.signalled is None:
                self._told = told = threading.Event()
                self.signalled = signal.Signals(signum).name
                _thread.start_new_thread(self._stop_in_time, (told, over))  # a handler may neither print nor wait for a lock

        with launch.on_signals(ask):
            try:
                yield
            finally:
                over.set()

    def _stop_in_time(self, told: threading.Event, over: threading.Event) -> None:
        """In a thread, once a signal came: say what it does, and see that the process ends."""
        what = "training is over, what is left of the run is finished" if self.trained else "saving at the end of this step"
        log.warning("%s by %s: %s (once more to stop at once)", INTERRUPTED, self.signalled, what)
        told.set()
        if not over.wait(launch.STOP_WITHIN) and not self.trained:
            print(f"error: process {self.rank} did not stop within {launch.STOP_WITHIN:g} seconds: ended.", file=sys.stderr, flush=True)
            os._exit(launch.STOPPED)


def _train_mode(model: nn.Module) -> None:
    """Put a model in train mode. Parts that a model in train mode holds in eval mode (frozen ones) stay so, and are said."""
    if not model.training:  # as from_pretrained leaves it
        model.train()
    frozen = [name for name, module in model.named_modules() if not module.training]
    if frozen:
        log.warning(
            "%d modules stay in eval mode, as the model has them: %s%s", len(frozen), ", ".join(frozen[:3]), ", ..." * (len(frozen) > 3)
        )
