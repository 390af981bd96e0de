"""Forward passes on trial, which leave a model as it was."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType, NoneType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from fastloop.runtime.random_states import RandomGenerator

UNCHANGEABLE = frozenset({NoneType, bool, bytes, float, int, str})
"""Types of most attributes of a model, in which there is nothing to restore."""
CONTAINERS = frozenset({dict, OrderedDict, list, set, tuple})
"""Types of nearly all parts of a model: a module has a dozen dicts for its hooks."""


def has_values(model: nn.Module) -> bool:
    """Whether the model's parameters have values on this process, so that it can be tried.

    They have none on the meta device: `fastloop plan --device-memory` builds every model there. With fsdp's
    ``meta_device``, all processes but the main one do, and receive the values later.
    """
    return not any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def probing(model: nn.Module, loss: Any = None) -> Iterator[None]:
    """Eval mode without gradients and without torch's compiler. Afterwards, the model and the random states are what
    they were: see ``restoring``.

    Args:
        loss: As in ``restoring``.
    """
    import torch

    from fastloop.evaluation_results import evaluating

    with restoring(model, loss), evaluating(model), torch.no_grad(), uncompiled():
        yield


@contextmanager
def restoring(model: nn.Module, loss: Any = None) -> Iterator[None]:
    """After the block, the model and the random states are what they were, also after an error.

    A forward pass may change a model for good. For example, BigBird keeps full attention after one short text, and
    rotary embeddings keep the longest length. The block may also change the model itself, such as its attention or its
    hooks. Everything is restored: attributes, submodules, hooks and configurations, the values of buffers, and
    the states of generators that the model keeps for itself. Parameters are not copied, so the block must not write to
    them.

    Args:
        loss: A loss function. Its attributes and the generators that it keeps are restored, too.
    """
    from fastloop.runtime.random_states import random_states, restore_random_states

    states = random_states()
    restore = remember(model, loss)
    try:
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


def remember(model: nn.Module, loss: Any = None) -> list[Callable[[], None]]:
    """Functions that restore everything that a model consists of, except its parameters.

    Args:
        loss: As in ``restoring``.
    """
    from torch import Tensor

    from fastloop.runtime.random_states import read_generators, restore_generators

    restoring = list[Callable[[], None]]()
    empty = list[Any]()  # nearly all containers
    parts = [*_parts_of(model, loss)]
    for value in parts:
        if isinstance(value, dict | list | set):
            if len(value):
                restoring.append(partial(_put_back_items, value, value.copy()))
            else:
                empty.append(value)
        elif isinstance(value, Tensor) and value.grad_fn is None and not value.is_meta:
            restoring.append(partial(_put_back_values, value, value.detach().clone()))
    restoring.append(partial(_empty_again, empty))
    generators = _find_in_parts(model, parts)
    restoring.append(partial(restore_generators, generators, read_generators(generators)))
    return restoring


def own_generators(model: nn.Module, loss: Any = None) -> list[RandomGenerator]:
    """The generators of random numbers that a model keeps for itself, such as one for its own dropout. They are
    attributes of its modules, global variables that a ``forward`` names, or in objects and functions that its modules
    hold; see ``find_generators``.

    Args:
        loss: As in ``restoring``.
    """
    return _find_in_parts(model, _parts_of(model, loss))


def _find_in_parts(model: nn.Module, parts: Iterable[Any]) -> list[RandomGenerator]:
    """``own_generators`` of a model whose parts are known: see ``_parts_of``."""
    from torch import Tensor

    from fastloop.runtime.random_states import find_generators

    others = list[Any]()
    for value in parts:
        if not isinstance(value, dict | list | set | tuple) and not isinstance(value, Tensor):
            others.append(value)
    for kind in {type(module) for module in model.modules()}:
        others.append(kind.forward)
    return find_generators(*others)


def _parts_of(model: nn.Module, loss: Any) -> Iterator[Any]:
    """Everything that the modules and the configurations of a model hold, each object once, except parameters: tensors,
    dicts, lists, sets, tuples, and other objects, into which this does not look. The same of a loss function, and what
    it holds itself."""
    from torch import nn

    known = set[int]()
    waiting = list[Any]([loss, getattr(loss, "__dict__", None), model])
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind in UNCHANGEABLE or id(value) in known:
            continue
        known.add(id(value))
        if kind not in CONTAINERS:
            if isinstance(value, nn.Parameter):
                continue
            if isinstance(value, nn.Module):
                known.add(id(value._parameters))  # a strategy exchanges them in forward passes
                waiting.append(vars(value))
                continue
            if hasattr(kind, "to_dict") and hasattr(value, "__dict__"):  # a configuration of transformers
                waiting.append(vars(value))
                continue
            if isinstance(value, MethodType):
                waiting.append(value.__self__)  # a module, or an object that may keep a generator
                continue
            if isinstance(value, partial):
                waiting += [value.func, value.args, value.keywords]
                continue
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | set | tuple):
            waiting += value
        yield value


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


def _empty_again(containers: Iterable[Any]) -> None:
    for container in containers:
        if len(container):
            container.clear()


def _put_back_items(container: Any, items: Any) -> None:
    container.clear()
    container.extend(items) if isinstance(container, list) else container.update(items)
