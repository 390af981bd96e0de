"""The memory of one micro-step beside weights and gradients: forward and backward, with real tensors or fake ones."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fastloop_plugins._models import transformers_model

GROUPED = {torch.ops.aten._grouped_mm: lambda left, right, *_, **options: 2 * math.prod(left) * right[-1]}
"""The operations of experts' matrix products, by shapes, which torch does not count."""
FEW = (2, 3)
"""Blocks of the shortened models that stand for one with more equal blocks."""
PASSES = 2
"""Times that ``micro_step`` computes forward and backward."""


@dataclass(frozen=True)
class Activations:
    """The memory and the work of one micro-step on one process.

    Attributes:
        saved: Bytes that forward keeps for backward, without weights and inputs.
        peak: Most bytes at a time, without weights, buffers, inputs and gradients of weights.
        flops: Floating-point operations of matrix products, convolutions and attention.
        sent: Bytes that the process sends, for a model whose layers a strategy divides.
    """

    saved: int
    peak: int
    flops: int
    sent: float = 0.0


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate.

    Args:
        known: Tensors that are not counted.

    Attributes:
        live: Bytes of the storages that exist.
        peak: The most that ``live`` was.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.known = [tensor.untyped_storage() for tensor in known]  # kept, so that their addresses stay theirs
        self.counted: dict[int, Any] = {storage._cdata: None for storage in self.known}
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.counted:
            return
        self.sizes[key] = storage.nbytes()
        self.counted[key] = weakref.ref(storage, lambda _: self._free(key))
        self.live += self.sizes[key]
        self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        if self.counted.pop(key, None) is not None:
            self.live -= self.sizes.pop(key)

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a tensor from now on."""
        key = tensor.untyped_storage()._cdata
        if self.counted.get(key) is not None:
            self.counted[key] = None
            self.known.append(tensor.untyped_storage())
            self.live -= self.sizes.pop(key)


@contextmanager
def saved_bytes(known: list[Tensor]) -> Iterator[Callable[[], int]]:
    """Inside, autograd saves tensors as usual. The result counts their distinct storages, without those of
    ``known``."""
    skipped = {tensor.untyped_storage()._cdata for tensor in known}
    found: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in skipped:
            found[storage._cdata] = storage  # kept, so that no later storage has its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(storage.nbytes() for storage in found.values())


def micro_step(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], inputs: Any, precision: str, mode: Any = None
) -> Activations:
    """Compute forward and backward of one micro-batch twice: once to count what is saved, once to count the peak.

    Args:
        model: The model; its gradients are dropped.
        loss: Computes the loss by calling the model that it receives.
        inputs: The batch, whose tensors are not counted.
        precision: ``no``, ``bf16`` or ``fp16``: the dtype of autocast.
        mode: The mode of fake tensors; None: the tensors are real.
    """
    parameters = list(model.parameters())
    known = [*parameters, *model.buffers(), *(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))]
    fake: Callable[[], Any] = nullcontext if mode is None else lambda: mode
    with fake(), autocast(model, precision):
        with saved_bytes(known) as count, FlopCounterMode(display=False, custom_mapping=GROUPED) as counter:
            value = loss(model)
            saved = count()
            value.backward()  # type: ignore[no-untyped-call]
        del value
        model.zero_grad()
        live = LiveBytes(known)
        handles = [
            parameter.register_post_accumulate_grad_hook(lambda parameter: live.leave_out(parameter.grad))  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]
        with live:
            loss(model).backward()  # type: ignore[no-untyped-call]
        for handle in handles:
            handle.remove()
        model.zero_grad()
    return Activations(saved, live.peak, counter.get_total_flops())


def extrapolate(model: nn.Module, step: Callable[[], Activations]) -> Activations:
    """The result of ``step()``, computed with two and three blocks of the model if it has more, and all are equal.

    Each further block adds the same bytes to forward's, and at no moment adds more. So the peak is convex in the number
    of blocks: where the third block adds as much to the peak as to the saved bytes, each further one does, too.
    """
    blocks = equal_blocks(model)
    if blocks is None or len(blocks) <= FEW[-1]:
        return step()
    whole, found = blocks._modules, []
    try:
        for count in FEW:
            blocks._modules = dict(list(whole.items())[:count])
            found.append(step())
    finally:
        blocks._modules = whole
    before, last = found
    if last.peak - before.peak != last.saved - before.saved:
        return step()
    more = len(whole) - FEW[-1]
    return Activations(*(end + more * (end - start) for start, end in zip(astuple(before), astuple(last), strict=True)))


def equal_blocks(model: nn.Module) -> nn.ModuleList | None:
    """The blocks of a transformers model, if they differ only in their index; otherwise None."""
    found = transformers_model(model)
    count = getattr(found.config.get_text_config(), "num_hidden_layers", None) if found is not None else None
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    if len(lists) != 1:
        return None
    first, *others = ([_traits(part) for part in block.named_modules()] for block in lists[0])
    for index, other in enumerate(others, start=1):
        if len(first) != len(other):
            return None
        for ours, theirs in zip(first, other, strict=True):
            if ours.keys() != theirs.keys() or any(
                theirs[key] != value and (value, theirs[key]) != (0, index) for key, value in ours.items()
            ):
                return None
    return lists[0]


def _traits(part: tuple[str, nn.Module]) -> dict[str, Any]:
    """All attributes of a module by name, with None for those that are no plain values, and its weights and hooks."""
    name, module = part
    plain = (bool, int, float, str, tuple, torch.dtype)
    found = {key: value if isinstance(value, plain) else None for key, value in vars(module).items()}
    weights = {key: weight for key, weight in module._parameters.items() if weight is not None}
    shapes = {key: (weight.shape, weight.dtype, weight.requires_grad) for key, weight in weights.items()}
    hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
    return found | {"": (name, type(module), shapes, hooks)}


@contextmanager
def autocast(model: nn.Module, precision: str) -> Iterator[None]:
    """Inside, the model computes as Accelerate prepares it: forward under autocast, outputs in fp32."""
    if precision == "no":
        yield
        return
    from accelerate.utils import convert_outputs_to_fp32

    own = vars(model).get("forward")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype)(model.forward))
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def state_bytes(optimizer: Any, mode: Any = None) -> dict[int, int]:
    """Index of a parameter, in the order of the optimizer's groups -> bytes of its state after a step. Gradients are
    dropped.

    States of a single number, such as Adam's count of steps, are left out.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with nullcontext() if mode is None else mode:
        for group in optimizer.param_groups:
            # the state has the same sizes
            group.update({name: False for name in ("fused", "foreach") if name in group})
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    sizes = {}
    for index, parameter in enumerate(parameters):
        tensors = [
            value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor) and value.dim()
        ]
        sizes[index] = sum(tensor.nbytes for tensor in tensors)
    return sizes
