"""The hooks of one run: their declarations and implementations, and the plugin that failed.

pluggy registers the implementations. ``HookManager`` adds hooks that plugins declare. ``PluginSet`` adds settings and
chains.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import pluggy

from fastloop import hookspecs
from fastloop.distributed.signals import StoppedAtOnce
from fastloop.errors import FastloopError, PluginCrash, PluginError, SaveError, UsageError, UserCodeError
from fastloop.plugins.call import HookCallers, make_caller
from fastloop.plugins.hook_checks import check_hooks
from fastloop.plugins.installed import GROUP, entry_points, name_and_version
from fastloop.plugins.packages import IMPORT_NAMES
from fastloop.plugins.plugin import Plugin
from fastloop.problem import Problem
from fastloop.recipe import Recipe, importing
from fastloop.runtime.files import full_disk
from fastloop.runtime.tracebacks import user_line
from fastloop.settings import Settings, merge_settings
from fastloop.strategy import Strategy, method_that_raised

log = logging.getLogger("fastloop")


@dataclass(frozen=True)
class HookFailure:
    """An error that a plugin's hook raised."""

    error: BaseException
    plugin: Plugin
    hook: str


HOOKABLE = (FunctionType, MethodType, classmethod, staticmethod, MemberDescriptorType)
"""Types of attributes in which pluggy finds hooks."""
MARKS = "fastloop_impl"
"""Attribute of a function that ``@hookimpl`` has marked."""


def _may_have_marks(plugin: Any, name: str) -> bool:
    """Whether pluggy could find the marks of a hook in an attribute. Most attributes are no hooks, and pluggy's own
    search in each takes a tenth of the time to start a small run."""
    if name.startswith("__"):
        return False
    attribute = vars(plugin).get(name)
    if attribute is None and not isinstance(plugin, ModuleType):
        for cls in type(plugin).__mro__:
            attribute = vars(cls).get(name)
            if attribute is not None:
                break
    if isinstance(attribute, FunctionType | MethodType):
        return hasattr(attribute, MARKS)
    return isinstance(attribute, HOOKABLE)


class HookManager(pluggy.PluginManager):
    """pluggy's manager for the plugins of one run. The core's implementations are called last.

    Attributes:
        known: Hook -> its arguments, for all hooks of this run.
        first: Names of the *first* hooks.
        disabled: Plugin -> why its hooks are no longer called.
        failure: The newest error that a plugin's hook raised, and that was not attributed yet.

    Raises:
        PluginError: A plugin implements an unknown hook or takes unknown arguments, or two plugins declare the same
            hook.
    """

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        super().__init__("fastloop")
        plugins = list(plugins)
        self.disabled: dict[str, str] = {}
        self.failure: HookFailure | None = None
        self._add_specs(plugins)
        specs = {name: caller.spec for name, caller in vars(self.hook).items()}
        self.known = {name: (*spec.argnames, *spec.kwargnames) for name, spec in specs.items()}
        self.first = {name for name, spec in specs.items() if spec.opts["firstresult"]}
        for plugin in reversed(plugins):  # pluggy calls the last registered first
            check_hooks(plugin, self.known, self.first)
            try:
                self.register(plugin, plugin.name)
            except pluggy.PluginValidationError as error:
                raise PluginError(str(error), code="invalid-hook", place=f"plugin {plugin.name!r}") from None

    def register_core(self) -> None:
        """Register fastloop's own implementations. This imports torch, so it is done only before hooks of a run are
        called."""
        from fastloop.core_modules import MODULES  # builds on this module

        for module in MODULES:
            self.register(module, module.__name__)

    # -- declarations --------------------------------------------------------------------------------------------------

    def _add_specs(self, plugins: Iterable[Plugin]) -> None:
        """Add the core's hooks and those of plugins. Several plugins may share one class or module of hooks."""
        declared = [(hookspecs, "fastloop")]
        for plugin in plugins:
            if plugin.hookspecs is not None:
                declared.append((plugin.hookspecs, f"plugin {plugin.name!r}"))
        added: list[Any] = []  # classes and modules of hooks
        owners: dict[str, str] = {}  # hook -> who declares it
        for namespace, owner in declared:
            if any(namespace is other for other in added):
                continue
            added.append(namespace)
            names = [name for name in dir(namespace) if self.parse_hookspec_opts(namespace, name) is not None]
            if not names:
                raise PluginError(
                    "its `hookspecs` hold no function that is marked with fastloop.hookspec.",
                    code="no-hooks",
                    place=owner,
                )
            for name in names:
                if name in owners:
                    other = owners[name]
                    raise PluginError(
                        f"{owner} and {other} both declare the hook {name!r}. One of them must rename its own.",
                        code="hook-declared-twice",
                    )
                owners[name] = owner
            self.add_hookspecs(namespace)

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """The marks of an implementation. Adds ``trylast`` to the hooks in ``fallback_hooks``."""
        if not _may_have_marks(plugin, name):
            return None
        marks = super().parse_hookimpl_opts(plugin, name)
        if marks and (marks["specname"] or name) in getattr(plugin, "fallback_hooks", ()):
            return {**marks, "trylast": True}
        return marks

    # -- calls ---------------------------------------------------------------------------------------------------------

    def implementations(self, plugin: Plugin) -> Iterator[tuple[Any, str]]:
        """``(implementation, hook)`` for each hook of a plugin."""
        for caller in self.get_hookcallers(plugin) or ():
            for impl in caller.get_hookimpls():
                if impl.plugin is plugin:
                    yield impl, caller.name

    def silence(self, plugin: Plugin, except_for: str = "") -> None:
        """Let the hooks of a plugin do nothing, except for one of them."""
        for impl, hook in self.implementations(plugin):
            if hook != except_for:
                impl.function = do_nothing

    def take_failure(self, error: BaseException) -> HookFailure | None:
        """The record of an error that a plugin's hook raised, and forget the newest record; None: no plugin's hook
        raised this error."""
        failure = self.failure
        self.failure = None
        return failure if failure is not None and failure.error is error else None

    def handle_error(self, plugin: Any, hook: str, error: Exception | SystemExit) -> bool:
        """Disable the plugin whose hook raised, if its ``on_error`` is ``disable``, else record the failure. Returns
        whether the run continues. The ``teardown`` of a disabled plugin is still called."""
        if not isinstance(plugin, Plugin) or isinstance(error, StoppedAtOnce):
            return False  # the core, or a signal
        refuses = isinstance(error, UsageError) and hook in ("check_recipe", "check_run")
        if plugin.on_error != "disable" or refuses:
            if self.failure is None or self.failure.error is not error:  # else a nested hook raised it
                self.failure = HookFailure(error, plugin, hook)
            return False
        reason = str(make_crash(plugin, hook, error))
        self.disabled.setdefault(plugin.name, reason)  # if teardown fails too, the first reason is the cause
        self.silence(plugin, except_for="teardown")
        log.warning(Problem(f"{reason}. The plugin is disabled, and the run continues.", code="plugin-disabled"))
        return True


