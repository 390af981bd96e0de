"""``run.hooks``: one function per hook. It calls the implementations as pluggy does, with a sixth of pluggy's Python calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from fastloop.hook_types import HookTypes
else:
    HookTypes = object


class HookCallers(HookTypes):
    """The hooks of a run as functions: ``hooks.after_step(run=run, loss=loss)``.

    The plugins of a run do not change, so each function is made once, when it is first used. A hook without implementations does nothing.
    Type checkers know the core's hooks; a hook that a plugin declares takes and returns Any.
    """

    def __init__(self, relay: pluggy.HookRelay) -> None:
        self._relay = relay

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Make the function of a hook. Only its first use gets here.

        Raises:
            AttributeError: No plugin of the run declares this hook.
        """
        function = make_caller(getattr(self._relay, name))
        setattr(self, name, function)
        return function


def make_caller(hook: pluggy.HookCaller) -> Callable[..., Any]:
    """A function that calls all implementations of a hook, by keyword.

    It returns the first result that is not None for a *first* hook, otherwise a list of these results. pluggy itself calls hooks with
    wrappers.
    """
    implementations = [(impl, impl.argnames) for impl in reversed(hook.get_hookimpls())]
    if any(impl.wrapper for impl, _ in implementations):
        return hook
    if hook.spec is not None and hook.spec.opts["firstresult"]:

        def call_first(**arguments: Any) -> Any:
            for impl, names in implementations:  # read `function` at each call: disabling a plugin replaces it
                result = impl.function(*map(arguments.__getitem__, names))
                if result is not None:
                    return result
            return None

        return call_first

    def call_all(**arguments: Any) -> list[Any]:
        results = []
        for impl, names in implementations:
            result = impl.function(*map(arguments.__getitem__, names))
            if result is not None:
                results.append(result)
        return results

    return call_all
