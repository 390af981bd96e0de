"""A device that is emulated on the CPU and records each time the host waits for it, as it would wait for a GPU.

``DeviceTensor`` reports another device than the CPU and computes with the CPU's kernels. So a run takes the paths of an
accelerator, its numbers are real, and a wait shows without a GPU. Three kinds of operation wait:

* a read: ``.item()``, ``bool(tensor)``, ``.tolist()``, ``.cpu()``, ``torch.equal``; a ``copy_`` to the host that is not
  ``non_blocking``;
* an operation whose output's shape follows from values: ``nonzero``, ``unique``, ``bincount``, a boolean index;
* a copy to the device that is not ``non_blocking``, such as ``torch.tensor(1.0, device=device)``;
* ``synchronize`` of an event, if the device was given no work since the event was recorded.

A ``non_blocking`` copy to the host arrives when an event that was recorded after it is waited for. Until then the copy
holds zeros, so code that reads it too early computes with wrong numbers.

A tensor on the host is none of the device's: a batch's totals, the sampler's order and random states are read without a
wait.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fastloop import Batch, Plugin, hookimpl
from fastloop.run import Run
from fastloop.runtime import device_copies, host_copies
from fastloop.runtime.clock import Clock

aten = torch.ops.aten
DEVICE = torch.device("meta")
"""The name that the emulated device goes by: autograd runs its tensors' backward in the calling thread, as the
CPU's."""
READS = torch.Tag.data_dependent_output
SHAPES = torch.Tag.dynamic_output_shape
PACKAGES = ("fastloop", "fastloop_plugins", "transformers", "torchmetrics", "accelerate")


class DeviceTensor(Tensor):
    """A tensor on the emulated device. ``host`` holds its numbers."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        """Wrap a tensor of the CPU; it keeps its shape, strides and dtype."""
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )
        made.host = host
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:  # so that ``Module.to`` keeps its parameters' identity
        return ["host"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: Any, size: Any, stride: Any) -> DeviceTensor:
        return DeviceTensor(inner["host"])

    def tolist(self) -> Any:  # torch's refuses subclasses
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {}, [])


class Stream:
    """The work that the emulated device was given.

    Attributes:
        operations: Number of operations so far.
        received: Number of copies from the host so far.
        in_flight: Copies to the host that have not arrived, each with its numbers.
    """

    def __init__(self) -> None:
        self.operations = self.received = 0
        self.in_flight: list[tuple[Tensor, Tensor]] = []

    def send(self, numbers: Tensor) -> Tensor:
        """Start a copy to the host."""
        copy = torch.zeros_like(numbers)
        self.in_flight.append((copy, numbers.clone()))
        return copy


STREAM = Stream()


class EmulatedEvent:
    """Stands for ``torch.Event``: the end of the work that the device had been given when it was recorded."""

    def __init__(self, waits: list[str], device: torch.device) -> None:
        assert torch.device(device) == DEVICE
        self.waits = waits

    def record(self) -> None:
        """Recorded after the work so far."""
        self.operations = STREAM.operations
        self.copies = list(STREAM.in_flight)

    def query(self) -> bool:
        """Whether the device is past it: once it has been given further work, or time has passed."""
        is_past = STREAM.operations > self.operations
        self.operations -= 1  # some time passes until the next query
        return is_past

    def synchronize(self) -> None:
        """Wait for it."""
        if not self.query():
            self.waits.append(_place("event"))
        for copy, numbers in self.copies:
            copy.copy_(numbers)
        STREAM.in_flight = [pair for pair in STREAM.in_flight if not any(pair[0] is copy for copy, _ in self.copies)]


def compute(func: Any, args: Any, kwargs: dict[str, Any], waits: list[str]) -> Any:
    """Run an operation on the CPU, its result on the device that a GPU run would have it on; append to ``waits`` if the
    host waits."""
    flat = tree_leaves((args, kwargs))
    inputs = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    wrapped = {id(leaf.host): leaf for leaf in inputs if isinstance(leaf, DeviceTensor)}
    joins = func in (aten.cat.default, aten.stack.default)  # others take a number from the host as an argument
    elsewhere = [leaf for leaf in inputs if not isinstance(leaf, DeviceTensor) and (leaf.dim() or joins)]
    target = kwargs.get("device")
    copies = func in (aten._to_copy.default, aten.copy_.default) and any(tensor.numel() for tensor in inputs)
    to_host = func is aten._to_copy.default and target is not None and torch.device(target) != DEVICE
    to_host = to_host or (func is aten.copy_.default and not isinstance(args[0], DeviceTensor))
    on_device = (bool(wrapped) and not to_host) or (target is not None and torch.device(target) == DEVICE)
    if any(tensor.is_meta for tensor in inputs if not isinstance(tensor, DeviceTensor)):
        raise RuntimeError(f"{func} has an input without numbers")
    if wrapped and elsewhere and not copies:
        raise RuntimeError(
            f"{func} has inputs on the device and on the host: {[tuple(tensor.shape) for tensor in elsewhere]}"
        )
    if wrapped and (READS in func.tags or (SHAPES in func.tags and shape_from_values(func, args))):
        waits.append(_place(func))
    sends = bool(copies and to_host and wrapped and (kwargs.get("non_blocking") or args[2:] == (True,)))
    if copies and to_host and wrapped and not sends:
        waits.append(_place(func))
    if copies and on_device and any(not isinstance(leaf, DeviceTensor) for leaf in inputs):
        STREAM.received += 1
        blocking = not (kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:] == (True,)))
        if blocking:
            waits.append(_place(func))
    if target is not None and torch.device(target) == DEVICE:
        kwargs = kwargs | {"device": torch.device("cpu")}

    def unwrap(leaf: Any) -> Any:
        return leaf.host if isinstance(leaf, DeviceTensor) else leaf

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not on_device:
            return leaf
        # an operation in place returns its own input
        return wrapped[id(leaf)] if id(leaf) in wrapped else DeviceTensor(leaf)

    if on_device or to_host:
        STREAM.operations += 1
    result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    if sends and func is aten._to_copy.default:
        return STREAM.send(result)
    return tree_map(wrap, result)


def shape_from_values(func: Any, args: Any) -> bool:
    """Whether the shape of the result of an operation with the tag ``SHAPES`` follows from values: indexing does only
    with a mask."""
    return func is not aten.index.Tensor or any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


def _place(func: Any) -> str:
    """The operation, and the innermost line outside torch that called it."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        found = next((name for name in PACKAGES if name in path.parts), None)
        if found:
            return f"{func} in {'/'.join(path.parts[path.parts.index(found) :])}: {frame.line}"
    return f"{func} in {traceback.extract_stack()[0].filename}"


