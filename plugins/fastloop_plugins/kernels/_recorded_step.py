"""Record the operations of a training step as a CUDA graph, and find out when a graph no longer fits.

The parts of a step, as torch 2.11 and 2.13 record them:

* Forward and loss: kernels on the recording stream. Autocast casts weights inside, because its cache ends with the
  outermost autocast block.
* Dropout: ``capture_begin`` registers CUDA's default generator. A replay reads the generator's seed and offset, and
  advances the offset by as much as the step without a graph does.
* Backward: autograd's thread launches on the stream of the forward. Gradients are None at the start of a step, so that
  backward writes them before anything reads them, and they need no zeros. They lie in the memory of the graphs.
* ``clip_grad_norm_``: ``_foreach_norm``, ``stack``, ``vector_norm``, ``clamp``, ``_foreach_mul_``. No number is read,
  as long as ``error_if_nonfinite`` is False.
* Fused Adam and AdamW: ``_foreach_add_`` of the numbers of steps, which a fused optimizer has on the device, and
  ``_fused_adam_`` with the learning rate as a tensor. ``step`` refuses to be recorded without ``capturable``.
* ``zero_grad``: sets None, without an operation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

CONSTANTS = (bool, int, float, str, bytes, type(None))
"""Types of a batch's values beside tensors: a graph fits the values that it was recorded with."""


class CudaRecorder:
    """Computes steps on a stream of its own, and records them as CUDA graphs.

    The graphs share the memory of their intermediate tensors: one graph at a time is replayed, and its results are
    copied before the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def compute(self, step: Callable[[], None]) -> None:
        """Compute a step without a graph.

        It runs on the stream that records, so that libraries have allocated their workspaces for it before.
        """
        waiting = torch.cuda.current_stream()
        self.stream.wait_stream(waiting)
        with torch.cuda.stream(self.stream):
            step()
        waiting.wait_stream(self.stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record a step: the device computes nothing yet. Returns the function that computes it, each time it is
        called.

        Raises:
            RuntimeError: The step did what a graph cannot hold, such as to read a number from the device.
        """
        graph = torch.cuda.CUDAGraph()
        # another thread may pin the next batch meanwhile, which the mode "global" refuses
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            step()
        return graph.replay


@dataclass(frozen=True)
class RecordedStep:
    """A step whose operations can be repeated.

    Attributes:
        inputs: The tensors of the batch that the operations read. A batch is copied into them.
        replay: Computes the step.
        loss: The step's loss, 0-dim. The next replay of any graph overwrites it.
        grad_norm: The norm of the gradients before clipping, likewise; None if it is not logged.
    """

    inputs: list[Tensor]
    replay: Callable[[], None]
    loss: Tensor
    grad_norm: Tensor | None

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of another batch of the same kind into ``inputs``."""
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for own, tensor in zip(self.inputs, tensors, strict=True):
            targets, sources = by_dtype.setdefault(own.dtype, ([], []))
            targets.append(own)
            sources.append(tensor)
        for targets, sources in by_dtype.values():  # one kernel for those of a dtype
            torch._foreach_copy_(targets, sources)


@dataclass(frozen=True)
class BatchKind:
    """A batch, taken apart.

    Attributes:
        key: Equal for batches that one graph fits: their structure, the shapes and dtypes of their tensors, and all
            other values.
        tensors: Its tensors.
        other_type: The name of the type of a value that cannot be compared; empty if there is none.
    """

    key: Hashable
    tensors: list[Tensor]
    other_type: str

    @classmethod
    def of(cls, inputs: Any) -> BatchKind:
        """Take the inputs of a batch apart."""
        leaves, structure = tree_flatten(inputs)
        tensors: list[Tensor] = []
        parts: list[Hashable] = [repr(structure)]
        other_type = ""
        for leaf in leaves:
            if type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.requires_grad:
                tensors.append(leaf)
                parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype))
            elif isinstance(leaf, CONSTANTS):
                parts.append((type(leaf), leaf))
            else:
                other_type = type(leaf).__name__
        return cls(tuple(parts), tensors, other_type)


def with_tensors(inputs: Any, tensors: Sequence[Tensor]) -> Any:
    """The same nesting with other tensors, in the order of ``BatchKind.tensors``."""
    leaves, structure = tree_flatten(inputs)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for place, tensor in zip(places, tensors, strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, structure)


class LearningRates:
    """The learning rates of an optimizer on the device, where a graph reads them.

    Schedulers and checkpoints have the numbers of the host in ``param_groups``.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.values: list[float] = []
        self.tensors = [
            torch.zeros((), device=device) for _ in optimizer.param_groups
        ]  # float32: fused kernels need it

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside the block, the optimizer reads its learning rates on the device, and may be recorded."""
        groups = self.optimizer.param_groups
        values = [float(group["lr"]) for group in groups]
        if values != self.values:
            for tensor, value in zip(self.tensors, values, strict=True):
                tensor.fill_(value)  # a kernel with the number as its argument: nothing waits
            self.values = values
        capturable = [group["capturable"] for group in groups]
        for group, tensor in zip(groups, self.tensors, strict=True):
            group["lr"] = tensor
        try:
            yield
        finally:
            for group, value, before in zip(groups, values, capturable, strict=True):
                group["lr"] = value
                group["capturable"] = before

    def allow_recording(self) -> None:
        """Let the optimizer be recorded, until the block of ``on_device`` ends. Torch warns of a step with this flag
        that is not recorded."""
        for group in self.optimizer.param_groups:
            group["capturable"] = True


def read_constants(modules: Sequence[nn.Module], optimizer: Optimizer) -> tuple[Hashable, ...]:
    """All that the operations of a step contain as numbers: the addresses of weights, buffers and the optimizer's
    state, its settings except for the learning rate, the weights that are trained, and the modules in train mode.

    A graph no longer fits if one of them has changed, such as after a rollback to a checkpoint.

    Args:
        modules: All modules of the model.
    """
    constants: list[Hashable] = []
    for module in modules:
        constants.append(module.training)
        for parameter in module._parameters.values():
            if parameter is not None:
                constants.append((parameter.data_ptr(), parameter.requires_grad))
        for buffer in module._buffers.values():
            if buffer is not None:
                constants.append(buffer.data_ptr())
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name not in ("params", "lr", "initial_lr", "capturable"):
                constants.append((name, value if isinstance(value, Hashable) else repr(value)))
        for parameter in group["params"]:
            for value in optimizer.state.get(parameter, {}).values():
                constants.append(value.data_ptr() if isinstance(value, Tensor) else value)
    return tuple(constants)


def gradient_hook(model: nn.Module) -> str | None:
    """The name of a weight whose gradient has a hook, which Python runs in each backward pass; None: there is none."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return name
    return None


def host_random_states() -> tuple[Hashable, ...]:
    """The states of the generators on the host."""
    _, numbers, position, *_ = np.random.get_state()
    return random.getstate(), np.asarray(numbers).tobytes(), position, torch.get_rng_state().numpy().tobytes()
