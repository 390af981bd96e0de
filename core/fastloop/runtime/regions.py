"""Names for what the loop spends its time on, as profilers show them: ``fastloop/data``, ``fastloop/backward``, ...

    data         waiting for a step's batches
    to device    copying them
    loss         forward pass and loss
    backward     gradients
    clip         clipping them
    optimizer    the optimizer's and the scheduler's step
    evaluate     an evaluation, with its own data, to device and loss inside
    save         a checkpoint

Any profiler of torch's sees them, a plugin's or a script's own. While none looks on, a region costs 0.2 us.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch.autograd import profiler

T = TypeVar("T")

PREFIX = "fastloop/"
UNSEEN: AbstractContextManager[Any] = nullcontext()


def region(name: str) -> AbstractContextManager[Any]:
    """What happens inside has this name."""
    return profiler.record_function(PREFIX + name) if profiler._is_profiler_enabled else UNSEEN


def each(name: str, items: Iterable[T]) -> Iterator[T]:
    """The same items; getting one of them has this name."""
    iterator = iter(items)
    while True:
        with region(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
