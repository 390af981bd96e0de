"""Replace the implementations of hooks in a run, to check, time or show them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager
from typing import Any

from fastloop.plugins.manager import PluginSet
from fastloop.plugins.plugin import Plugin

Replacement = Callable[[Plugin, str, Callable[..., Any], bool], Callable[..., Any]]


def replace(plugins: PluginSet, replacement: Replacement) -> Callable[..., None]:
    """Call ``replacement(plugin, hook, function, is_wrapper)`` in place of each implementation of these plugins.

    Returns:
        A function that undoes it for all hooks, or for the given ones where no other replacement followed.
    """
    manager = plugins.manager
    replaced = []
    for plugin in plugins:
        if plugin.name in manager.disabled:
            continue
        for impl, hook in manager.implementations(plugin):
            before = impl.function
            impl.function = replacement(plugin, hook, before, impl.wrapper)
            # the function often holds the owner of ``undo``: a reference cycle would keep the plugins, and the model
            replaced.append((impl, hook, before, weakref.ref(impl.function)))

    def undo(hooks: Collection[str] | None = None) -> None:
        for impl, hook, before, function in replaced:
            if hooks is None:
                is_ours = impl.plugin.name not in manager.disabled
            else:
                is_ours = hook in hooks and impl.function is function()
            if is_ours:
                impl.function = before

    return undo


def enclose(
    function: Callable[..., Any], is_wrapper: bool, around: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    """An implementation whose code runs inside ``around()``. For a wrapper, that is the code before and after its
    yield."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        with around():
            return function(*arguments)

    @functools.wraps(function)
    def call_wrapper(*arguments: Any) -> Generator[None, Any, Any]:
        generator = function(*arguments)
        value = None
        resume = generator.send
        try:
            while True:
                with around():
                    resume(value)
                try:
                    value = yield
                    resume = generator.send
                except BaseException as error:
                    value = error
                    resume = generator.throw
        except StopIteration as done:
            return done.value

    return call_wrapper if is_wrapper else call
