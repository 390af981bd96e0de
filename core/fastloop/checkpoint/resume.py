"""Find the checkpoint that a run resumes from, and restore the run's state from it. ``saving`` wrote the state."""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import set_seed
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastloop import checkpoint, log_points
from fastloop.checkpoint.frozen import FrozenParts, restore_parts
from fastloop.checkpoint.learning_rates import set_rates_of_length
from fastloop.checkpoint.settings_record import with_own_code, with_own_growth, without_parameters
from fastloop.checkpoint.state_form import check_form
from fastloop.checkpoint.store import ResumePoint
from fastloop.errors import CheckpointError, NoCheckpoint
from fastloop.problem import Problem, counted
from fastloop.recipe import secrets
from fastloop.runtime.random_states import are_states_of, restore_random_states

if TYPE_CHECKING:
    from fastloop.plugins.plugin import Plugin
    from fastloop.run import Run

log = logging.getLogger("fastloop")

MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of a lookup or an operation on a value of another form."""


def find_resume_point(folder: Path, path: Path) -> ResumePoint | None:
    """The checkpoint for ``--resume PATH``. None: ``path`` is the run's ``folder``, without a checkpoint.

    Raises:
        CheckpointError: Another folder has no checkpoint; all checkpoints are damaged; or the run is complete and kept
            none.
    """
    try:
        return checkpoint.find_newest(path)
    except NoCheckpoint:
        if path.resolve() != folder.resolve():
            raise
        with suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads((path / "summary.json").read_text())["status"] == "completed":
                raise CheckpointError(
                    "no checkpoint, and the run is complete.",
                    code="run-complete",
                    place=str(path),
                    remedy="Start a new run without --resume.",
                ) from None
    log.warning(Problem("no checkpoint yet: the run starts from the beginning.", code="no-checkpoint", place=str(path)))
    return None


def load(run: Run, point: ResumePoint) -> None:
    """Restore a run from a checkpoint.

    Raises:
        CheckpointError: The checkpoint has other weights, or this process does not see it.
    """
    path = point.checkpoint
    for line in point.skipped:
        log.warning(Problem(f"{line}.", code="damaged-checkpoint"))
    if not run.is_main:  # the main process has verified it already
        problem = checkpoint.verify(path, wait=True)
        if problem is not None:
            raise CheckpointError(
                f"process {run.rank} finds: {problem}.",
                code="checkpoint-differs",
                place=str(path),
                remedy="Put the run folder where all processes see the same files.",
            )
    model, saved = checkpoint.read(path, sharded_target(run), run.processes.host_group)
    malformed = f"{path}: malformed state.json. Resume from another checkpoint: "
    with convert_errors(malformed):
        _restore(run, path, model, saved)
        states = dict(saved["plugins"])
    _restore_plugins(run, path, states)
    log.info("resumed from %s at step %d", path, run.state.step)
    _report_end(run)
    with convert_errors(malformed, (*MALFORMED, RuntimeError)):
        _restore_random_states(run, saved["random"])


def _report_end(run: Run) -> None:
    """Log that nothing is left to train: the run is complete, or shorter than the one that saved."""
    schedule = run.schedule
    if not schedule.are_epochs_done() and not schedule.should_stop():
        return
    step = run.state.step
    length = run.total_steps
    if length is not None and step > length:
        log.warning(
            Problem(
                f"the checkpoint is of step {step}, and this run has {counted(length, 'step')}, so nothing is trained: "
                "the model stays that of the checkpoint.",
                code="run-complete",
                remedy="To train on, raise train.epochs or train.max_steps. For a shorter run, start a new one without "
                "--resume.",
            )
        )
        return
    log.info("nothing is left to train at step %d", step)


@contextmanager
def convert_errors(text: str, kinds: tuple[type[Exception], ...] = MALFORMED) -> Iterator[None]:
    """Turn errors of these kinds into a CheckpointError.

    Args:
        text: The beginning of the message, before the type and the text of the error.
    """
    try:
        yield
    except kinds as error:
        raise CheckpointError(f"{text}{_shorten(error)}", code="invalid-state") from error


def _shorten(error: Exception) -> str:
    """The type of an error, and the first 200 characters of its text in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def _restore(run: Run, path: Path, model: dict[str, Tensor], saved: dict[str, Any]) -> None:
    """Restore everything but the states of plugins and the random states from a checkpoint that was read.

    Raises:
        CheckpointError: It is not a checkpoint of this model or optimizer.
        Exception: One of ``MALFORMED``: its state has another form.
    """
    with convert_errors(f"{path}: not a checkpoint of this model: ", (RuntimeError,)):
        run.strategy.load_model_state(run, model)
    if "frozen" in saved:  # checkpoints of early versions lack it
        _restore_frozen(run, saved)
    _restore_optimizer(run, path, saved["optimizer"])
    if run.scheduler is not None:
        _restore_scheduler(run, saved)
    scaler = run.accelerator.scaler
    if scaler is not None:
        check_form(saved["scaler"], scaler.state_dict(), "scaler")
        scaler.load_state_dict(with_own_growth(saved["scaler"], scaler))
    run.state.restore(saved["state"])
    recipe = secrets.hidden(run.recipe.to_dict())
    settings_changed = any(saved["recipe"][key] != recipe[key] for key in ("train", "plugins"))
    if run.interrupted or settings_changed:
        run.state.stop_reason = None  # it may not apply to other epochs or plugins
    run.saver.last_saved_step = run.state.step
    _restore_clock(run, saved["clock"])
    run.scalars.restore(saved["scalars"], run.processes)