def do_nothing(*arguments: Any) -> None:
    """The implementation of a hook whose plugin is disabled."""


def make_crash(plugin: Plugin, hook: str, error: BaseException) -> PluginCrash:
    """The error to raise for a plugin that failed in a hook."""
    crash = PluginCrash(
        f"plugin {plugin.name!r} ({origin(type(plugin))}) failed in {hook}: {type(error).__name__}: {error}",
        plugin.name,
        code="plugin-crashed",
    )
    crash.__cause__ = error
    return crash


_packages_distributions = cache(importlib.metadata.packages_distributions)


@cache
def distribution_of(cls: Any) -> importlib.metadata.Distribution | None:
    """The distribution that a plugin is installed with; None for one of a file or a script."""
    package = cls.__module__.partition(".")[0]
    of_package: list[importlib.metadata.EntryPoint] = []
    points: list[importlib.metadata.EntryPoint] = [*entry_points(GROUP), *entry_points("fastloop.commands")]
    for point in points:
        if point.value == f"{cls.__module__}:{cls.__qualname__}":
            return point.dist
        if point.module.partition(".")[0] == package:
            of_package.append(point)
    if of_package:
        return of_package[0].dist
    names = _packages_distributions().get(package, [])
    return importlib.metadata.distribution(names[0]) if len(names) == 1 else None


def origin(cls: type[Plugin]) -> str:
    """The source of a plugin's code: distribution and version, else the recipe's file, else the module."""
    if cls.__module__.startswith(importing.PREFIX):
        return str(sys.modules[cls.__module__].__file__)
    with suppress(OSError):  # it is for an error of the plugin, which may be the limit of open files
        distribution = distribution_of(cls)  # type: ignore[arg-type]  # mypy takes no class as hashable
        if distribution is not None:
            return " ".join(name_and_version(distribution))
    return cls.__module__


