"""Names for the phases of the loop in torch's profiler: ``fastloop/data``, ``fastloop/backward``, ...

    data           waiting for a batch
    to device      copying batches
    loss           forward pass and loss
    backward       gradients
    clip           gradient clipping
    gradient norm  the norm of gradients that are not clipped
    optimizer      the optimizer's and the scheduler's step
    evaluate       an evaluation, with nested data, to device and loss
    save           a checkpoint

Without an active profiler, a region costs one Python call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler

PREFIX = "fastloop/"


class NoContext(AbstractContextManager[None]):
    """A context that does nothing. Its methods are C functions, so that entering and leaving it calls no Python
    function."""

    __enter__ = "".format  # type: ignore[assignment]
    __exit__ = "".format  # type: ignore[assignment] # accepts any arguments; "" is false, so exceptions pass


NO_CONTEXT = NoContext()


def region(name: str) -> AbstractContextManager[Any]:
    """Show the block under this name in the profiler."""
    return profiler.record_function(PREFIX + name) if profiler._is_profiler_enabled else NO_CONTEXT
