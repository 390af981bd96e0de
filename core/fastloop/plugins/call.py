"""``run.hooks``: one function per hook, which calls the implementations of the run's plugins, and their wrappers.

pluggy registers and orders the implementations. Its own caller needs six times as many Python calls, and does not
report which implementation raised an error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from fastloop.errors import PluginError

if TYPE_CHECKING:
    from fastloop.hook_types import HookTypes
else:
    HookTypes = object

ENDED = object()
"""Returned by ``next`` for a wrapper that ended before its yield."""
CALL_NOTHING: Callable[..., Any] = "".format
"""The function of a hook without implementations: a method of C that accepts any arguments, returns at once, and costs
no Python call. Most hooks of a step have no implementation."""
Call = tuple[Any, Sequence[str]]
"""An implementation of a hook, pluggy's ``HookImpl``, and the names of its arguments."""
OnError = Callable[[Any, str, Exception | SystemExit], bool]
"""``on_error(plugin, hook, error)`` returns whether to continue as if the implementation had returned None."""


class HookCallers(HookTypes):
    """The hooks of a run as functions: ``hooks.after_step(run=run, loss=loss)``.

    Each function is made once, when it is first used. A hook without implementations does nothing.
    Type checkers know the core's hooks; a hook that a plugin declares takes and returns Any.
    """

    def __init__(self, manager: pluggy.PluginManager, on_error: OnError) -> None:
        self._manager = manager
        self._on_error = on_error
        self._unsubscribed: dict[str, list[Any]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Make the function of a hook. Only its first use gets here.

        Raises:
            AttributeError: No plugin of the run declares this hook.
        """
        hook = getattr(self._manager.hook, name)
        left_out = self._unsubscribed.get(name, ())
        implementations = [impl for impl in reversed(hook.get_hookimpls()) if impl.plugin not in left_out]
        is_first = hook.spec is not None and hook.spec.opts["firstresult"]
        function = make_caller(name, implementations, is_first, self._on_error)
        setattr(self, name, function)
        return function

    def unsubscribe(self, plugin: Any, name: str) -> None:
        """Do not call a plugin's implementation any more. A call that is running is completed."""
        self._unsubscribed.setdefault(name, []).append(plugin)
        self.__dict__.pop(name, None)


def make_caller(
    name: str, implementations: Iterable[pluggy.HookImpl], is_first: bool, on_error: OnError
) -> Callable[..., Any]:
    """A function that calls implementations of a hook in the given order, by keyword, inside those that are wrappers.

    Returns the first result that is not None if ``is_first``, otherwise a list of these results, or an empty sequence.
    A wrapper may replace it.
    """
    wrappers: list[Call] = []
    calls: list[Call] = []
    for implementation in implementations:
        group = wrappers if implementation.wrapper else calls
        group.append((implementation, implementation.argnames))
    call_each = _make_call_each(name, calls, is_first, on_error)
    if wrappers:
        return _make_call_wrapped(name, wrappers, call_each, on_error)
    if not calls and not is_first:
        return CALL_NOTHING
    return call_each


def _make_call_each(name: str, calls: Sequence[Call], is_first: bool, on_error: OnError) -> Callable[..., Any]:
    """A function that calls implementations that are no wrappers, one after the other."""

    def call_each(**arguments: Any) -> Any:
        results = []
        for impl, names in calls:  # read `function` at each call: it may be replaced
            try:
                result = impl.function(*map(arguments.__getitem__, names))
            except (Exception, SystemExit) as error:
                if not on_error(impl.plugin, name, error):
                    raise
                continue
            if result is not None:
                if is_first:
                    return result
                results.append(result)
        return None if is_first else results

    return call_each


def _make_call_wrapped(
    name: str, wrappers: Sequence[Call], call_each: Callable[..., Any], on_error: OnError
) -> Callable[..., Any]:
    """A function that runs each wrapper to its yield, calls ``call_each``, and runs the wrappers to their end."""

    def call_wrapped(**arguments: Any) -> Any:
        entered: list[tuple[Any, Generator[None, Any, Any]]] = []
        entering: Any = None  # the plugin whose wrapper runs to its yield
        result: Any = None
        failure: BaseException | None = None
        try:
            for impl, names in wrappers:
                entering = impl.plugin
                generator = impl.function(*map(arguments.__getitem__, names))
                if next(generator, ENDED) is ENDED:
                    raise PluginError(
                        f"{name} is a wrapper, and ended before its yield.",
                        code="invalid-wrapper",
                        place=f"plugin {entering.name!r}",
                    )
                entered.append((entering, generator))
            entering = None
            result = call_each(**arguments)
        except BaseException as error:
            failure = error
            if entering is not None and isinstance(error, Exception | SystemExit):
                on_error(entering, name, error)
        for plugin, running in reversed(entered):  # each sees the result or the error of what it surrounds
            try:
                if failure is None:
                    running.send(result)
                else:
                    running.throw(failure)
                raise PluginError(
                    f"{name} is a wrapper, and has a second yield.",
                    code="invalid-wrapper",
                    place=f"plugin {plugin.name!r}",
                )
            except StopIteration as done:
                result = done.value
                failure = None
            except BaseException as error:
                if error is not failure and isinstance(error, Exception | SystemExit):
                    on_error(plugin, name, error)
                failure = error
        if failure is None:
            return result
        try:
            raise failure
        finally:
            del failure  # its traceback refers to this frame

    return call_wrapped
