"""Checks what plugins' hooks return and change.

Each implementation is replaced by one that compares the result with the hook's return type in ``hookspecs``. A hook
without a result must leave the counters, the batches and the optimizer alone, no hook may leave the model in eval mode,
and a read-only plugin must change no number that training depends on. The hooks of a step are restored after ``STEPS``
steps, so later steps cost nothing. ``train_step`` is checked in every step.

The tables ``RESULT_CHECKS`` and ``CALLS`` show which hooks have more checks than others, and the functions for them.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fastloop import hookspecs
from fastloop.checks.hook_types import find_wrong_type, return_type
from fastloop.checks.read_only import ReadOnlyChecks
from fastloop.errors import PluginError
from fastloop.plugins.hook_replacement import replace
from fastloop.plugins.plugin import Plugin, hookimpl
from fastloop.problem import Problem, clause
from fastloop.unstepped import stepped_parameters

if TYPE_CHECKING:
    from fastloop.plugins.manager import PluginSet
    from fastloop.recipe import Recipe
    from fastloop.run import Run

log = logging.getLogger("fastloop")

STEPS = 8
"""Optimizer steps in which the hooks of a step are checked: a plugin that acts in every few steps acts at least
once."""
STEP_HOOKS = {"before_step", "compute_loss", "after_backward", "before_optimizer_step", "after_step"}
"""Hooks that are called in every step."""
EARLY_HOOKS = {"check_recipe", "before_resume"}
"""Hooks before ``build_datasets``, with which ``HookChecks`` begins. They have no result."""
NEEDED = {
    "build_datasets", "build_model", "build_optimizer", "compute_loss", "evaluate", "train_step", "write_checkpoint",
}  # fmt: skip
"""*First* hooks whose result the run needs: a wrapper must return one."""
AFTER_TRAINING = {"after_fit", "export_model", "write_summary"}
"""Hooks after the last step, which may leave the model in eval mode."""
FILLED_BY_PLUGINS = {"compile_seconds"}
"""Keys of the summary that fastloop sets to 0 for a plugin to replace."""
COUNTERS = ("step", "epoch", "epoch_samples", "samples", "tokens")
REMEDIES = {
    "check_recipe": "To refuse a recipe, raise fastloop.RecipeError.",
    "build_sampler": "Put the sampler into torch.utils.data.BatchSampler(sampler, batch_size, drop_last).",
    "build_scheduler": "fastloop steps a scheduler after each optimizer step: use one such as CosineAnnealingLR. To "
    "step by a metric, keep the scheduler in a plugin whose after_evaluate calls its step(metrics['loss']).",
    "compute_loss": "Return fastloop.Output(loss), whose loss is the mean over the micro-batch: a tensor of shape ().",
    "train_step": "Return the step's loss, 0-dim and detached, as run.accumulate_gradients does.",
    "stepped the optimizer": "Only run.apply_gradients may. A plugin that steps more often implements train_step.",
    "changed the batches": "Counters and resume depend on them. It may set `inputs` and `loss_weight` of a batch.",
    "left the model in eval mode": "The next steps would train without dropout. For passes of its own, a plugin uses "
    "`with fastloop.evaluation_results.evaluating(run.model):`, which restores the mode of each module. Otherwise call "
    "model.train().",
    "changed a counter": "Only fastloop counts. To end training, call run.state.request_stop(reason).",
}
"""Hook or problem -> the advice for the plugin's author."""
CHECKS: WeakValueDictionary[int, HookChecks] = WeakValueDictionary()
"""``id`` of a run -> the checks of its hooks, which live as long as the replaced functions."""


@hookimpl(tryfirst=True)
def check_recipe(recipe: Recipe, plugins: PluginSet) -> None:
    """Check the results of ``EARLY_HOOKS``: a plugin that returns False from ``check_recipe`` refuses nothing."""

    def refuse_result(plugin: Plugin, hook: str, function: Callable[..., Any], wraps: bool) -> Callable[..., Any]:
        if wraps or hook not in EARLY_HOOKS:
            return function

        def call(*arguments: Any) -> None:
            result = function(*arguments)
            if result is not None:
                raise PluginError(
                    f"{hook} returned {find_wrong_type(hook, result)}. "
                    f"{REMEDIES.get(hook, 'docs/loop.md describes the hook.')}",
                    code="wrong-result",
                    place=f"{recipe.where}: plugin {plugin.name!r}",
                )

        return call

    replace(plugins, refuse_result)


@hookimpl(tryfirst=True)
def build_datasets(run: Run) -> None:
    """Begin with the first hook that gets the run."""
    CHECKS[id(run)] = HookChecks(run)


