"""The hooks of one run: which there are, who implements them, what they took, and who failed in one.

pluggy calls them. ``PluginSet`` adds the calls that pluggy does not know (drafts, chains); ``Hooks`` adds other packages' hooks, and a
watch over every call of a plugin's hook. ``plugin_checks`` refuses plugins that are written wrongly.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

import pluggy

from fastloop import hookspecs, plugin_checks
from fastloop.errors import FastloopError, PluginCrash, PluginError, UsageError, UserCodeError
from fastloop.plugin import GROUP, Plugin, entry_points
from fastloop.recipe import Recipe, importing
from fastloop.runtime.tracebacks import user_line
from fastloop.state import Draft

log = logging.getLogger("fastloop")

Span = Callable[[str], AbstractContextManager[Any]]


@dataclass(slots=True)
class Calls:
    """What the calls of one plugin's hook came to.

    Attributes:
        count: How many there were.
        seconds: What they took on the host, without the hooks that were called from within. Nobody waits for a device.
        first: When the first one began, on the clock of ``perf_counter``.
    """

    plugin: str
    hook: str
    count: int = 0
    seconds: float = 0.0
    first: float = 0.0


class Hooks(pluggy.PluginManager):
    """pluggy's manager with exactly the plugins of one run, and the core's own answers as the last to be asked.

    Attributes:
        known: Hook -> its arguments: ours, and those that the plugins of this run bring along.
        first: The *first* hooks among them.
        calls: (plugin, hook) -> what its calls came to.
        disabled: Plugin -> why its hooks are no longer called.
        span: Put around each call of a plugin's hook, wrappers aside, with the name ``plugin.hook``; None: nothing.
        inside: Seconds of the hooks that were called from within the one that is running.
        failed: The newest error that left a plugin's hook, with the two.

    Raises:
        PluginError: A plugin implements a hook that is not known, or with other arguments, or declares one that is taken.
    """

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        super().__init__("fastloop")
        defaults = importlib.import_module("fastloop.defaults")  # by name: it imports the loop, which is above this module
        plugins = list(plugins)
        self.known: dict[str, tuple[str, ...]] = {}
        self.first: set[str] = set()
        self.calls: dict[tuple[str, str], Calls] = {}
        self.disabled: dict[str, str] = {}
        self.span: Span | None = None
        self.inside = 0.0
        self.failed: tuple[BaseException, Plugin, str] | None = None
        self._declare(plugins)
        for plugin in reversed(plugins):  # pluggy calls the last registered first
            plugin_checks.check_hooks(plugin, self.known, self.first)
            try:
                self.register(plugin, plugin.name)
            except pluggy.PluginValidationError as error:
                raise PluginError(f"plugin {plugin.name!r}: {error}") from None
        self.register(defaults, "fastloop")  # marked trylast: after the fallbacks of plugins
        for plugin in plugins:
            for impl, hook in self._impls(plugin):
                impl.function = self._watched(plugin, hook, impl.function, impl.wrapper)

    # -- which hooks there are -----------------------------------------------------------------------------------------

    def _declare(self, plugins: Iterable[Plugin]) -> None:
        """Our hooks, and those of the plugins: a class or a module of them that several share counts once."""
        owners: dict[str, tuple[Any, str]] = {}
        for namespace, owner in [(hookspecs, "fastloop"), *((plugin.hookspecs, f"plugin {plugin.name!r}") for plugin in plugins)]:
            if namespace is None or any(namespace is other for other, _ in owners.values()):
                continue
            names = [name for name in dir(namespace) if self.parse_hookspec_opts(namespace, name) is not None]
            if not names:
                raise PluginError(f"{owner}: its `hookspecs` hold no function that is marked with fastloop.hookspec.")
            for name in names:
                if name in owners:
                    raise PluginError(f"{owner} and {owners[name][1]} both declare the hook {name!r}. One of them must rename its own.")
                owners[name] = (namespace, owner)
            self.add_hookspecs(namespace)
        for name in owners:
            spec = getattr(self.hook, name).spec
            self.known[name] = (*spec.argnames, *spec.kwargnames)
            if spec.opts["firstresult"]:
                self.first.add(name)

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """The marks of an implementation; one that its plugin lists in ``fallback_hooks`` is asked after those of other plugins."""
        marks = super().parse_hookimpl_opts(plugin, name)
        if marks and (marks["specname"] or name) in getattr(plugin, "fallback_hooks", ()):
            return {**marks, "trylast": True}
        return marks

    # -- every call ----------------------------------------------------------------------------------------------------

    def _impls(self, plugin: Plugin) -> Iterator[tuple[Any, str]]:
        """A plugin's implementations, each with its hook."""
        for caller in self.get_hookcallers(plugin) or ():
            for impl in caller.get_hookimpls():
                if impl.plugin is plugin:
                    yield impl, caller.name

    def _watched(self, plugin: Plugin, hook: str, function: Callable[..., Any], wrapper: bool) -> Callable[..., Any]:
        """The same implementation; its calls are counted and timed, and its errors kept."""
        calls = self.calls[plugin.name, hook] = Calls(plugin.name, hook)

        @functools.wraps(function)
        def called(*arguments: Any) -> Any:
            outside, self.inside, started = self.inside, 0.0, perf_counter()
            try:
                if self.span is None:
                    return function(*arguments)
                with self.span(f"{plugin.name}.{hook}"):
                    return function(*arguments)
            except Exception as error:
                if self._goes_on(plugin, hook, error):
                    return None
                self._keep(error, plugin, hook)
                raise
            finally:  # written out, since a call more would cost as much as this
                seconds = perf_counter() - started
                calls.count += 1
                calls.seconds += seconds - self.inside
                calls.first = calls.first or started
                self.inside = outside + seconds

        def part(call: Callable[..., Any], *arguments: Any) -> Any:
            outside, self.inside, started = self.inside, 0.0, perf_counter()
            try:
                return call(*arguments)
            finally:
                seconds = perf_counter() - started
                calls.seconds += seconds - self.inside
                calls.first = calls.first or started
                self.inside = outside + seconds

        @functools.wraps(function)
        def around(*arguments: Any) -> Generator[None, Any, Any]:
            calls.count += 1
            generator = function(*arguments)
            passed: Any = None
            try:
                part(next, generator)
                try:
                    passed, resume = (yield), generator.send
                except BaseException as error:  # from within: the wrapper may handle it, and is not to blame when it lets it pass
                    passed, resume = error, generator.throw
                part(resume, passed)
            except StopIteration as done:
                return done.value
            except Exception as error:
                if error is not passed:
                    self._keep(error, plugin, hook)
                raise
            yield  # a second time, which pluggy refuses
            return None

        return around if wrapper else called

    def _keep(self, error: Exception, plugin: Plugin, hook: str) -> None:
        within = self.failed is not None and self.failed[0] is error  # it came out of another hook first
        if not within and not isinstance(error, FastloopError):  # those go to the user as they are
            self.failed = error, plugin, hook

    def _goes_on(self, plugin: Plugin, hook: str, error: Exception) -> bool:
        """Whether the run goes on without the plugin: it only looks on, and was asked to be disabled."""
        if plugin.on_error != "disable" or (isinstance(error, UsageError) and hook in ("check_recipe", "check_run")):
            return False
        why = str(crash(plugin, hook, error))
        self.disabled[plugin.name] = why
        for impl, _ in self._impls(plugin):
            impl.function = lambda *arguments: None
        log.warning("%s. It is disabled, and the run goes on", why)
        return True


