"""The life cycle of a run, ``open_run``: build in the order of ``hookspecs``, train, test, export, summarize, close."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from safetensors import SafetensorError
from torch import nn

from fastloop import log_points, loop
from fastloop.built_model import check_shapes, refuse_compiled, set_train_mode
from fastloop.checkpoint import resume, run_folder, run_summary
from fastloop.checkpoint.frozen import read_modes
from fastloop.checkpoint.settings_record import SettingsRecord
from fastloop.data import Loaders
from fastloop.data.loaders import divide_step
from fastloop.distributed.accelerator import build_accelerator, restore_shared_state
from fastloop.distributed.at_exit import group_at_exit
from fastloop.distributed.buffers import SharedBuffers
from fastloop.distributed.groups import take_every
from fastloop.distributed.signals import StoppedAtOnce
from fastloop.distributed.skipped_steps import SkippedSteps
from fastloop.errors import FastloopError, PluginError, RecipeError, SaveError, add_remedy
from fastloop.plugins.manager import PluginSet, emptied, make_crash
from fastloop.plugins.plugin import Plugin
from fastloop.plugins.resolve import ResolvedRecipe
from fastloop.problem import Problem, clause, counted
from fastloop.recipe import Recipe
from fastloop.run import Run
from fastloop.runtime import platform_support
from fastloop.runtime.clock import Clock
from fastloop.runtime.files import apply_umask, check_links, sync_folder
from fastloop.runtime.step_folders import resume_remedy
from fastloop.schedule import Schedule
from fastloop.shared_metric_states import group_metrics
from fastloop.splits import TEST, TRAIN
from fastloop.unstepped import UnsteppedParameters

log = logging.getLogger("fastloop")

LOST_PROCESS = ("process-lost", "worker-killed")
"""Codes of errors whose cause is outside of the run: it can be continued as it is."""


@contextmanager
def open_run(resolved: ResolvedRecipe, extra: Sequence[Plugin] = (), resume: Path | None = None) -> Iterator[Run]:
    """Build a run, and tear it down after the block, which trains by ``execute``, or evaluates. Then wait for the other
    processes.

    Args:
        resolved: A result of ``resolve``, for this run only.
        extra: Plugin objects that a command adds, before all others. They are not checked together with the recipe's.
        resume: A run folder or checkpoint to resume from; None: start from the beginning.

    Raises:
        UsageError: The recipe, the data or the environment is wrong.
        FastloopError: The run failed, or a plugin or user code failed in the block.
    """
    run = build(resolved, extra, resume)
    with close_after(run):
        yield run
    _wait_for_others(run)


@contextmanager
def open_data(resolved: ResolvedRecipe, extra: Sequence[Plugin] = ()) -> Iterator[Run]:
    """Begin to build a run, for a command that reads its data, and tear it down after the block.

    The block calls ``build_datasets``, or a hook that reads the data in another way. There is no model, so no hook that
    gets one is called.

    Args:
        resolved: A result of ``resolve``, for this run only.
        extra: See ``open_run``.

    Raises:
        UsageError: The recipe, the data or the environment is wrong.
        FastloopError: A plugin or user code failed.
    """
    if extra:
        resolved = resolved.with_extra(extra)
    run = Run(resolved.recipe, resolved.plugins)
    with _teardown_after_error(run), explain_errors(run):
        _begin_build(run)
        set_seed(run.recipe.train.seed)
        yield run
    error = _teardown(run)
    if error is not None:
        raise error
    _wait_for_others(run)


def _wait_for_others(run: Run) -> None:
    """Wait for the other processes: launchers end them when one exits with a code other than 0."""
    run.processes.barrier()
    group_at_exit.is_idle = True


def build(resolved: ResolvedRecipe, extra: Sequence[Plugin] = (), resume: Path | None = None) -> Run:
    """Build a run, without writing anything. With ``recipe.inference``, build it without training data and
    optimizer."""
    started = perf_counter()
    if extra:
        resolved = resolved.with_extra(extra)
    recipe = resolved.recipe
    build_one = partial(_build, resume_from=resume)
    if recipe.selector is None:
        run = build_one(Run(recipe, resolved.plugins))
    else:
        run = recipe.selector.build_selected(resolved, build_one)
    set_seed(recipe.train.seed + run.rank)  # training draws the same numbers however the model was built
    run.clock.seconds["startup"] = perf_counter() - started
    return run


def _begin_build(run: Run) -> None:
    """Build what comes before the data."""
    run.hooks.check_recipe(recipe=run.recipe, plugins=run.plugins)
    check_task(run.recipe, run.plugins)
    _build_accelerator(run)


def _build(run: Run, resume_from: Path | None) -> Run:
    recipe = run.recipe
    with _teardown_after_error(run), explain_errors(run):
        _begin_build(run)
        if resume_from is not None:
            check_links(run.folder)
            run.hooks.before_resume(run=run, folder=resume_from)
            if run.is_main:  # it chooses: another host may see the newest checkpoint late
                run.resume_point = resume.find_resume_point(run.folder, resume_from)
            run.resume_point = run.processes.all_gather_object(run.resume_point)[0]
        if recipe.inference is None:
            run_folder.check(run)
        set_seed(recipe.train.seed)
        _build_loaders(run)
        _build_model(run)
        run.metrics = run.hooks.build_metrics(run=run)
        if run.metrics is not None:
            group_metrics(run.metrics)
            run.metrics.to(run.device)
        if recipe.inference is None:
            run.hooks.check_run(run=run)
    return run


def execute(run: Run) -> dict[str, Any]:
    """Train, test and export an open run; a signal makes it save and stop. Returns the summary, which is also in the
    run folder.

    Raises:
        FastloopError: The run failed; the summary contains the error.
    """
    run._exit_stack.enter_context(run.signals.handling(run.rank, run.world_size))
    if run.resume_point is not None:
        with explain_errors(run):
            resume.load(run, run.resume_point)
    run_folder.make(run)
    run.processes.barrier()
    try:
        with explain_errors(run):
            loop.fit(run)
            if not run.interrupted:
                if TEST in run.eval_loaders:
                    loop.evaluate(run, TEST)
                _export(run)
                log_points.flush(run)
            _share_disabled(run)  # also a barrier: no process exits while another still needs it
            run._summary = run_summary.summarize(
                run, "stopped" if run.state.stop_reason else "completed", run.state.stop_reason
            )
    except BaseException as error:
        log_points.log_after_error(run)
        is_stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        if not is_stopped:
            run.saver.wait()  # so that the run can resume from this checkpoint
        _summarize_after_error(run, "stopped" if is_stopped else "failed", error)
        raise
    return run._summary


def _summarize_after_error(run: Run, status: str, error: BaseException) -> None:
    """Write the summary of a run that an error ended. An error of the summary is only logged, unless it is the same
    one."""
    try:
        with explain_errors(run):
            run_summary.summarize(run, status, str(error) or type(error).__name__)
    except FastloopError as summary_error:
        if str(summary_error) != str(error):
            log.error(summary_error.problem)


@contextmanager
def close_after(run: Run) -> Iterator[None]:
    """Close a run's loaders and tear it down after the block.

    Raises:
        FastloopError: A plugin or user code failed.
    """
    with ExitStack() as run._exit_stack:
        with _teardown_after_error(run), explain_errors(run), closing(run.loaders):
            yield
        error = _teardown(run)
        if error is not None:
            if run._summary is not None:
                failure = {"status": "failed", "reason": str(error) or type(error).__name__}
                run_summary.write_summary(run, run._summary | failure)
            raise error


def release(run: Run) -> None:
    """Remove the plugins of a closed run. Its weights, metrics and counters stay.

    Plugins keep the run that they are part of. Without this, the reference cycle would keep the model and the state of
    its optimizer until Python's garbage collector happens to run.
    """
    run.plugins = emptied(run.plugins)
    run.hooks = run.plugins.hooks


def _teardown(run: Run) -> BaseException | None:
    """Call every plugin's ``teardown``, then what plugins registered by ``on_teardown``, the last one first. Errors are
    logged; returns the first one."""
    first: BaseException | None = None
    calls = [(plugin, partial(call, run=run)) for plugin, call in run.plugins.each("teardown")]
    for plugin in reversed(run.plugins.plugins):
        calls.append((plugin, partial(_undo, run, plugin)))
    for plugin, call in calls:
        try:
            call()
        except BaseException as error:  # Ctrl-C also ends only one plugin's teardown
            is_meant = isinstance(error, FastloopError | KeyboardInterrupt | StoppedAtOnce)
            failure = error if is_meant else make_crash(plugin, "teardown", error)
            if isinstance(failure, FastloopError):
                log.error(failure.problem)
            else:
                text = str(failure) or f"plugin {plugin.name!r} was stopped in teardown by {type(error).__name__}."
                log.error(Problem(text, code="plugin-crashed"))
            if first is None:
                first = failure
    return first


def _undo(run: Run, plugin: Plugin) -> None:
    """Call what one plugin registered by ``on_teardown``. Its ``on_error`` applies, as to a hook."""
    try:
        plugin._undo.close()
    except (Exception, SystemExit) as error:
        if not run.plugins.manager.handle_error(plugin, "teardown", error):
            raise


@contextmanager
def _teardown_after_error(run: Run) -> Iterator[None]:
    """Tear the run down if the block raises. The error of the block is raised, whatever ``teardown`` raises."""
    try:
        yield
    except BaseException:
        _teardown(run)
        raise


@contextmanager
def explain_errors(run: Run) -> Iterator[None]:
    """Raise errors of plugins, of user code and of lost connections as errors that name their source. Those of lost
    processes also propose to continue the run, if it has a checkpoint."""
    with _proposing_resume(run), run.plugins.attributing_errors():
        try:
            yield
        except Exception:
            with run.processes.explain_lost_connection():  # not around the block, which sets run.processes in a build
                raise


@contextmanager
def _proposing_resume(run: Run) -> Iterator[None]:
    """Add the remedy ``--resume`` to an error of a lost process, if the run has a checkpoint."""
    try:
        yield
    except FastloopError as error:
        if error.problem.code in LOST_PROCESS:
            remedy = resume_remedy(run.folder)
            if remedy:
                add_remedy(error, remedy)
        raise


# -- build -------------------------------------------------------------------------------------------------------------


def _build_accelerator(run: Run) -> None:
    cores = platform_support.cores()
    if cores < len(platform_support.processors()):  # torch does not know the quota of a control group
        torch.set_num_threads(min(torch.get_num_threads(), cores))
    run.settings = run.plugins.configure(run.recipe)
    run.accelerator, run.processes = build_accelerator(run.recipe, run.settings)
    device = run.accelerator.device
    if device.type == "cpu":
        run.device = torch.device("cpu")  # drop the index
        run.clock = Clock(lambda: None)
    else:
        run.device = device
        run.clock = Clock(torch.accelerator.synchronize)
    sharing = take_every(run.processes, run.settings.processes_per_batch)
    micro_batches = divide_step(run.recipe, sharing.world_size)
    run.loaders = Loaders(run.recipe, run.settings, sharing, micro_batches)


def check_task(recipe: Recipe, plugins: PluginSet) -> None:
    """Check that a plugin of a run builds a model, before anything is loaded.

    Raises:
        PluginError: No plugin does: the recipe lists no task.
    """
    implementations = plugins.manager.hook.build_model.get_hookimpls()
    if all(implementation.wrapper for implementation in implementations):
        raise PluginError(
            "no plugin of this recipe builds a model.",
            code="no-task",
            place=recipe.where,
            remedy=(
                "List a task, such as text-classification, with its model and data. `fastloop plugins` shows the tasks."
            ),
        )


def build_datasets(run: Run) -> None:
    """Build the datasets of all splits that a run needs.

    Raises:
        PluginError: No plugin built a training dataset.
        RecipeError: A split is empty, or the one to evaluate or to predict is not there.
    """
    loaders = run.loaders
    trains = run.recipe.inference is None
    datasets = run.hooks.build_datasets(run=run) or {}
    if trains and TRAIN not in datasets:
        raise PluginError(
            f"no plugin built a training dataset. The task in use: {run.plugins.in_slot('task') or 'none'}.",
            code="no-dataset",
            place=run.recipe.where,
            found=f"the splits {', '.join(datasets)}" if datasets else "no split",
            remedy="List a task that reads data, or let build_datasets of a plugin return {'train': dataset}.",
        )
    if loaders.first_split not in datasets:
        raise RecipeError(
            f"there is no split {loaders.first_split!r}. There are: {', '.join(datasets) or 'none'}.",
            code="unknown-split",
            place=f"{run.recipe.where}: data",
            remedy="Choose one of them, or add the data of this one to the recipe.",
        )
    if not trains:
        datasets = {loaders.first_split: datasets[loaders.first_split]}
    loaders.set_datasets(datasets)


def _build_loaders(run: Run) -> None:
    build_datasets(run)
    loaders = run.loaders
    trains = run.recipe.inference is None
    splits = list(loaders.datasets)
    if trains:  # train first: plugins fit the other splits to it
        splits.remove(TRAIN)
        splits.insert(0, TRAIN)
    for split in splits:
        loaders.samplers[split] = run.hooks.build_sampler(run=run, split=split)
        loaders.collators[split] = run.hooks.build_collator(run=run, split=split)
    loaders.build()
    steps = loaders.train.steps_per_epoch() if trains else None
    samples_per_epoch = loaders.train.samples_per_epoch if trains else None
    run.schedule = Schedule(run.recipe.train, run.state, steps, samples_per_epoch, loaders.evaluation)


def _build_model(run: Run) -> None:
    model = run.hooks.build_model(run=run)
    if model is None:
        raise PluginError(
            f"no plugin built a model. The task in use: {run.plugins.in_slot('task') or 'none'}.",
            code="no-model",
            place=run.recipe.where,
            remedy="List a task that builds one, or let build_model of a plugin return a torch.nn.Module.",
        )
    refuse_compiled(model, run.recipe.where)
    if run.recipe.inference is not None:
        run.new_weights = frozenset()
        run._built_model = run.plugins.chain("before_prepare", model, run=run)
        run.model = run.plugins.chain(
            "after_prepare", run.accelerator.prepare_model(run._built_model, evaluation_mode=True), run=run
        )
        run._shared_buffers = SharedBuffers(run._built_model, run.processes, strategy_shares=False)
        return
    set_train_mode(model)
    _share_new_weights(run, model)
    model = run.plugins.chain("before_prepare", model, run=run)
    check_shapes(model, run.recipe.where)  # a plugin may have called the model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PluginError(
            f"of the model's {counted(len(list(model.parameters())), 'parameter')}, none has requires_grad=True.",
            code="nothing-trained",
            place=run.recipe.where,
            remedy="Set requires_grad to True in the code of the model, or remove the plugin that sets it to False.",
        )
    run._built_model = model
    optimizer: Any = run.hooks.build_optimizer(run=run, model=model)  # one optimizer: fastloop wraps a dict
    record = SettingsRecord.make(model, optimizer, run.plugins)
    run.scheduler = run.hooks.build_scheduler(run=run, optimizer=optimizer)
    run.settings_record = record.with_scheduler(run.scheduler)
    model, run.optimizer = _prepare(run, model, optimizer)
    run.model = run.plugins.chain("after_prepare", model, run=run)
    run._built_modes = read_modes(run._built_model)
    run._skipped_steps = SkippedSteps(run.optimizer, run.accelerator.scaler)
    run._unstepped_parameters = UnsteppedParameters(run._built_model, run.optimizer, run.recipe.where)
    run._shared_buffers = SharedBuffers(run._built_model, run.processes, run.strategy.shares_buffers)


def _share_new_weights(run: Run, model: nn.Module) -> None:
    """Give every process the same ``run.new_weights``, and keep only names of trained parameters, one for each.

    A process that builds the model on the meta device reads no checkpoint, so it does not know them. Buffers and
    weights that the task does not train, such as those of an unused pooler, are left out.
    """
    named: set[str] = set()
    for names_of_process in run.processes.all_gather_object(run.new_weights):
        named.update(names_of_process)
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    new_weights = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):  # a tied weight has several names
        if name in named and parameter.requires_grad:
            new_weights.add(first_names[id(parameter)])
    run.new_weights = frozenset(new_weights)


def _prepare(run: Run, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Move the model to its device and apply autocast to its forward; then the strategy wraps the model and its
    optimizer.

    Raises:
        PluginError: The strategy returned something else.
    """
    accelerator = run.accelerator
    strategy = run.strategy
    restore_shared_state(accelerator)
    autocast = accelerator.native_amp
    if not strategy.sets_precision:
        model = accelerator.prepare_model(model, evaluation_mode=True)  # without DDP
        accelerator.native_amp = False
        model._is_accelerate_prepared = False  # type: ignore[assignment]  # a strategy may have it wrapped
    try:
        prepared = strategy.prepare(run, model, optimizer)
    finally:
        accelerator.native_amp = autocast
    if not (isinstance(prepared, tuple) and len(prepared) == 2 and isinstance(prepared[0], nn.Module)):
        raise PluginError(
            f"prepare returned a {type(prepared).__name__}, expected a tuple of the model and the optimizer. "
            "docs/api.md describes the method.",
            code="wrong-result",
            place=f"{run.recipe.where}: plugin {strategy.name!r}",
        )
    model, stepped = prepared
    # several optimizers skip their steps together
    if type(stepped) is AcceleratedOptimizer and hasattr(optimizer, "scale"):
        stepped = optimizer.scale(stepped.scaler)
    return model, stepped


# -- execute -----------------------------------------------------------------------------------------------------------


def _share_disabled(run: Run) -> None:
    """Make every process know which plugins were disabled on others."""
    known = run.plugins.disabled
    for rank, disabled in enumerate(run.processes.all_gather_object(known)):
        for name, reason in disabled.items():
            if name not in known:
                known[name] = f"process {rank}: {reason}"
                log.warning(Problem(f"{known[name]}. It was disabled there.", code="plugin-disabled"))


def _export(run: Run) -> None:
    try:
        run.hooks.export_model(run=run, folder=run.folder / "model")
        run._exported = True
        if run.is_main and (run.folder / "model").is_dir():
            apply_umask(run.folder / "model")
            sync_folder(run.folder / "model")  # before the summary says that the run is complete
    except (OSError, SafetensorError) as error:
        raise SaveError(
            f"{run.folder / 'model'} was not written: {clause(error)}.",
            code="save-failed",
            remedy=f"Free disk space. {resume_remedy(run.folder)}",
        ) from error
