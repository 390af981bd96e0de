"""Forward passes on trial, which leave a model as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FunctionType, NoneType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


UNCHANGEABLE = frozenset({NoneType, bool, bytes, float, int, str, FunctionType})
"""Types of most attributes of a model, in which there is nothing to restore."""


@contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients and without torch's compiler. Afterwards, the model and the CPU's random states are
    what they were, also after an error.

    A forward pass may change a model for good. For example, BigBird keeps full attention after one short text, and
    rotary embeddings keep the longest length. The block may also change the model itself, such as its attention or its
    hooks. Everything is restored: attributes, submodules, hooks and configurations, and the values of buffers.
    Parameters are not copied, so the block must not write to them.
    """
    import torch

    from fastloop.evaluation_results import evaluating
    from fastloop.runtime.random_states import cpu_random_states, restore_random_states

    states = cpu_random_states()
    restore = remember(model)
    try:
        with evaluating(model), torch.no_grad(), uncompiled():
            yield
    finally:
        for put_back in restore:
            put_back()
        restore_random_states(states)


def uncompiled() -> AbstractContextManager[None]:
    """Compute without torch's compiler, which would compile each new shape, and then the training step for any shape.
    If nothing has imported the compiler, nothing is compiled, and this does not import it either: that takes a quarter
    of a second."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    import torch

    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def remember(model: nn.Module) -> list[Callable[[], None]]:
    """Functions that restore everything that a model consists of, except its parameters."""
    from torch import Tensor, nn

    restoring = list[Callable[[], None]]()
    known = set[int]()
    waiting = list[Any]([model])
    while waiting:
        value = waiting.pop()
        if type(value) in UNCHANGEABLE:
            continue
        if id(value) in known or isinstance(value, nn.Parameter):
            continue
        known.add(id(value))
        if isinstance(value, nn.Module):
            known.add(id(value._parameters))  # a strategy exchanges them in forward passes
            waiting.append(vars(value))
        elif hasattr(type(value), "to_dict") and hasattr(value, "__dict__"):  # a configuration of transformers
            waiting.append(vars(value))
        elif isinstance(value, Tensor):
            if value.grad_fn is None and not value.is_meta:
                restoring.append(partial(_put_back_values, value, value.detach().clone()))
        elif isinstance(value, dict | list | set):
            restoring.append(partial(_put_back_items, value, value.copy()))
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            waiting += value
    return restoring


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP gathered for a forward pass, because no backward pass will free them."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _put_back_values(tensor: Any, values: Any) -> None:
    import torch

    if not torch.equal(tensor, values):
        with torch.no_grad():
            tensor.copy_(values)


def _put_back_items(container: Any, items: Any) -> None:
    container.clear()
    container.extend(items) if isinstance(container, list) else container.update(items)