@dataclass
class PluginSet:
    """The plugins of one run.

    Attributes:
        plugins: In call order.
        reasons: Plugin name -> why it is in the run, and what moved it.
    """

    plugins: list[Plugin]
    reasons: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Plugin]:
        return iter(self.plugins)

    def in_slot(self, slot: str) -> str | None:
        """The name of the plugin in a slot, or None."""
        return next((plugin.name for plugin in self.plugins if plugin.slot == slot), None)

    @cached_property
    def strategy(self) -> Strategy:
        """The plugin in the slot ``strategy``, or the default."""
        for plugin in self.plugins:
            if isinstance(plugin, Strategy):
                return plugin
        return Strategy()

    @cached_property
    def task(self) -> Plugin | None:
        """The plugin in the slot ``task``; None: there is none."""
        for plugin in self.plugins:
            if plugin.slot == "task":
                return plugin
        return None

    def names(self) -> list[str]:
        """Plugin names in call order."""
        return [plugin.name for plugin in self.plugins]

    @cached_property
    def manager(self) -> HookManager:
        """The hooks of these plugins."""
        return HookManager(self.plugins)

    @cached_property
    def hooks(self) -> HookCallers:
        """Call a hook on all plugins: ``hooks.after_step(run=run, loss=loss)``."""
        self.manager.register_core()
        return HookCallers(self.manager, self.manager.handle_error)

    def each(self, hook: str) -> Iterator[tuple[Plugin, Callable[..., Any]]]:
        """Each plugin that implements a hook, with a function that calls it, in call order."""
        implementations = getattr(self.manager.hook, hook).get_hookimpls()  # pluggy: the last one is called first
        for impl in reversed(implementations):
            if isinstance(impl.plugin, Plugin):
                yield impl.plugin, make_caller(hook, [impl], True, self.manager.handle_error)

    def unsubscribe(self, plugin: Plugin, hook: str) -> None:
        """Stop calling a plugin's hook. A plugin that only examines the first steps so costs nothing in later ones.

        ``configure``, chain hooks, ``save_state``, ``load_state`` and ``teardown`` are still called.
        """
        self.hooks.unsubscribe(plugin, hook)

    def configure(self, recipe: Recipe) -> Settings:
        """Collect the settings of every plugin."""
        return merge_settings(recipe, self.each("configure"))

    def chain(self, hook: str, model: Any, /, **arguments: Any) -> Any:
        """Pass the model through every plugin. A result that is not None replaces it."""
        for _, call in self.each(hook):
            replacement = call(model=model, **arguments)
            model = model if replacement is None else replacement
        return model

    @property
    def disabled(self) -> dict[str, str]:
        """Disabled plugin -> reason."""
        return self.manager.disabled

    @contextmanager
    def attributing_errors(self) -> Iterator[None]:
        """Raise an error of a plugin or of user code as one that names its source. Other errors pass through unchanged.

        Raises:
            PluginCrash: A plugin's hook raised; the error is its cause.
            UserCodeError: User code raised; the error is its cause.
            SaveError: The disk is full.
        """
        try:
            yield
        except (FastloopError, StoppedAtOnce):
            raise
        except (Exception, SystemExit) as error:  # sys.exit() would end the run with the exit code 0
            with suppress(MemoryError):  # if memory has run out, the error itself is raised
                explained = self.attribute_error(error)
                if explained is not None:
                    raise explained from error
            raise

    def attribute_error(self, error: BaseException) -> PluginCrash | UserCodeError | SaveError | None:
        """An error that names the line of user code or the plugin that raised ``error``, or the file that a full disk
        rejected; None for errors of the core.

        User code counts only if the core or a task called it."""
        failure = self.manager.take_failure(error)
        full = full_disk(error)
        if full is not None:
            return full
        if failure is None:
            method = method_that_raised(self.strategy, error)
            if method is not None:
                failure = HookFailure(error, self.strategy, method)
        if failure is None:
            return self._user_code_error(error)
        if failure.plugin.slot == "task":
            in_user_code = self._user_code_error(error, type(failure.plugin))
            if in_user_code is not None:
                return in_user_code
        return make_crash(failure.plugin, failure.hook, error)

    def _user_code_error(self, error: BaseException, task: type[Plugin] | None = None) -> UserCodeError | None:
        """An error that names the line of user code that raised ``error``; None: no user code that fastloop, one of its
        plugins or ``task`` called."""
        callers: list[type[Plugin]] = []
        for plugin in self.plugins:
            if type(plugin).__module__.partition(".")[0] in IMPORT_NAMES:
                callers.append(type(plugin))
        if task is not None:
            callers.append(task)
        place = user_line(error, callers)
        if not place:
            return None
        return UserCodeError(f"{place}: {type(error).__name__}: {error}", code="user-code-failed")


def emptied(plugins: PluginSet) -> PluginSet:
    """Unregister the plugins of a set whose hooks were called. Returns a set with the core's hooks alone."""
    manager = plugins.manager
    for plugin in plugins:
        manager.silence(plugin)
        manager.unregister(plugin)
    manager.failure = None  # it would keep its plugin
    remaining = PluginSet([])
    remaining.manager = manager  # a new one would register the core's hooks again
    remaining.hooks = HookCallers(manager, manager.handle_error)
    return remaining
