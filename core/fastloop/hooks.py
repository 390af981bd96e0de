"""The hooks of one run: which there are, who implements them, what they took, and who failed in one.

pluggy calls them. ``Resolution`` adds the calls that pluggy does not know (drafts, chains); ``Hooks`` adds other packages' hooks, old
names, and a watch over every call of a plugin's hook.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

import pluggy

from fastloop import hookspecs, importing
from fastloop.errors import FastloopError, PluginCrash, PluginError, UsageError, did_you_mean
from fastloop.plugin import GROUP, Plugin
from fastloop.recipe import Recipe
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
        from fastloop import defaults

        plugins = list(plugins)
        self.known: dict[str, tuple[str, ...]] = {}
        self.calls: dict[tuple[str, str], Calls] = {}
        self.disabled: dict[str, str] = {}
        self.span: Span | None = None
        self.inside = 0.0
        self.failed: tuple[BaseException, Plugin, str] | None = None
        self._declare(plugins)
        self.register(defaults, "fastloop")
        for plugin in reversed(plugins):  # pluggy calls the last registered first
            self._check(plugin)
            try:
                self.register(plugin, plugin.name)
            except pluggy.PluginValidationError as error:
                raise PluginError(f"plugin {plugin.name!r}: {error}") from None
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

    def _check(self, plugin: Plugin) -> None:
        """Every hook of a plugin must be one, and take arguments that it gets."""
        if plugin.observes and plugin.parity != "exact":
            raise PluginError(f"plugin {plugin.name!r} says that it only looks on (`observes`): its parity is exact, not {plugin.parity}.")
        for attribute in dir(type(plugin)):
            method = getattr(plugin, attribute)
            marks = getattr(method, "fastloop_impl", None)
            if marks is None:
                continue
            hook = _present(marks["specname"] or attribute)
            where = f"plugin {plugin.name!r}: {hook}"
            if marks["hookwrapper"]:
                raise PluginError(f"{where} is marked hookwrapper=True, an older form. Mark it wrapper=True.")
            if hook not in self.known:
                if marks["optionalhook"]:
                    continue
                hint = did_you_mean(hook, self.known) or (
                    " Another plugin's hook is known when that plugin is in the run. Marked optionalhook=True, it may be missing."
                )
                raise PluginError(f"plugin {plugin.name!r}: there is no hook {hook!r}.{hint}")
            if hook in hookspecs.ONE_BY_ONE and marks["wrapper"]:
                raise PluginError(f"{where} cannot be a wrapper: it is called on each plugin by itself.")
            decides = hook in hookspecs.CHANGE or getattr(self.hook, hook).spec.opts["firstresult"]
            if plugin.observes and (decides or marks["wrapper"]):
                how = "changes or decides something" if decides else "is a wrapper here"
                raise PluginError(f"{where} {how}, and the plugin says that it only looks on (`observes`). Leave one of the two out.")
            for parameter in inspect.signature(method).parameters.values():
                self._check_argument(where, hook, parameter)

    def _check_argument(self, where: str, hook: str, parameter: inspect.Parameter) -> None:
        name, given = _present(parameter.name, of=hook), parameter.default is not parameter.empty
        known = name in self.known[hook]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or (given and not known):
            return
        if not known:
            raise PluginError(f"{where} gets no argument {name!r}.{did_you_mean(name, self.known[hook])}")
        if given or parameter.kind is parameter.KEYWORD_ONLY:
            raise PluginError(f"{where}: the argument {name!r} must be positional and without a default, else it is not passed.")

    # -- old names -----------------------------------------------------------------------------------------------------

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """A hook under its old name is one under the present name; a plugin that has both is made for both, and the old one rests."""
        marks = super().parse_hookimpl_opts(plugin, name)
        hook = marks["specname"] or name if marks else ""
        if marks is None or hook not in hookspecs.RENAMED:
            return marks
        if hasattr(getattr(plugin, _present(hook), None), "fastloop_impl"):
            return None
        _warn_renamed(plugin, f"the hook {hook!r}", hook)
        return {**marks, "specname": _present(hook)}

    def _verify_hook(self, hook: Any, hookimpl: Any) -> None:
        """pluggy passes arguments by position, so that an old name may stay in the signature."""
        for name in hookimpl.argnames:
            if f"{hook.name}.{name}" in hookspecs.RENAMED:
                _warn_renamed(hookimpl.plugin, f"{hook.name}'s argument {name!r}", f"{hook.name}.{name}")
        hookimpl.argnames = tuple(_present(name, of=hook.name) for name in hookimpl.argnames)
        super()._verify_hook(hook, hookimpl)

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


def _present(name: str, of: str = "") -> str:
    """What a hook, or an argument of one, is called today."""
    renamed = hookspecs.RENAMED.get(f"{of}.{name}" if of else name)
    return renamed.name if renamed else name


@functools.cache
def _warned(text: str) -> None:
    log.warning("%s", text)


def _warn_renamed(plugin: Any, what: str, key: str) -> None:
    """Say it once a process, and to the plugin's users through the logger: Python hides DeprecationWarnings from them, and shows a line of
    ours with others."""
    renamed = hookspecs.RENAMED[key]
    _warned(
        f"plugin {plugin.name!r} ({origin(type(plugin))}): {what} is called {renamed.name!r} now. The old name works until "
        f"fastloop {renamed.until}: look for a newer version of the plugin"
    )


def crash(plugin: Plugin, hook: str, error: BaseException) -> PluginCrash:
    """The error of a plugin that failed in a hook."""
    found = PluginCrash(f"plugin {plugin.name!r} ({origin(type(plugin))}) failed in {hook}: {type(error).__name__}: {error}")
    found.__cause__ = error
    return found


def distribution_of(cls: type[Plugin]) -> importlib.metadata.Distribution | None:
    """The distribution that a plugin is installed with; None for one of a file or a script."""
    for point in importlib.metadata.entry_points(group=GROUP):
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
class Resolution:
    """The plugins of one run.

    Attributes:
        plugins: In the order in which their hooks are called.
        reasons: Plugin name -> why it is there, and what moved it.
    """

    plugins: list[Plugin]
    reasons: dict[str, str] = field(default_factory=dict)

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
    def blaming(self) -> Iterator[None]:
        """An error that comes out of a plugin's hook inside is raised as one that names both.

        Raises:
            PluginCrash: With the error as its cause. Errors for the user go through as they are, and so do those of the core.
        """
        try:
            yield
        except FastloopError:
            raise
        except Exception as error:
            if crash := self.blame(error):
                raise crash from error
            raise

    def blame(self, error: BaseException) -> PluginCrash | None:
        """The plugin and hook that an error came out of; None when it was in none."""
        failed, self.manager.failed = self.manager.failed, None
        if failed is None or failed[0] is not error:
            return None
        _, plugin, hook = failed
        return crash(plugin, hook, error)