def crash(plugin: Plugin, hook: str, error: BaseException) -> PluginCrash:
    """The error of a plugin that failed in a hook."""
    found = PluginCrash(f"plugin {plugin.name!r} ({origin(type(plugin))}) failed in {hook}: {type(error).__name__}: {error}", plugin.name)
    found.__cause__ = error
    return found


def distribution_of(cls: type[Plugin]) -> importlib.metadata.Distribution | None:
    """The distribution that a plugin is installed with; None for one of a file or a script."""
    for point in entry_points(GROUP):
        if point.value == f"{cls.__module__}:{cls.__qualname__}":
            return point.dist
    found = importlib.metadata.packages_distributions().get(cls.__module__.partition(".")[0], [])
    return importlib.metadata.distribution(found[0]) if len(found) == 1 else None


def origin(cls: type[Plugin]) -> str:
    """Where a plugin's code comes from: distribution and version, else the recipe's file, else the module."""
    if (distribution := distribution_of(cls)) is not None:
        return f"{distribution.name} {distribution.version}"
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return str(file) if file and cls.__module__.startswith(importing.PREFIX) else cls.__module__


@dataclass
class PluginSet:
    """The plugins of one run.

    Attributes:
        plugins: In the order in which their hooks are called.
        reasons: Plugin name -> why it is there, and what moved it.
    """

    plugins: list[Plugin]
    reasons: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Plugin]:
        return iter(self.plugins)

    def in_slot(self, slot: str) -> str | None:
        """The name of the plugin in a slot; None: there is none."""
        return next((plugin.name for plugin in self.plugins if plugin.slot == slot), None)

    def names(self) -> list[str]:
        """Plugin names in call order."""
        return [plugin.name for plugin in self.plugins]

    @cached_property
    def manager(self) -> Hooks:
        """The hooks of exactly these plugins."""
        return Hooks(self.plugins)

    @property
    def hooks(self) -> Any:
        """Call a hook on all plugins: ``hooks.after_step(run=run, loss=loss)``."""
        return self.manager.hook

    def each(self, hook: str) -> Iterator[tuple[Plugin, Callable[..., Any]]]:
        """Every plugin that implements a hook with its own bound method, in call order."""
        for impl in reversed(getattr(self.hooks, hook).get_hookimpls()):
            if isinstance(impl.plugin, Plugin):
                yield impl.plugin, lambda _impl=impl, **arguments: _impl.function(*(arguments[name] for name in _impl.argnames))

    def draft(self, hook: str, draft: Draft) -> Any:
        """Have every plugin fill in a draft; returns it."""
        for plugin, call in self.each(hook):
            draft.__dict__["_writer"] = plugin.name
            call(draft=draft)
        return draft

    def chain(self, hook: str, model: Any, check: Callable[[str, Any], None] | None = None, /, **arguments: Any) -> Any:
        """Pass the model through every plugin; a result that is not None replaces it. ``check(plugin, model)`` is called after each."""
        for plugin, call in self.each(hook):
            replacement = call(model=model, **arguments)
            model = model if replacement is None else replacement
            if check is not None:
                check(plugin.name, model)
        return model

    def environment(self, recipe: Recipe) -> dict[str, str]:
        """What plugins want the process to have from its start.

        Raises:
            PluginError: Two plugins want different values.
        """
        wanted: dict[str, tuple[str, str]] = {}
        for plugin, call in self.each("environment"):
            for name, value in (call(recipe=recipe) or {}).items():
                other, before = wanted.setdefault(name, (plugin.name, value))
                if before != value:
                    raise PluginError(
                        f"{recipe.where}: plugins {plugin.name!r} and {other!r} want different values of {name}: {value!r} and {before!r}. "
                        "Remove one of them."
                    )
        return {name: value for name, (_, value) in wanted.items()}

    @contextmanager
    def around(self, span: Span) -> Iterator[None]:
        """While inside, each call of a plugin's hook is within ``span("NAME.hook")``. Wrappers, which others run inside of, are not."""
        before, self.manager.span = self.manager.span, span
        try:
            yield
        finally:
            self.manager.span = before

    def calls(self) -> list[Calls]:
        """What the calls of each plugin's hooks came to, in the order of the first ones. Those that were never called are left out."""
        return sorted((calls for calls in self.manager.calls.values() if calls.count), key=lambda calls: calls.first)

    def plugin_seconds(self) -> dict[str, float]:
        """Each plugin's own seconds in its hooks, in this process and since it began."""
        seconds = dict.fromkeys(self.names(), 0.0)
        for calls in self.calls():
            seconds[calls.plugin] += calls.seconds
        return seconds

    @property
    def disabled(self) -> dict[str, str]:
        """Plugins that were disabled -> why."""
        return self.manager.disabled

    @contextmanager
    def attributing_errors(self) -> Iterator[None]:
        """An error that comes out of a plugin's hook inside is raised as one that names both.

        Raises:
            PluginCrash: With the error as its cause. Errors for the user go through as they are, and so do those of the core.
            UserCodeError: With the error as its cause, where it came out of the user's code.
        """
        try:
            yield
        except FastloopError:
            raise
        except Exception as error:
            if crash := self.attribute_error(error):
                raise crash from error
            raise

    def attribute_error(self, error: BaseException) -> PluginCrash | UserCodeError | None:
        """The line of the user's code that an error came out of, where a task or the core called it; else the plugin and its hook. None:
        it came out of neither."""
        failed, self.manager.failed = self.manager.failed, None
        plugin, hook = (failed[1], failed[2]) if failed is not None and failed[0] is error else (None, "")
        if plugin is None or plugin.slot == "task":
            bundled = [type(other) for other in self.plugins if origin(type(other)) == origin(Plugin)]
            if place := user_line(error, bundled if plugin is None else [*bundled, type(plugin)]):
                return UserCodeError(f"{place}: {type(error).__name__}: {error}")
        return None if plugin is None else crash(plugin, hook, error)
