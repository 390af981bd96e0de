"""Logged values, which stay on the device until a log point copies them to the host together and reduces them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fastloop.checkpoint.state_form import check_form
from fastloop.distributed.processes import Processes
from fastloop.distributed.tensors import gather_full
from fastloop.errors import PluginError, did_you_mean
from fastloop.runtime.host_copies import HostCopy
from fastloop.splits import METRIC_PREFIXES

Reduction = Literal["mean", "sum", "max", "main"]
CORE_NAMES = (
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/samples_per_second",
    "train/tokens_per_second",
    "train/memory_bytes",
)
"""Names that the core logs at each log point, without a reduction. ``log_points.after_step`` sets them, except for the
norm: it exists only before the optimizer steps, so ``loop.apply_gradients`` sets it, or ``loop.count_update`` after a
recorded update. They are values of the main process: the others have the same, except for ``train/memory_bytes``.
``hookspecs.log_scalars`` describes them."""
RESERVED = {"step", "epoch", "split", *CORE_NAMES, *(name.removeprefix("train/") for name in CORE_NAMES)}
"""Names that plugins cannot use: those of the core, and the keys of ``metrics.jsonl``."""


@dataclass(frozen=True)
class LogMark:
    """The training done at a log point, for the speed since then.

    Attributes:
        seconds: Time of training.
        samples: ``State.samples``.
        tokens: ``State.tokens``.
    """

    seconds: float = 0.0
    samples: int = 0
    tokens: int = 0


class Scalars:
    """The values that this process logged since the last log point.

    Attributes:
        enabled: Whether to keep values: a plugin receives them, and no evaluation runs.
        needed_at_once: Whether a plugin needs them in the step of their log point; see ``Plugin.waits_for_scalars``.
        values: Name -> values, on the host or on the device.
        reductions: Name -> reduction, for all names that plugins logged.
        mark: The training done at the last log point.
    """

    def __init__(self, enabled: bool, needed_at_once: bool = False) -> None:
        self.enabled = enabled
        self.needed_at_once = needed_at_once
        self.values: dict[str, list[float | Tensor]] = {}
        self.reductions: dict[str, str] = {}
        self.mark = LogMark()

    def add(self, name: str, value: float | Tensor, reduce: str, device: torch.device) -> None:
        """Add a plugin's value; see ``Run.log``. A device tensor is copied, so that a change in place does not alter
        the value."""
        if reduce not in get_args(Reduction):
            raise PluginError(
                f"run.log({name!r}): no reduction {reduce!r}.",
                code="unknown-choice",
                remedy=did_you_mean(str(reduce), get_args(Reduction)),
            )
        if not isinstance(name, str) or not name or name in RESERVED or name.startswith(METRIC_PREFIXES):
            raise PluginError(
                f"found the name {name!r}, expected one of your own, such as 'my-plugin/noise'. The core logs "
                f"{', '.join(CORE_NAMES)}, and names of evaluation metrics begin with validation/ or test/. A wrapper "
                "of the hook evaluate can add metrics.",
                code="reserved-name",
                place="run.log",
            )
        if self.reductions.setdefault(name, reduce) != reduce:
            raise PluginError(
                f"run.log({name!r}): found reduce={reduce!r}, and {self.reductions[name]!r} before.",
                code="reduction-differs",
                remedy="Use one of them.",
            )
        if isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex():
            value = gather_full(value.detach())
            if value.device.type == "cpu":
                value = value.item()
            else:
                dtype = torch.promote_types(value.dtype, torch.float32)
                value = value.to(device, dtype, non_blocking=True, copy=True)
        elif not isinstance(value, Real):
            if isinstance(value, Tensor):
                given = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
            else:
                given = f"{value!r:.60}"
            raise PluginError(
                f"run.log({name!r}): found {given}, expected a real number or a real tensor without dimensions.",
                code="wrong-type",
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
        before = self.enabled
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = before

    def take(self) -> LoggedValues:
        """Remove all values, and begin to copy those on the device to the host."""
        taken = LoggedValues(self.values, self.reductions)
        self.values = {}
        return taken

    def state(self, processes: Processes) -> list[dict[str, Any]]:
        """The values of all processes, for a checkpoint. Every process must call it."""
        values = LoggedValues(self.values, self.reductions).read()
        return processes.all_gather_object({"values": values, "reductions": self.reductions})

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
        self.values = {}
        if processes.is_main:
            self.values = dict(states[0]["values"])
        for name in states[0]["values"]:
            if self.reductions.get(name, "main") == "main":
                continue
            self.values[name] = []
            if processes.is_main:
                for state in states:
                    self.values[name] += state["values"][name]


class LoggedValues:
    """The values of this process that belong to one log point. Those on the device are on their way to the host.

    Args:
        values: Name -> values, on the host or on the device.
        reductions: Name -> reduction, for the names that plugins logged.
    """

    def __init__(self, values: Mapping[str, Sequence[float | Tensor]], reductions: Mapping[str, str]) -> None:
        self._values = values
        self._reductions = reductions
        tensors: list[Tensor] = []
        for logged in values.values():
            tensors += [value for value in logged if isinstance(value, Tensor)]
        self._copy = HostCopy(torch.stack(tensors)) if tensors else None

    def arrive_within(self, seconds: float) -> bool:
        """Wait for the values, but not longer than this. Returns whether they have arrived."""
        return self._copy is None or self._copy.arrives_within(seconds)

    def read(self) -> dict[str, list[float]]:
        """Name -> values of this process. The host waits for the device if they have not arrived."""
        # in the order of the tensors among the values
        copied: Iterator[float] = iter(self._copy.read().tolist() if self._copy is not None else ())
        numbers = {}
        for name, values in self._values.items():
            numbers[name] = [next(copied) if isinstance(value, Tensor) else value for value in values]
        return numbers

    def reduce(self, processes: Processes) -> dict[str, float]:
        """The values of the main process, and those reduced over all. Every process must call it.

        Raises:
            PluginError: Processes logged different names or reductions; raised on every process.
        """
        own = self._partials()
        shared = {name: (self._reductions[name], own[name]) for name in own if self._is_shared(name)}
        every: list[dict[str, tuple[str, PartialResult]]] = processes.all_gather_object(shared)
        _check_names(every)
        reduced = {}
        for name, partial in own.items():
            if name in shared:
                partials = [of_process[name][1] for of_process in every]
                reduced[name] = _reduce(self._reductions[name], partials)
            else:
                reduced[name] = _reduce("main", [partial])
        return reduced

    def reduce_alone(self) -> tuple[dict[str, float], list[str]]:
        """The values that need none of other processes, and the names of the rest."""
        values = {}
        missing = []
        for name, partial in self._partials().items():
            if self._is_shared(name):
                missing.append(name)
            else:
                values[name] = _reduce("main", [partial])
        return values, missing

    def _is_shared(self, name: str) -> bool:
        return self._reductions.get(name, "main") != "main"

    def _partials(self) -> dict[str, PartialResult]:
        partials = {}
        for name, values in self.read().items():
            partials[name] = PartialResult(sum(values), len(values), _largest(values))
        return partials


class PartialResult(NamedTuple):
    """The sum, number and maximum of the values of one name on one process."""

    total: float
    number: int
    largest: float


def _check_names(every: Sequence[Mapping[str, tuple[str, PartialResult]]]) -> None:
    """Check that all processes logged the same names for a reduction, and the same reductions.

    Args:
        every: The names of each process, in order of rank: name -> its reduction and values.

    Raises:
        PluginError: They did not.
    """
    names: dict[str, None] = {}  # in order
    for of_process in every:
        names |= dict.fromkeys(of_process)
    for name in names:
        missing = [str(rank) for rank, of_process in enumerate(every) if name not in of_process]
        if missing:
            raise PluginError(
                f"run.log({name!r}): not logged on process {', '.join(missing)} of {len(every)} since the last log "
                "point.",
                code="missing-on-a-process",
                remedy="Log it on every process, or with reduce='main'.",
            )
        reductions = sorted({of_process[name][0] for of_process in every})
        if len(reductions) > 1:
            raise PluginError(
                f"run.log({name!r}): processes use different reductions: {', '.join(reductions)}.",
                code="reduction-differs",
                remedy="Use one of them.",
            )


def _reduce(reduction: str, parts: Sequence[PartialResult]) -> float:
    """The value of all processes: ``sum`` and ``max``, or otherwise the mean over all values."""
    if reduction == "max":
        return _largest([part.largest for part in parts])
    total = float(sum(part.total for part in parts))
    if reduction == "sum":
        return total
    return total / sum(part.number for part in parts)


def _largest(values: Sequence[float]) -> float:
    """The maximum; NaN if any value is NaN, and -infinity without values."""
    for value in values:
        if math.isnan(value):
            return math.nan
    return max(values, default=-math.inf)
