"""Checks what plugins' hooks return and change.

Each implementation is replaced by one that compares the result with the hook's return type in ``hookspecs``. A hook
without a result must leave the counters, the batches and the optimizer alone, no hook may leave the model in eval mode,
and a read-only plugin must change no number that training depends on. The hooks of a step are restored after ``STEPS``
steps, so later steps cost nothing. ``train_step`` is checked in every step.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler
from torch.utils.hooks import RemovableHandle

from fastloop import hookspecs
from fastloop.checks.read_only import ReadOnlyChecks
from fastloop.errors import PluginError
from fastloop.plugins.hook_replacement import replace
from fastloop.plugins.plugin import Plugin, hookimpl
from fastloop.problem import Problem, clause
from fastloop.state import Batch, Output
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
TYPES = {
    "BatchSampler": BatchSampler,
    "Batch": Batch,
    "Future": Future,
    "LRScheduler": LRScheduler,
    "Optimizer": Optimizer,
    "Output": Output,
    "Tensor": Tensor,
    "nn": nn,
}
"""Names in the annotations of hookspecs that hookspecs imports for type checkers alone."""

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
                    f"{hook} returned {_find_problem(hook, result)}. "
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
        where = f"{self.run.recipe.where}: plugin {plugin.name!r}: {hook}"
        is_last = hook == "compute_loss" and [*self.run.plugins.each(hook)][-1][0] is plugin
        needed = hook in NEEDED if wraps else is_last

        def check(result: Any) -> Any:
            if hook == "train_step":
                _check_updates(self.run.updates, result, wraps, where)
            if result is not None or needed:
                problem = _find_problem(hook, result)
                if problem:
                    raise PluginError(
                        f"{where} returned {problem}. {REMEDIES.get(hook, 'docs/loop.md describes the hook.')}",
                        code="wrong-result",
                    )
            if hook == "before_prepare" and isinstance(result, nn.Module) and not result.training:
                self._refuse_eval_mode(where)
            return result

        def call(*arguments: Any) -> Any:
            if hook == "train_step":
                with self._keeping_train_mode(where, hook, arguments):
                    return check(function(*arguments))
            if hook in STEP_HOOKS and not self._is_in_first_steps():
                return function(*arguments)
            if hook == "log_scalars" and self._was_log_checked(plugin):
                return function(*arguments)
            if hook == "after_evaluate":  # each plugin gets its own copy of the metrics
                arguments = tuple(dict(value) if isinstance(value, dict) else value for value in arguments)
            before = self._read(arguments)
            summary = copy.deepcopy(_summary_in(arguments)) if hook == "write_summary" else {}
            with self._keeping_train_mode(where, hook, arguments), self.read_only.watching(plugin, hook):
                result = check(function(*arguments))
            if _return_type(hook) == "None":
                for problem, value in self._read(arguments).items():
                    if value != before[problem]:
                        remedy = REMEDIES.get(problem, REMEDIES["changed a counter"])
                        raise PluginError(f"{where} {problem}.", code="wrong-result", remedy=remedy)
            if hook == "compute_loss":
                self.has_loss[plugin.name] = self.has_loss.get(plugin.name, False) or result is not None
            if hook == "write_summary":
                _restore_keys(where, summary, _summary_in(arguments))
                _check_json(where, _summary_in(arguments))
            return result

        def call_wrapper(*arguments: Any) -> Generator[None, Any, Any]:
            with self._keeping_train_mode(where, hook, arguments):
                return check((yield from function(*arguments)))

        return call_wrapper if wraps else call

    def _read(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """Problem -> the value that changes with it."""
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
    def _keeping_train_mode(self, where: str, hook: str, arguments: tuple[Any, ...]) -> Iterator[None]:
        """Check that the block, a call of a hook, does not put the model that is trained into eval mode."""
        given = next((value for value in arguments if isinstance(value, nn.Module)), None)
        model = getattr(self.run, "_built_model", given)  # in before_prepare, it is not there yet
        trained = model if model is not None and model.training and hook not in AFTER_TRAINING else None
        yield
        if trained is not None and not trained.training:
            self._refuse_eval_mode(where)

    def _refuse_eval_mode(self, where: str) -> None:
        """Raise an error for a hook after which a run would train in eval mode."""
        if self.run.recipe.inference is None:
            problem = "left the model in eval mode"
            raise PluginError(f"{where} {problem}. {REMEDIES[problem]}", code="wrong-result")

    def begin(self) -> None:
        """Check the hooks of the next ``STEPS`` steps."""
        self.last_step = self.run.state.step + STEPS
        self._counting = register_optimizer_step_pre_hook(self._count_optimizer_step)

    def _is_in_first_steps(self) -> bool:
        if self._counting is not None and self.run.state.step >= self.last_step:
            self.close()
        return self._counting is not None

    def _was_log_checked(self, plugin: Plugin) -> bool:
        """Whether a call of the plugin's ``log_scalars`` needs no check: it is called at each log point, of which the
        first one may come after the first steps."""
        if self._is_in_first_steps():
            return False
        if plugin.name in self.has_logged:
            return True
        self.has_logged.add(plugin.name)
        return False

    def _count_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        stepped = set(map(id, stepped_parameters(self.run.optimizer)))  # a plugin may step other ones
        if any(id(parameter) in stepped for parameter in optimizer.param_groups[0]["params"]):
            self.optimizer_steps += 1


def _return_type(hook: str) -> str:
    """The annotation of a hook's result, as hookspecs writes it."""
    return str(getattr(hookspecs, hook).__annotations__["return"])