class _Operations(TorchDispatchMode):
    """Computes what concerns the emulated device, and operations that make tensors there from nothing."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {}, self.waits)


class _Constructors(TorchFunctionMode):
    """Makes tensors from Python numbers on the host first, as torch does for every device but the one whose name is
    borrowed here. Page-locked memory is ordinary memory: without an accelerator, torch has no other."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func in (torch.tensor, torch.as_tensor)
            and kwargs.get("device") is not None
            and torch.device(kwargs["device"]) == DEVICE
        ):
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        if func is Tensor.pin_memory:
            return args[0]
        if func is torch.empty:
            kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


@contextmanager
def emulation(waits: list[str]) -> Iterator[None]:
    """Tensors can be on the emulated device inside of this. Each wait is appended to ``waits``."""
    with pytest.MonkeyPatch.context() as patch, _Operations(waits), _Constructors():
        patch.setattr(host_copies, "Event", partial(EmulatedEvent, waits))
        patch.setattr(device_copies, "separate", lambda part: part.data)  # no other library can share such a tensor
        yield


class EmulatedDevice(Plugin):
    """Puts a run on the emulated device, and records where the host waited for it.

    Args:
        pin_memory: Whether batches are in page-locked memory, as is the default on CUDA.

    Attributes:
        waits: Operation and source line of each wait since the start of a step or an evaluation.
        steps: The waits of each training step, from the copy of its batches until the loop asks for the next ones,
            evaluates or saves. They include those of a log point.
        evaluations: The waits of each evaluation, without what plugins wrap around it.
        copies: Copies to the device for a batch of each training step.
    """

    name = "emulated-device"

    def __init__(self, pin_memory: bool = True) -> None:
        super().__init__()
        self.pin_memory = pin_memory
        self.waits: list[str] = []
        self.steps: list[list[str]] = []
        self.evaluations: list[list[str]] = []
        self.copies: list[float] = []
        self.copied = 0.0
        self.in_step = self.evaluating = False

    @contextmanager
    def emulate(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Build and execute the run inside of this."""
        optimizer = import_module("torch.optim.optimizer")
        foreach = import_module("torch.utils._foreach_utils")
        for module in (optimizer, foreach):  # as on CUDA, where torch steps all weights at once
            for kind in ("foreach", "fused"):
                monkeypatch.setattr(module, f"_get_{kind}_kernels_supported_devices", lambda: ["cpu", DEVICE.type])
        monkeypatch.setattr(optimizer, "_foreach_supported_types", [Tensor, nn.Parameter, DeviceTensor])
        with emulation(self.waits):
            yield

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"pin_memory": self.pin_memory, "placing": self.placed}

    def placed(
        self, steps: Iterable[list[Batch]], place: Callable[[list[Batch]], list[Batch]]
    ) -> Iterator[list[Batch]]:
        """Each step's batches on the device, when it is its turn."""
        for step in steps:
            if self.pin_memory:  # without an accelerator, torch's loader does not
                for batch in step:
                    batch.pin_memory()
            before = STREAM.received
            if not self.evaluating:
                self.waits.clear()
            placed = place(step)
            self.copied = (STREAM.received - before) / len(step)
            try:
                yield placed
            finally:
                self.end_step()

    @hookimpl(wrapper=True)
    def build_datasets(self, run: Run) -> Generator[None, Any, Any]:
        run.device = DEVICE
        run.clock = Clock(self.synchronize)
        return (yield)

    @hookimpl(tryfirst=True)
    def before_step(self) -> None:
        self.in_step = True

    def synchronize(self) -> None:
        """The run begins or ends a phase, such as an evaluation or a save, and waits for the device."""
        self.end_step()
        self.waits.append("synchronize")

    def end_step(self) -> None:
        """Keep the waits of a step."""
        if self.in_step:
            self.steps.append(self.waits.copy())
            self.copies.append(self.copied)
        self.in_step = False

    @hookimpl(tryfirst=True)
    def after_prepare(self, model: nn.Module) -> None:
        model.to(DEVICE)

    @hookimpl(wrapper=True, trylast=True)
    def evaluate(self) -> Generator[None, Any, Any]:
        self.evaluating = True
        self.waits.clear()
        try:
            return (yield)
        finally:
            self.evaluations.append(self.waits.copy())
            self.evaluating = False