@hookimpl(tryfirst=True)
def before_fit(run: Run) -> None:
    """Begin with the hooks of a step: trials of a model may call them before."""
    CHECKS[id(run)].begin()


@hookimpl(trylast=True)
def write_summary(run: Run) -> None:
    """End with the run, if it had fewer steps."""
    checks = CHECKS.get(id(run))
    if checks is not None:
        checks.close()


class HookChecks:
    """Checks the hooks of a run until ``close``.

    Raises:
        PluginError: In the call of a hook: its result has another type, or it changed what only fastloop changes.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.optimizer_steps = 0
        self.last_step = 0
        self._counting: RemovableHandle | None = None
        self.has_loss: dict[str, bool] = {}  # plugin -> whether its compute_loss returned one
        self.has_logged: set[str] = set()  # plugins whose log_scalars was checked outside of the first steps
        self.read_only = ReadOnlyChecks(run)
        self._restore = replace(run.plugins, self._replace)

    def close(self) -> None:
        """Restore the hooks of a step, and warn about plugins that computed no loss."""
        if self._counting is not None:
            self._restore(STEP_HOOKS)
            self._counting.remove()
            self._counting = None
        for name in [name for name, has_loss in self.has_loss.items() if not has_loss]:
            log.warning(
                Problem(
                    "compute_loss returned None each time, so another plugin computes the loss.",
                    code="no-result",
                    place=f"plugin {name!r}",
                    remedy=REMEDIES["compute_loss"],
                )
            )
        self.has_loss = {}

    def _replace(self, plugin: Plugin, hook: str, function: Callable[..., Any], wraps: bool) -> Callable[..., Any]:
        """The function that replaces an implementation."""
        # an error at the end of a run would hide the run's own
        if hook == "teardown" or not hasattr(hookspecs, hook):
            return function
        is_last = hook == "compute_loss" and [*self.run.plugins.each(hook)][-1][0] is plugin
        needs_result = hook in NEEDED if wraps else is_last
        implementation = Implementation(self, plugin, hook, function, wraps, needs_result)
        call_implementation = CALLS.get(hook, call_checked)

        def call(*arguments: Any) -> Any:
            return call_implementation(implementation, arguments)

        def call_wrapper(*arguments: Any) -> Generator[None, Any, Any]:
            with self.keep_train_mode(implementation, arguments):
                result = yield from function(*arguments)
                check_result(implementation, result)
                return result

        return call_wrapper if wraps else call

    def read_guarded(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """Read what a hook without a result must leave alone: problem -> the value that changes with it."""
        batches: list[Any] = []
        for value in arguments:
            if isinstance(value, list):
                batches += value
        counts = []
        for batch in batches:
            counts += [getattr(batch, name, None) for name in ("samples", "tokens", "ids")]
        counters = {f"changed run.state.{name}": getattr(self.run.state, name) for name in COUNTERS}
        return counters | {
            "stepped the optimizer": self.optimizer_steps,
            "changed the batches": [*map(id, batches), *counts],
        }

    @contextmanager
    def keep_train_mode(self, implementation: Implementation, arguments: tuple[Any, ...]) -> Iterator[None]:
        """Check that the block, a call of a hook, does not put the model that is trained into eval mode."""
        ends_training = implementation.hook in AFTER_TRAINING
        given = next((value for value in arguments if isinstance(value, nn.Module)), None)
        model = getattr(self.run, "_built_model", given)  # in before_prepare, it is not there yet
        trained = model if model is not None and model.training and not ends_training else None
        yield
        if trained is not None and not trained.training:
            refuse_eval_mode(implementation)

    def begin(self) -> None:
        """Check the hooks of the next ``STEPS`` steps."""
        self.last_step = self.run.state.step + STEPS
        self._counting = register_optimizer_step_pre_hook(self._count_optimizer_step)

    def close_after_first_steps(self) -> None:
        """Call ``close`` once ``STEPS`` steps are done."""
        if self.is_in_first_steps() and self.run.state.step >= self.last_step:
            self.close()

    def is_in_first_steps(self) -> bool:
        """Whether the hooks of a step are checked."""
        return self._counting is not None

    def _count_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        stepped = set(map(id, stepped_parameters(self.run.optimizer)))  # a plugin may step other ones
        if any(id(parameter) in stepped for parameter in optimizer.param_groups[0]["params"]):
            self.optimizer_steps += 1


@dataclass(frozen=True, eq=False)
class Implementation:
    """A plugin's implementation of a hook.

    Attributes:
        checks: Those of the run.
        hook: The name of the hook.
        function: The plugin's method.
        wraps: Whether it is a wrapper.
        needs_result: Whether the run needs its result: None is wrong, too.
    """

    checks: HookChecks
    plugin: Plugin
    hook: str
    function: Callable[..., Any]
    wraps: bool
    needs_result: bool

    @property
    def where(self) -> str:
        """For messages: the recipe, the plugin and the hook."""
        return f"{self.checks.run.recipe.where}: plugin {self.plugin.name!r}: {self.hook}"


def call_checked(implementation: Implementation, arguments: tuple[Any, ...]) -> Any:
    """Call an implementation that is no wrapper, and check its result and what it changed."""
    checks = implementation.checks
    hook = implementation.hook
    before = checks.read_guarded(arguments)
    with checks.keep_train_mode(implementation, arguments), checks.read_only.watching(implementation.plugin, hook):
        result = implementation.function(*arguments)
        check_result(implementation, result)
    if return_type(hook) == "None":
        for problem, value in checks.read_guarded(arguments).items():
            if value != before[problem]:
                remedy = REMEDIES.get(problem, REMEDIES["changed a counter"])
                raise PluginError(f"{implementation.where} {problem}.", code="wrong-result", remedy=remedy)
    return result


def call_train_step(implementation: Implementation, arguments: tuple[Any, ...]) -> Any:
    """Call ``train_step``, and check only its result and the mode of the model: it is checked in every step."""
    with implementation.checks.keep_train_mode(implementation, arguments):
        result = implementation.function(*arguments)
        check_result(implementation, result)
        return result


def call_step_hook(implementation: Implementation, arguments: tuple[Any, ...]) -> Any:
    """Call a hook of a step: with checks in the first steps."""
    checks = implementation.checks
    checks.close_after_first_steps()
    if not checks.is_in_first_steps():
        return implementation.function(*arguments)
    return call_checked(implementation, arguments)


def call_compute_loss(implementation: Implementation, arguments: tuple[Any, ...]) -> Any:
    """Call ``compute_loss`` as a hook of a step, and note in the first steps whether the plugin ever computes the
    loss."""
    checks = implementation.checks
    name = implementation.plugin.name
    result = call_step_hook(implementation, arguments)
    if checks.is_in_first_steps():
        checks.has_loss[name] = checks.has_loss.get(name, False) or result is not None
    return result


def call_log_scalars(implementation: Implementation, arguments: tuple[Any, ...]) -> Any:
    """Call ``log_scalars``: with checks in the first steps, and at the first log point after them, which may be the
    first one of all."""
    checks = implementation.checks
    name = implementation.plugin.name
    checks.close_after_first_steps()
    if not checks.is_in_first_steps():
        if name in checks.has_logged:
            return implementation.function(*arguments)
        checks.has_logged.add(name)
    return call_checked(implementation, arguments)


def call_after_evaluate(implementation: Implementation, arguments: tuple[Any, ...]) -> Any:
    """Call ``after_evaluate`` with a copy of the metrics, so that a plugin cannot change those of others."""
    own_arguments: list[Any] = []
    for value in arguments:
        if isinstance(value, dict):
            value = dict(value)
        own_arguments.append(value)
    return call_checked(implementation, tuple(own_arguments))


def call_write_summary(implementation: Implementation, arguments: tuple[Any, ...]) -> Any:
    """Call ``write_summary``. Undo its changes of the keys of others, and check that its own have JSON values."""
    before = copy.deepcopy(_summary_in(arguments))
    result = call_checked(implementation, arguments)
    summary = _summary_in(arguments)
    _restore_keys(implementation.where, before, summary)
    _check_json(implementation.where, summary)
    return result


CALLS: dict[str, Callable[[Implementation, tuple[Any, ...]], Any]] = {
    **dict.fromkeys(STEP_HOOKS, call_step_hook),
    "compute_loss": call_compute_loss,
    "train_step": call_train_step,
    "log_scalars": call_log_scalars,
    "after_evaluate": call_after_evaluate,
    "write_summary": call_write_summary,
}
"""Hook -> the function that calls its implementations, except wrappers. Other hooks have ``call_checked``."""


def check_result(implementation: Implementation, result: Any) -> None:
    """Check what an implementation returned, also a wrapper.

    Raises:
        PluginError: The result is wrong.
    """
    check = RESULT_CHECKS.get(implementation.hook, check_type)
    check(implementation, result)


def check_type(implementation: Implementation, result: Any) -> None:
    """Check that a result has the type that ``hookspecs`` declares. It may be None, unless the run needs it."""
    if result is None and not implementation.needs_result:
        return
    problem = find_wrong_type(implementation.hook, result)
    if problem:
        raise _wrong_result(implementation, problem)


def check_before_prepare(implementation: Implementation, result: Any) -> None:
    """Check the type of the result of ``before_prepare``, and that a model is in train mode."""
    check_type(implementation, result)
    if isinstance(result, nn.Module) and not result.training:
        refuse_eval_mode(implementation)


def check_build_scheduler(implementation: Implementation, result: Any) -> None:
    """Check the type of the result of ``build_scheduler``, and that no scheduler steps by a metric."""
    check_type(implementation, result)
    schedulers = result.values() if isinstance(result, Mapping) else [result]
    if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers):
        raise _wrong_result(implementation, "a ReduceLROnPlateau, which steps by a metric")


def check_compute_loss(implementation: Implementation, result: Any) -> None:
    """Check the type of the result of ``compute_loss``, and that its loss is 0-dim."""
    check_type(implementation, result)
    if result is None:
        return
    loss = result.loss
    if not isinstance(loss, Tensor):
        raise _wrong_result(implementation, f"an Output whose loss is a {type(loss).__name__}")
    if loss.dim() != 0:
        problem = f"an Output whose loss is a {type(loss).__name__} of shape {tuple(loss.shape)}"
        raise _wrong_result(implementation, problem)


def check_train_step(implementation: Implementation, result: Any) -> None:
    """Check that a ``train_step`` that returned the loss updated the weights, and that one that returned None did not:
    it leaves the step to the core. The loss must be 0-dim and detached."""
    updates = implementation.checks.run.updates
    leaves_step_to_core = result is None and not implementation.wraps
    if leaves_step_to_core and updates:
        raise PluginError(
            "called run.apply_gradients and returned None.",
            code="wrong-result",
            place=implementation.where,
            remedy="Return the step's loss, or leave the whole step to the core.",
        )
    if not leaves_step_to_core and not updates:
        raise PluginError(
            "did not call run.apply_gradients, so no weight changed.",
            code="no-update",
            place=implementation.where,
            remedy="Call it at least once, on every process.",
        )
    check_type(implementation, result)
    if result is not None and (result.dim() or result.requires_grad):
        problem = f"a tensor of shape {tuple(result.shape)}, requires_grad={result.requires_grad}"
        raise _wrong_result(implementation, problem)


RESULT_CHECKS: dict[str, Callable[[Implementation, Any], None]] = {
    "before_prepare": check_before_prepare,
    "build_scheduler": check_build_scheduler,
    "compute_loss": check_compute_loss,
    "train_step": check_train_step,
}
"""Hook -> the function that checks its results, also those of wrappers. Other hooks have ``check_type``."""


def refuse_eval_mode(implementation: Implementation) -> None:
    """Raise an error for a hook after which a run would train in eval mode."""
    if implementation.checks.run.recipe.inference is None:
        problem = "left the model in eval mode"
        raise PluginError(f"{implementation.where} {problem}. {REMEDIES[problem]}", code="wrong-result")


def _wrong_result(implementation: Implementation, problem: str) -> PluginError:
    """The error for a result.

    Args:
        problem: The result and what was expected, such as ``None, expected Output``.
    """
    remedy = REMEDIES.get(implementation.hook, "docs/loop.md describes the hook.")
    return PluginError(f"{implementation.where} returned {problem}. {remedy}", code="wrong-result")


def _summary_in(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The argument ``summary`` of ``write_summary``; empty if an implementation does not take it."""
    return next((value for value in arguments if isinstance(value, dict)), {})


def _restore_keys(where: str, before: Mapping[str, Any], summary: dict[str, Any]) -> None:
    """Undo changes of keys that fastloop or another plugin has written, and warn about them."""
    changed = []
    for key, value in before.items():
        is_same = key in summary and (summary[key] is value or summary[key] == value)  # NaN is equal to itself here
        if not is_same and key not in FILLED_BY_PLUGINS:
            changed.append(key)
            summary[key] = value
    if changed:
        names = ", ".join(map(repr, changed))
        log.warning(
            Problem(
                f"changed {names}, which it did not add. Its value is ignored.",
                code="reserved-name",
                place=where,
                remedy="Choose a key of your own, such as the plugin's name.",
            )
        )


def _check_json(where: str, summary: Mapping[str, Any]) -> None:
    for key, value in summary.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise PluginError(
                f"{where} set {key!r} to a {type(value).__name__}, expected a JSON value: {clause(error)}.",
                code="not-json",
            ) from None