def _result_type(hook: str) -> Any:
    """The type of a hook's result, such as ``dict[str, float] | None``: hookspecs' annotations are texts."""
    names = vars(hookspecs) | TYPES
    if hook == "build_metrics":
        from torchmetrics import MetricCollection  # takes a second to import

        names["MetricCollection"] = MetricCollection
    return eval(_return_type(hook), names) or NoneType


def _find_problem(hook: str, result: Any) -> str:
    """The type of a result, and the expected one; empty if the result is valid."""
    expected_type = _result_type(hook)
    if result is None or not _matches(result, expected_type):
        annotation = _return_type(hook)
        expected = "no result" if annotation == "None" else annotation.removesuffix(" | None")
        returned = "None" if result is None else f"a {type(result).__name__}{_wrong_item(result, expected_type)}"
        problem = f"{returned}, expected {expected}"
        if inspect.isgenerator(result):
            problem += ". An implementation with a yield is marked @hookimpl(wrapper=True)"
        return problem
    if hook == "compute_loss" and not (isinstance(result.loss, Tensor) and result.loss.dim() == 0):
        shape = f" of shape {tuple(result.loss.shape)}" if isinstance(result.loss, Tensor) else ""
        return f"an Output whose loss is a {type(result.loss).__name__}{shape}"
    if hook == "train_step" and (result.dim() or result.requires_grad):
        return f"a tensor of shape {tuple(result.shape)}, requires_grad={result.requires_grad}"
    schedulers = result.values() if isinstance(result, Mapping) else [result]
    if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers):
        return "a ReduceLROnPlateau, which steps by a metric"
    return ""


def _check_updates(updates: int, loss: Any, wraps: bool, where: str) -> None:
    """Check that a ``train_step`` that returned ``loss`` updated the weights, and that one that returned None did not.

    Args:
        updates: Calls of ``run.apply_gradients`` in this step.
        wraps: Whether it wraps the core's ``train_step``.

    Raises:
        PluginError: It did not keep this contract.
    """
    leaves_step_to_core = loss is None and not wraps
    if leaves_step_to_core and updates:
        raise PluginError(
            "called run.apply_gradients and returned None.",
            code="wrong-result",
            place=where,
            remedy="Return the step's loss, or leave the whole step to the core.",
        )
    if not leaves_step_to_core and not updates:
        raise PluginError(
            "did not call run.apply_gradients, so no weight changed.",
            code="no-update",
            place=where,
            remedy="Call it at least once, on every process.",
        )


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


def _matches(value: Any, expected: Any) -> bool:
    kind = get_origin(expected)
    parts = get_args(expected)
    if kind is UnionType:
        return any(_matches(value, part) for part in parts)
    if kind is tuple:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_matches, value, parts))
    if kind in (dict, Mapping):
        return isinstance(value, kind) and _find_wrong_item(value, *parts) is None
    if kind is Iterable and isinstance(value, str):
        return False  # its characters are no samples
    if expected is float:
        return isinstance(value, float | int)
    return expected is Any or isinstance(value, kind or expected)


def _find_wrong_item(mapping: Mapping[Any, Any], key_type: Any, value_type: Any) -> Any:
    """The first key of a mapping that has another type, or whose value has another type; None: all are right.

    Values such as ``Sequence[Any]`` are not checked: a tensor stands for a sequence.
    """
    for key, value in mapping.items():
        if not _matches(key, key_type) or not (get_origin(value_type) or _matches(value, value_type)):
            return key
    return None


def _wrong_item(result: Any, expected: Any) -> str:
    """The item of a mapping that has another type than expected, for a message: `` with 'loss': 'high'``."""
    for part in (expected, *get_args(expected)):
        if get_origin(part) in (dict, Mapping) and isinstance(result, Mapping):
            key = _find_wrong_item(result, *get_args(part))
            if key is not None:
                value = result[key]
                is_plain = value is None or isinstance(value, str | int | float)
                return f" with {key!r}: {value!r:.60}" if is_plain else f" with {key!r}: a {type(value).__name__}"
    return ""
