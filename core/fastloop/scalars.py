"""Logged values, which stay on the device until they are read and reduced together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fastloop.checkpoint.form import check_form
from fastloop.distributed.processes import Processes
from fastloop.distributed.tensors import gather_full
from fastloop.errors import PluginError, did_you_mean

Reduction = Literal["mean", "sum", "max", "main"]
CORE = (
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/samples_per_second",
    "train/tokens_per_second",
    "train/memory_bytes",
)
"""Names that the core logs at each log point, without a reduction: their values are the same on all processes."""
RESERVED = {"step", "epoch", "split", *CORE, *(name.removeprefix("train/") for name in CORE)}
"""Names that plugins cannot use: those of the core, and the keys of ``metrics.jsonl``."""


class Scalars:
    """The values that this process logged since the last log point.

    Attributes:
        enabled: Whether to keep values: a plugin receives them, and no evaluation runs.
        values: Name -> values, on the host or on the device.
        reductions: Name -> reduction, for all names that plugins logged.
        mark: Seconds of training, samples and tokens at the last log point.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.values: dict[str, list[float | Tensor]] = {}
        self.reductions: dict[str, str] = {}
        self.mark = (0.0, 0, 0)

    def add(self, name: str, value: float | Tensor, reduce: str, device: torch.device) -> None:
        """Add a plugin's value; see ``Run.log``. A device tensor is copied, so that a change in place does not alter
        the value."""
        if reduce not in get_args(Reduction):
            raise PluginError(
                f"run.log({name!r}): no reduction {reduce!r}.{did_you_mean(str(reduce), get_args(Reduction))}"
            )
        if not isinstance(name, str) or not name or name in RESERVED or name.startswith(("validation/", "test/")):
            raise PluginError(
                f"run.log: found the name {name!r}, expected one of your own, such as 'my-plugin/noise'. The core logs "
                f"{', '.join(CORE)}, and names of evaluation metrics begin with validation/ or test/. A wrapper of the "
                "hook evaluate can add metrics."
            )
        if self.reductions.setdefault(name, reduce) != reduce:
            raise PluginError(
                f"run.log({name!r}): found reduce={reduce!r}, and {self.reductions[name]!r} before. Use one of them."
            )
        if isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex():
            value = gather_full(value.detach())
            dtype = torch.promote_types(value.dtype, torch.float32)
            value = (
                value.item() if value.device.type == "cpu" else value.to(device, dtype, non_blocking=True, copy=True)
            )
        elif not isinstance(value, Real):
            found = (
                f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
                if isinstance(value, Tensor)
                else f"{value!r:.60}"
            )
            raise PluginError(
                f"run.log({name!r}): found {found}, expected a real number or a real tensor without dimensions."
            )
        if self.enabled:
            self.values.setdefault(name, []).append(value if isinstance(value, Tensor) else float(value))

    def set_gradient_norm(self, norm: Tensor, is_main: bool) -> None:
        """Keep the norm of the log point's own step."""
        if is_main:
            self.values["train/grad_norm"] = [norm]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block, drop values."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def take(self, processes: Processes) -> dict[str, float]:
        """Read, reduce and remove all values. Returns the main process's and the reduced ones. Every process must call
        it.

        Raises:
            PluginError: Processes logged different names or reductions; raised on every process.
        """
        own = {name: Partial(sum(values), len(values), _largest(values)) for name, values in self.read().items()}
        self.values = {}
        shared = {
            name: (reduction, own[name])
            for name, reduction in self.reductions.items()
            if name in own and reduction != "main"
        }
        every = processes.all_gather_object(shared)
        for name in dict.fromkeys(name for partials in every for name in partials):
            if missing := [str(rank) for rank, partials in enumerate(every) if name not in partials]:
                raise PluginError(
                    f"run.log({name!r}): not logged on process {', '.join(missing)} of {len(every)} since the last "
                    "log point. "
                    "Log it on every process, or with reduce='main'."
                )
            if len(found := sorted({partials[name][0] for partials in every})) > 1:
                raise PluginError(
                    f"run.log({name!r}): processes use different reductions: {', '.join(found)}. Use one of them."
                )
        parts = {name: [partials[name][1] for partials in every] if name in shared else [own[name]] for name in own}
        return {name: _reduce(self.reductions.get(name, "main"), parts[name]) for name in own}

    def read(self) -> dict[str, list[float]]:
        """Name -> values, in one read of the device."""
        tensors = [value for values in self.values.values() for value in values if isinstance(value, Tensor)]
        numbers = iter(torch.stack(tensors).tolist() if tensors else ())
        return {
            name: [next(numbers) if isinstance(value, Tensor) else value for value in values]
            for name, values in self.values.items()
        }

    def state(self, processes: Processes) -> list[dict[str, Any]]:
        """The values of all processes, for a checkpoint. Every process must call it."""
        return processes.all_gather_object({"values": self.read(), "reductions": self.reductions})

    def restore(self, states: Sequence[Mapping[str, Any]], processes: Processes) -> None:
        """Restore the result of ``state``. With another number of processes, the main process continues the values of
        all.

        Raises:
            ValueError: Values are no lists of numbers.
        """
        for state in states:
            for name, values in state["values"].items():
                check_form(values, [0.0], f"scalars.{name}")
        self.reductions = dict(states[0]["reductions"])
        if len(states) == processes.world_size:
            self.values = dict(states[processes.rank]["values"])
            return
        names = [name for name in states[0]["values"] if self.reductions.get(name, "main") != "main"]
        pooled = {name: [value for state in states for value in state["values"][name]] for name in names}
        self.values = {**states[0]["values"], **pooled} if processes.is_main else {name: [] for name in names}


class Partial(NamedTuple):
    """The sum, number and maximum of the values of one name on one process."""

    total: float
    number: int
    largest: float


def _reduce(reduction: str, parts: Sequence[Partial]) -> float:
    totals, numbers, largest = zip(*parts, strict=True)
    if reduction == "max":
        return _largest(largest)
    return float(sum(totals) if reduction == "sum" else sum(totals) / sum(numbers))


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values, default=-math.inf)
