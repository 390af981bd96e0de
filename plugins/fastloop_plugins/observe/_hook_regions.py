"""Regions of torch's profiler for the hooks of plugins, for the plugin ``profile`` and for `fastloop profile`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastloop import Plugin
from fastloop.plugins.hook_replacement import enclose, replace
from fastloop.plugins.manager import PluginSet
from fastloop.runtime.regions import region


@contextmanager
def hook_regions(plugins: PluginSet) -> Iterator[None]:
    """Inside the block, show the code of each plugin's hook as ``fastloop/PLUGIN.HOOK``."""

    def surround(plugin: Plugin, hook: str, function: Callable[..., Any], is_wrapper: bool) -> Callable[..., Any]:
        return enclose(function, is_wrapper, lambda: region(f"{plugin.name}.{hook}"))

    undo = replace(plugins, surround)
    try:
        yield
    finally:
        undo()
