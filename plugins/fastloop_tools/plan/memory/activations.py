"""The memory of one micro-step beside weights and gradients: forward and backward, with real tensors or fake ones."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fastloop_plugins.models.wrapped import transformers_model

GROUPED = {torch.ops.aten._grouped_mm: lambda left, right, *_, **options: 2 * math.prod(left) * right[-1]}
"""The operations of experts' matrix products, by shapes, which torch does not count."""
SHORTENED_BLOCKS = (2, 3)
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
        self.live = 0
        self.peak = 0
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
    saved: dict[int, Any] = {}  # address -> storage, which is kept so that no later one has its address

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in skipped:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(storage.nbytes() for storage in saved.values())


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
    of blocks: where the third block adds as much to the peak as to the saved bytes, each further one does, too. If two
    blocks save 20 bytes and three save 30, twelve save 30 + 9 * 10 = 120.
    """
    blocks = equal_blocks(model)
    fewer, few = SHORTENED_BLOCKS
    if blocks is None or len(blocks) <= few:
        return step()
    whole = blocks._modules
    try:
        blocks._modules = dict(list(whole.items())[:fewer])
        with_fewer = step()
        blocks._modules = dict(list(whole.items())[:few])
        with_few = step()
    finally:
        blocks._modules = whole
    if with_few.peak - with_fewer.peak != with_few.saved - with_fewer.saved:
        return step()
    more = len(whole) - few
    return Activations(
        saved=with_few.saved + more * (with_few.saved - with_fewer.saved),
        peak=with_few.peak + more * (with_few.peak - with_fewer.peak),
        flops=with_few.flops + more * (with_few.flops - with_fewer.flops),
        sent=with_few.sent + more * (with_few.sent - with_fewer.sent),
    )


def equal_blocks(model: nn.Module) -> nn.ModuleList | None:
    """The blocks of a transformers model, if they differ only in their index; otherwise None."""
    of_transformers = transformers_model(model)
    if of_transformers is None:
        return None
    count = getattr(of_transformers.config.get_text_config(), "num_hidden_layers", None)
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    if len(lists) != 1:
        return None
    blocks = lists[0]
    first = _traits_of_parts(blocks[0])
    for index, block in enumerate(blocks):
        if not _differ_in_index(first, _traits_of_parts(block), index):
            return None
    return blocks


def _traits_of_parts(block: nn.Module) -> list[dict[str, Any]]:
    return [_traits(name, part) for name, part in block.named_modules()]


def _traits(name: str, module: nn.Module) -> dict[str, Any]:
    """All attributes of a module by name, with None for those that are no plain values, and its weights and hooks."""
    plain = (bool, int, float, str, tuple, torch.dtype)
    traits = {key: value if isinstance(value, plain) else None for key, value in vars(module).items()}
    weights = {key: weight for key, weight in module._parameters.items() if weight is not None}
    shapes = {key: (weight.shape, weight.dtype, weight.requires_grad) for key, weight in weights.items()}
    hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
    traits[""] = (name, type(module), shapes, hooks)
    return traits


def _differ_in_index(first: list[dict[str, Any]], other: list[dict[str, Any]], index: int) -> bool:
    """Whether block ``index`` is as the first one, except for values that are 0 there and ``index`` here, such as
    ``layer_idx``."""
    if len(first) != len(other):
        return False
    for ours, theirs in zip(first, other, strict=True):
        if ours.keys() != theirs.keys():
            return False
        for key, value in ours.items():
            is_index = value == 0 and theirs[key] == index
            if theirs[key] != value and not is_index:
                return False
    return True


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
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
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
        state = optimizer.state.get(parameter, {})
        tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
        sizes[index] = sum(tensor.nbytes for tensor in tensors)
    return sizes
