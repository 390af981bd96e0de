"""Finds read-only plugins that change numbers which training depends on: weights, buffers, gradients, learning rates,
random states."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastloop.distributed.tensors import as_bytes, in_memory_order
from fastloop.errors import PluginError
from fastloop.problem import Problem
from fastloop.runtime.random_states import random_states

if TYPE_CHECKING:
    from fastloop.plugins.plugin import Plugin
    from fastloop.run import Run

log = logging.getLogger("fastloop")

CALLS = 8
"""Calls of each hook that are checked: a plugin that acts in every few calls acts at least once."""
DRAWING_HOOKS = {
    "before_epoch", "before_step", "after_backward", "before_optimizer_step", "after_step", "log_scalars", "after_epoch"
}  # fmt: skip
"""Hooks in which random numbers that a plugin draws are missing in training. Around others, such as ``before_fit`` and
those of an evaluation, fastloop restores the random states."""
ELEMENTS = 64
"""Elements of each tensor that are compared. A change of a weight changes most of its elements, and a comparison of all
would read the model twice for each hook."""
PLAIN = (Tensor, nn.Parameter)
"""Tensors whose elements lie in memory as torch stores them. Others, such as quantized ones, are not compared."""


class ReadOnlyChecks:
    """Checks the first calls of the hooks of read-only plugins.

    Raises:
        PluginError: After the call of a hook: it changed a weight, a buffer, a gradient or a learning rate.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.calls: Counter[tuple[str, str]] = Counter()  # (plugin, hook) -> checked calls
        self.draws: set[str] = set()  # plugins that were reported

    @contextmanager
    def watching(self, plugin: Plugin, hook: str) -> Iterator[None]:
        """Check that the block, a call of a plugin's hook, changes nothing. Other plugins are not checked."""
        is_built = getattr(self.run, "_built_model", None) is not None
        self.calls[plugin.name, hook] += 1
        if not plugin.read_only or not is_built or self.calls[plugin.name, hook] > CALLS:
            yield
            return
        numbers = read_numbers(self.run)
        # a thread that places batches reads samples meanwhile, which may draw random numbers
        draws_alone = hook in DRAWING_HOOKS and self.run.settings.placing is None
        states = read_random_states() if draws_alone else {}
        yield
        difference = numbers.difference(read_numbers(self.run))
        if difference:
            raise PluginError(
                f"{hook} changed {difference}, and the plugin is declared read_only: a run without it must compute "
                "the same numbers.",
                code="read-only-changed",
                place=f"{self.run.recipe.where}: plugin {plugin.name!r}",
                remedy="Change nothing, or remove read_only from its class and declare its numerics class.",
            )
        if states and plugin.name not in self.draws:
            self._report_draws(plugin, hook, states)

    def _report_draws(self, plugin: Plugin, hook: str, before: dict[str, object]) -> None:
        """Warn about a plugin that drew random numbers."""
        after = read_random_states()
        generators = [name for name, state in before.items() if after[name] != state]
        if generators:
            self.draws.add(plugin.name)
            log.warning(
                Problem(
                    f"{hook} drew random numbers of {' and '.join(generators)}, and the plugin is declared "
                    "read_only: a run without it trains with other random numbers.",
                    code="draws-random-numbers",
                    place=f"plugin {plugin.name!r}",
                    remedy="Draw them from a generator of its own.",
                )
            )


@dataclass(frozen=True)
class ElementSample:
    """Some elements of the tensors of one device.

    Attributes:
        names: One for each tensor, such as ``the weight 'head.bias'``.
        sizes: Bytes of the elements of each.
        data: A copy of the elements as uint8, (sum of sizes): as bytes, NaN equals NaN.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True)
class TrainingNumbers:
    """Some elements of weights, buffers and gradients on this process, and the learning rates."""

    samples: tuple[ElementSample, ...]
    learning_rates: tuple[float, ...]

    def difference(self, after: TrainingNumbers) -> str:
        """The first thing that differs in ``after``, such as ``the weight 'head.bias'``; empty if nothing does."""
        for before, now in zip(self.samples, after.samples, strict=False):  # their numbers are compared below
            if before.names != now.names or before.sizes != now.sizes:
                return _first_other_name(before, now)
            if not torch.equal(before.data, now.data):
                return _first_other_element(before, now)
        if len(self.samples) != len(after.samples):
            return "the weights, buffers or gradients that there are"
        if self.learning_rates != after.learning_rates:
            return "the learning rate"
        return ""


@torch.no_grad()
def read_numbers(run: Run) -> TrainingNumbers:
    """Copy the numbers of a run whose model is built."""
    names: dict[torch.device, list[str]] = {}
    data: dict[torch.device, list[Tensor]] = {}
    for name, tensor in _tensors(run.unwrap_model()):
        names.setdefault(tensor.device, []).append(name)
        data.setdefault(tensor.device, []).append(_some_elements(tensor))
    samples = []
    for device, parts in data.items():
        sizes = tuple(part.numel() for part in parts)
        samples.append(ElementSample(tuple(names[device]), sizes, torch.cat(parts)))
    optimizer = getattr(run, "optimizer", None)  # built after the model
    groups = [] if optimizer is None else optimizer.param_groups
    return TrainingNumbers(tuple(samples), tuple(float(group["lr"]) for group in groups if "lr" in group))


def read_random_states() -> dict[str, object]:
    """Generator -> its state, as values that ``==`` compares."""
    return {name: _comparable(state) for name, state in random_states().items()}


def _comparable(state: object) -> object:
    """A state whose tensors and arrays are bytes."""
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, tuple):
        parts: list[object] = []
        for part in state:
            if isinstance(part, tuple):  # Python's: 625 integers, which compare as they are
                parts.append(part)
            else:
                parts.append(_comparable(part))
        return parts
    return state


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights, buffers and gradients with a description of each: the local part of those that are sharded.

    This visits the modules once. ``named_parameters`` and ``named_buffers`` visit them twice, and look for tensors that
    modules share, which takes longer than to copy the elements of a small model."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            yield from _local(f"the weight '{start}{name}'", parameter)
            if parameter.grad is not None:
                yield from _local(f"the gradient of '{start}{name}'", parameter.grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield from _local(f"the buffer '{start}{name}'", buffer)


def _local(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The part of a tensor on this process, if its elements can be compared."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if type(tensor) in PLAIN and tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
        yield name, tensor


def _some_elements(tensor: Tensor) -> Tensor:
    """The bytes of up to ``ELEMENTS`` elements, evenly spread over the tensor's memory."""
    flat = in_memory_order(tensor.detach()).flatten()
    step = -(-flat.numel() // ELEMENTS)
    return as_bytes(flat[::step])


def _first_other_name(before: ElementSample, now: ElementSample) -> str:
    """The first tensor that is in one of two samples only, or has another size."""
    known = set(zip(before.names, before.sizes, strict=True))
    for name, size in zip(now.names, now.sizes, strict=True):
        if (name, size) not in known:
            return name
    present = set(zip(now.names, now.sizes, strict=True))
    for name, size in zip(before.names, before.sizes, strict=True):
        if (name, size) not in present:
            return name
    return "the order of the weights"


def _first_other_element(before: ElementSample, now: ElementSample) -> str:
    """The first tensor with another element."""
    start = 0
    for name, size in zip(before.names, before.sizes, strict=True):
        end = start + size
        if not torch.equal(before.data[start:end], now.data[start:end]):
            return name
        start = end
    return ""
