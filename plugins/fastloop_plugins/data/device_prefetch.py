"""Copies the next step's batches to the GPU while the current step is computed.

    plugins:
      - device-prefetch

A thread reads and collates the next batches if that draws no random numbers, such as token ids in memory. Other data is
read ahead with ``dataloader-workers``.

If a batch of your own dataset and collator follows from the ids of its samples, set ``deterministic = True`` on both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from fastloop import Batch, Plugin, Problem, Recommendation, hookimpl

if TYPE_CHECKING:
    from fastloop import Run, Settings
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine

T = TypeVar("T")


class DevicePrefetch(Plugin):
    """Copies the next batches to the GPU during a step, on a separate stream."""

    name = "device-prefetch"
    numerics = "bitwise"
    runs_after = ("dataloader-workers",)
    for_inference = True
    kind = ""  # device type; configure may run without check_recipe

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """On CUDA."""
        return Recommendation(why="batches are copied during a step") if machine.device == "cuda" else None

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        from fastloop.runtime.hardware import this_machine

        self.kind = this_machine(recipe.train.device).device

    @hookimpl
    def configure(self, settings: Settings) -> dict[str, Any]:
        if self.kind != "cuda":
            return {}
        from fastloop_plugins.data._read_ahead import ReadAheadLoader

        placing = self.copied if settings.num_workers else self.copied_when_read
        return {"thread_loader_class": ReadAheadLoader, "placing": placing}

    @hookimpl
    def check_run(self, run: Run) -> None:
        if self.kind != "cuda":
            self.log.warning(Problem(f"the device is {self.kind}: there is nothing to prefetch.", code="no-effect"))
        elif not run.settings.num_workers and not self.is_deterministic(run):
            self.log.warning(
                Problem(
                    "reading a batch may draw random numbers, so no thread reads ahead.",
                    code="no-effect",
                    remedy="Add dataloader-workers with num_workers of 1 or more.",
                )
            )

    def is_deterministic(self, run: Run) -> bool:
        """Whether a thread reads the first split ahead."""
        from fastloop_plugins.data._read_ahead import is_deterministic

        loaders = run.loaders
        return is_deterministic(loaders.datasets.get(loaders.first_split), loaders.collators.get(loaders.first_split))

    def copied(
        self, steps: Iterable[list[Batch]], to_device: Callable[[list[Batch]], list[Batch]]
    ) -> Iterator[list[Batch]]:
        """Steps on the device. Each is returned when the copy of the next one has started."""
        copy, arrive = on_copy_stream(to_device)
        return map(arrive, one_ahead(map(copy, steps)))

    def copied_when_read(
        self, steps: Iterable[list[Batch]], to_device: Callable[[list[Batch]], list[Batch]]
    ) -> Iterator[list[Batch]]:
        """Steps on the device. A copy starts when its step is read, while the device may still compute."""
        copy, arrive = on_copy_stream(to_device)
        return map(arrive, map(copy, steps))


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield the same items, each after the next one was read."""
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting


def on_copy_stream(
    to_device: Callable[[list[Batch]], list[Batch]],
) -> tuple[Callable[..., Any], Callable[..., list[Batch]]]:
    """Return ``copy``, which starts a copy and returns immediately, and ``arrive``, which makes the current stream wait
    for it."""
    import torch
    from torch.utils._pytree import tree_leaves

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def copy(batches: list[Batch]) -> tuple[list[Batch], torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return to_device(batches), stream.record_event()

    def arrive(copied: tuple[list[Batch], torch.cuda.Event]) -> list[Batch]:
        batches, done = copied
        computing = torch.cuda.current_stream()
        computing.wait_event(done)
        for tensor in tree_leaves(
            [(batch.inputs, batch._buffer) for batch in batches]
        ):  # small tensors are in a buffer
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(computing)  # the copy stream must not reuse this memory too early
        return batches

    return copy, arrive