def _restore_frozen(run: Run, saved: dict[str, Any]) -> None:
    """Restore what is frozen. Hooks that fire again may change it only if a plugin that changes training is new in this
    run."""
    check_form(saved["frozen"], [""], "frozen")
    modes = saved.get("modes")  # checkpoints of early versions lack it
    if modes is not None:
        check_form(modes, {}, "modes")
        check_form([*modes.values()], [False], "modes")
    parts = FrozenParts(saved["frozen"], modes)
    restore_parts(run, parts)
    run._frozen = parts
    for plugin in run.plugins:
        if plugin.numerics == "changes-training" and plugin.name not in saved["build"]["plugins"]:
            run._frozen = None


def _restore_optimizer(run: Run, path: Path, saved: dict[str, Any]) -> None:
    """Restore the optimizer, but not the settings that select the code of a step."""
    optimizer = with_own_code(saved, run.optimizer.param_groups)
    groups = [without_parameters(group) for group in run.optimizer.param_groups]
    if len(optimizer["param_groups"]) == len(groups):  # else the optimizer reports it
        check_form(optimizer["param_groups"], groups, "optimizer.param_groups")
    problem = "not a checkpoint of this optimizer, which needs the parameters of the run that saved it"
    with convert_errors(f"{path}: {problem}: ", (ValueError,)):
        run.strategy.load_optimizer_state(run, optimizer)


def _restore_scheduler(run: Run, saved: dict[str, Any]) -> None:
    """Restore the scheduler, and check that it has a learning rate for each parameter group. In a run of another
    length, the next step has the rate of that length.

    Raises:
        ValueError: It has another number of them.
    """
    assert run.scheduler is not None
    check_form(saved["scheduler"], run.scheduler.state_dict(), "scheduler")
    run.scheduler.load_state_dict(saved["scheduler"])
    before = saved["recipe"]["train"]
    now = run.recipe.train
    has_other_data = saved.get("data") != run.loaders.fingerprints
    if has_other_data or before["epochs"] != now.epochs or before["max_steps"] != now.max_steps:
        set_rates_of_length(run.scheduler, run.recipe.where)
    groups = run.optimizer.param_groups
    if len(getattr(run.scheduler, "base_lrs", groups)) != len(groups):
        raise ValueError(f"scheduler.base_lrs: expected one for each of the {len(groups)} parameter groups")


def _restore_clock(run: Run, saved: dict[str, Any]) -> None:
    """Continue to count the seconds of the run that saved. The time to start is that of this process."""
    startup = run.clock.seconds["startup"]
    for name, seconds in saved.items():
        run.clock.seconds[name] = float(seconds)
    run.clock.seconds["startup"] = startup


