"""Copies batches to the device while it computes.

    plugins:
      - dataloader-workers
      - device-prefetch

Each step's batches go from page-locked memory to the device (CUDA) on a stream of their own, while the step before is computed. A step is
read ahead only where workers read it: otherwise a dataset's random numbers in the training process would be drawn too early.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from fastloop import Batch, DataLoaderDraft, Plugin, hookimpl

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")
T = TypeVar("T")


class DevicePrefetch(Plugin):
    """Copies batches on a stream of their own, one step ahead."""

    name = "device-prefetch"
    numerics = "bitwise"
    runs_after = ("dataloader-workers",)
    description = "copies batches ahead (CUDA)"
    kind = ""  # of the device; drafts are written without check_recipe too

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        from fastloop.runtime.hardware import this_machine

        self.kind = this_machine(recipe.train.device).device

    @hookimpl
    def configure_dataloader(self, draft: DataLoaderDraft) -> None:
        if self.kind == "cuda":
            draft.placing = self.copied if draft.num_workers else self.copied_in_turn

    @hookimpl
    def check_run(self, run: Run) -> None:
        if self.kind != "cuda":
            logger.warning("device-prefetch: the device is %s: there is nothing to copy", self.kind)
        elif not run.loader_settings.num_workers:
            logger.warning(
                "device-prefetch: no workers read batches, so none is copied ahead. Add dataloader-workers, with num_workers from 1."
            )

    def copied(self, steps: Iterable[list[Batch]], place: Callable[[list[Batch]], list[Batch]]) -> Iterator[list[Batch]]:
        """Steps on the device, each handed on when the copy of the next is under way."""
        copy, arrive = on_a_stream_of_its_own(place)
        return map(arrive, one_ahead(map(copy, steps)))

    def copied_in_turn(self, steps: Iterable[list[Batch]], place: Callable[[list[Batch]], list[Batch]]) -> Iterator[list[Batch]]:
        """Steps on the device; a copy begins when the step is read, whatever the device still computes."""
        copy, arrive = on_a_stream_of_its_own(place)
        return map(arrive, map(copy, steps))


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """The same items; one is handed on when the next was got."""
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting


def on_a_stream_of_its_own(place: Callable[[list[Batch]], list[Batch]]) -> tuple[Callable[..., Any], Callable[..., list[Batch]]]:
    """``copy``, which begins to place batches and returns at once, and ``arrive``, after which what it returned can be computed with."""
    import torch
    from torch.utils._pytree import tree_leaves

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def copy(batches: list[Batch]) -> tuple[list[Batch], torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return place(batches), stream.record_event()

    def arrive(copied: tuple[list[Batch], torch.cuda.Event]) -> list[Batch]:
        batches, done = copied
        computing = torch.cuda.current_stream()
        computing.wait_event(done)
        for tensor in tree_leaves([batch.inputs for batch in batches]):
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(computing)  # its memory came from the other stream, which must not have it back too early
        return batches

    return copy, arrive
