"""Plugins of fastloop for a CPU, and their kernels in C.

cpu_attention, _cpu_attention   # a plugin, and the module that calls ``cpu_attention.c``
cpu_layers, _cpu_layers, _cpu_decoder   # the same for ``cpu_layers.c`` (encoders) and ``cpu_decoder.c``
int8_linears, _int8_linears, _int8_changes   # the same for ``int8_linears.c``, and how much predictions change
fast_dropout, _fast_dropout   # a plugin, and its random generator
cpu_affinity              # cores and threads of processes
_native                   # compiles the kernels
_precision                # the precision that they need, and the message of a plugin without effect
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["use_blocked_attention"]


def use_blocked_attention(model: nn.Module) -> bool:
    """Set the blocked attention on the transformers model in ``model``. It computes exact attention in pieces that stay
    in a core's cache, and leaves dropout to torch. The plugin ``attention`` of fastloop calls it.

    Returns:
        False: the model does not support ``sdpa``, and is unchanged. Otherwise the model's attention in transformers'
        registry is ``fastloop_blocked``.
    """
    from fastloop_cpu._fast_dropout import BLOCKED, use

    return use(model, BLOCKED, drops=False)