def _restore_plugins(run: Run, path: Path, states: dict[str, Any]) -> None:
    """Restore the states of the plugins, by name.

    Raises:
        CheckpointError: A plugin does not understand its state.
    """
    log_points.start(run)
    for plugin, call in run.plugins.each("load_state"):
        state = states.get(plugin.name)
        if state is not None:
            with _convert_errors_of(plugin, path):
                call(run=run, state=state)


@contextmanager
def _convert_errors_of(plugin: Plugin, path: Path) -> Iterator[None]:
    """Turn an error in ``load_state`` into one that names the plugin, the checkpoint and the line.

    Raises:
        CheckpointError: The plugin does not understand its state.
    """
    try:
        yield
    except (*MALFORMED, AssertionError, RuntimeError) as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise CheckpointError(
            f"plugin {plugin.name!r} cannot load its state: {_shorten(error)} ({Path(line.filename).name}, line "
            f"{line.lineno}). The state is malformed, or of another version of the plugin.",
            code="invalid-state",
            place=str(path),
            remedy="Resume from another checkpoint, or start a new run.",
        ) from error


def _restore_random_states(run: Run, states: list[dict[str, Any]]) -> None:
    """Restore this process's entry of ``states``. With another number of processes, seed with the step and the rank.
    Streams then begin with the first states of the main process: all processes read them in the same order."""
    if len(states) == run.world_size:
        restore_random_states(states[run.rank], run.loaders.own_generators)
        _restore_first_states(run, states[run.rank])
    else:
        saved_by = counted(len(states), "process")
        log.info("saved by %s, resumed on %d: dropout uses other random numbers", saved_by, run.world_size)
        set_seed(run.recipe.train.seed + run.state.step * run.world_size + run.rank)
        _restore_first_states(run, states[0])


def _restore_first_states(run: Run, states: dict[str, Any]) -> None:
    """Restore the first states of the generators of streams. Log if the checkpoint has states of other generators."""
    have_changed = "own" in states and not are_states_of(run.loaders.own_generators, states["own"])
    for split, own in run.loaders.stream_generators.items():
        first_states = states.get("first", {}).get(split)
        if first_states is None:
            continue
        if are_states_of(own.generators, first_states):
            own.first_states = first_states
        else:
            have_changed = True
    if have_changed:
        log.info(
            "The checkpoint has the states of other generators than those that the datasets and collators keep. "
            "Theirs stay as they are."
        )


def sharded_target(run: Run) -> Callable[[str, torch.Size], Tensor | None]:
    """A function for ``checkpoint.read``, which reads sharded tensors of a checkpoint.

    The function gets the name and the shape of a tensor, and returns an empty one to read it into, sharded as this run
    shards the weight or the parameter. If the optimizer of a strategy has the method ``empty_shard(shape)``, the
    returned tensor is sharded as its result.
    """
    weights = run.unwrap_model().state_dict()
    empty_shard = getattr(run.optimizer, "empty_shard", None)
    parameters: list[Tensor] = []  # in the order of the optimizer's state
    for group in run.optimizer.param_groups:
        parameters += group["params"]

    def target_like(name: str, shape: torch.Size) -> Tensor | None:
        """The tensor to read ``model.head.weight`` into, or ``state.optimizer.state.3.exp_avg``: a state of the
        parameter with number 3. None: it is not sharded in this run."""
        optimizer_state = re.match(r"state\.optimizer\.state\.(\d+)\.", name)
        target: Tensor | None = None
        if empty_shard is not None and (optimizer_state is not None or name.startswith("model.")):
            target = empty_shard(shape)
        elif optimizer_state is None:
            target = weights.get(name.removeprefix("model."))
        elif int(optimizer_state[1]) < len(parameters):
            target = parameters[int(optimizer_state[1])]
        if isinstance(target, DTensor) and target.shape == shape:
            return torch.empty_like(target)
        return None

    return target_like
