"""Regions of torch's profiler for the hooks of plugins, for the plugin ``profile`` and for `fastloop profile`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastloop import Plugin
from fastloop.hooks import PluginSet
from fastloop.runtime.regions import region


@contextmanager
def hook_regions(plugins: PluginSet) -> Iterator[None]:
    """Inside the block, show each call of a plugin's hook as ``fastloop/PLUGIN.HOOK``. Wrappers get no region."""

    def surround(plugin: Plugin, hook: str, function: Callable[..., Any], is_wrapper: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            with region(f"{plugin.name}.{hook}"):
                return function(*arguments)

        return function if is_wrapper else call

    undo = plugins.manager.replace(surround)
    try:
        yield
    finally:
        undo()
