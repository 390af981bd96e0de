"""When ``fsdp`` reduces gradients: those of all trained parameters, or of the last micro-step only.

Their norm and clipping are methods of ``DividingStrategy`` in ``_tensor_group``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from fastloop_plugins.strategies._gradients import Gradients


def fill_gradients(model: nn.Module, gradients: Gradients) -> None:
    """Reduce a gradient of every trained parameter, and record which ones backward computed.

    Torch reduces only the gradients that a process has. Processes that used different layers would add gradients of
    different parameters.
    """
    for group in _groups(model):
        group.post_backward = partial(_post_backward, group, group.post_backward, gradients)


def _groups(model: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # torch 2.10 has one
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            yield from filter(None, groups)


def _post_backward(group: Any, post_backward: Callable[[], None], gradients: Gradients, *unused: Any) -> None:
    import torch

    for parameter in group.fsdp_params:
        full = getattr(parameter, "_unsharded_param", None)  # None before it was gathered once
        if full is None or not parameter.sharded_param.requires_grad:
            continue
        if full.grad is not None:
            gradients.has_any = True
        if group.reduce_grads:
            if full.grad is not None or parameter.unsharded_accumulated_grad is not None:
                gradients.add(parameter.sharded_param)
            else:
                full.grad = torch.zeros_like(full)
    post_backward()


@contextmanager
def held_back(switch: Callable[[bool], None]) -> Iterator[None]:
    """Suppress the reduction of gradients that ``switch`` controls, in all micro-steps but the last."""
    switch(False)
    try:
        yield
    finally:
        switch(True)
