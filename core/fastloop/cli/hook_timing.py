"""Numbers and times of hook calls: for `fastloop train --trace-hooks`. Nothing is counted unless a run asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import typer

from fastloop.cli.tables import print_table
from fastloop.plugins.hook_replacement import enclose
from fastloop.plugins.plugin import Plugin


@dataclass(slots=True)
class HookTime:
    """Number and time of the calls of one plugin's hook.

    Attributes:
        count: Number of calls.
        seconds: Host time, without nested hooks and without waiting for the device.
        first: Start of the first call, by ``perf_counter``.
    """

    plugin: str
    hook: str
    count: int = 0
    seconds: float = 0.0
    first: float = 0.0


class HookTimer:
    """Counts and times the calls of implementations.

    Attributes:
        calls: (plugin, hook) -> number and time of its calls.
        nested_seconds: Seconds of the hooks that the running hook has called.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], HookTime] = {}
        self.nested_seconds = 0.0

    def sorted_calls(self) -> list[HookTime]:
        """The hooks that were called, in the order of their first calls."""
        return sorted((calls for calls in self.calls.values() if calls.count), key=lambda calls: calls.first)

    def __call__(self, plugin: Plugin, hook: str, function: Callable[..., Any], wrapper: bool) -> Callable[..., Any]:
        """The function that replaces an implementation."""
        calls = self.calls[plugin.name, hook] = HookTime(plugin.name, hook)

        @functools.wraps(function)
        def count(*arguments: Any) -> Any:
            calls.count += 1
            return function(*arguments)

        return enclose(count, wrapper, lambda: self._measure(calls))

    @contextmanager
    def _measure(self, calls: HookTime) -> Iterator[None]:
        outer_seconds = self.nested_seconds
        self.nested_seconds = 0.0
        started = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - started
            calls.seconds += seconds - self.nested_seconds
            calls.first = calls.first or started
            self.nested_seconds = outer_seconds + seconds


def show_calls(timer: HookTimer) -> None:
    """Print the number and time of the calls of plugins' hooks in this process, in the order of their first calls."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("plugin", "hook"):
        table.add_column(column, no_wrap=True)
    for column in ("calls", "seconds", "us a call"):
        table.add_column(column, justify="right", no_wrap=True)
    for calls in timer.sorted_calls():
        microseconds = 1e6 * calls.seconds / calls.count
        table.add_row(calls.plugin, calls.hook, str(calls.count), f"{calls.seconds:.3f}", f"{microseconds:,.1f}")
    print_table(table)
    typer.echo("Seconds on the host, without nested hooks.\n")
