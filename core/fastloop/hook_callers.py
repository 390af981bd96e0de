"""``run.hooks``: one function per hook. It calls the implementations as pluggy does, with a sixth of pluggy's Python calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from fastloop.hook_types import HookTypes
else:
    HookTypes = object

OnError = Callable[[Any, str, Exception | SystemExit], bool]
"""``on_error(plugin, hook, error)`` returns whether to continue as if the implementation had returned None."""


class HookCallers(HookTypes):
    """The hooks of a run as functions: ``hooks.after_step(run=run, loss=loss)``.

    Each function is made once, when it is first used. A hook without implementations does nothing.
    Type checkers know the core's hooks; a hook that a plugin declares takes and returns Any.
    """

    def __init__(self, manager: pluggy.PluginManager, on_error: OnError) -> None:
        self._manager, self._on_error = manager, on_error
        self._unsubscribed: dict[str, list[Any]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Make the function of a hook. Only its first use gets here.

        Raises:
            AttributeError: No plugin of the run declares this hook.
        """
        getattr(self._manager.hook, name)
        hook = self._manager.subset_hook_caller(name, self._unsubscribed.get(name, ()))
        implementations = hook.get_hookimpls()
        is_first = hook.spec is not None and hook.spec.opts["firstresult"]
        wrapped = any(impl.wrapper for impl in implementations)  # pluggy itself calls hooks with wrappers
        function = hook if wrapped else make_caller(name, reversed(implementations), is_first, self._on_error)
        setattr(self, name, function)
        return function

    def unsubscribe(self, plugin: Any, name: str) -> None:
        """Do not call a plugin's implementation any more. A call that is running is completed."""
        self._unsubscribed.setdefault(name, []).append(plugin)
        self.__dict__.pop(name, None)


def make_caller(name: str, implementations: Iterable[pluggy.HookImpl], is_first: bool, on_error: OnError) -> Callable[..., Any]:
    """A function that calls implementations of a hook in the given order, by keyword.

    Returns the first result that is not None if ``is_first``, otherwise a list of these results.
    """
    calls = [(impl, impl.argnames) for impl in implementations]

    def call_first(**arguments: Any) -> Any:
        for impl, names in calls:  # read `function` at each call: it may be replaced
            try:
                result = impl.function(*map(arguments.__getitem__, names))
            except (Exception, SystemExit) as error:
                if not on_error(impl.plugin, name, error):
                    raise
                continue
            if result is not None:
                return result
        return None

    def call_all(**arguments: Any) -> list[Any]:
        results = []
        for impl, names in calls:
            try:
                result = impl.function(*map(arguments.__getitem__, names))
            except (Exception, SystemExit) as error:
                if not on_error(impl.plugin, name, error):
                    raise
                continue
            if result is not None:
                results.append(result)
        return results

    return call_first if is_first else call_all
