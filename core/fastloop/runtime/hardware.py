"""The capabilities of this machine, for the requirements of plugins and for `fastloop doctor`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from fastloop.distributed.ranks import world_size


@dataclass(frozen=True)
class Machine:
    """A device type and its dtypes.

    Attributes:
        device: ``cpu``, ``cuda``, ``mps``, ``xpu``, ...
        name: Name of the device.
        dtypes: The dtypes of matrix products: a subset of ``fp32``, ``bf16``, ``fp16``, ``fp8``. On CUDA, without
            emulated ones.
        fast_dtypes: The dtypes that matrix units of the device multiply faster than fp32.
        processes: Number of processes that train together.
    """

    device: str
    name: str
    dtypes: tuple[str, ...]
    fast_dtypes: tuple[str, ...] = ()
    processes: int = 1


def this_machine(device: str = "auto") -> Machine:
    """Query torch for the device and its dtypes, and the environment for the number of processes. ``device="cpu"``
    ignores accelerators."""
    # not in the cache: a command may plan for several processes, and a notebook may train with another number of them
    return replace(_hardware(device), processes=world_size())


@cache
def _hardware(device: str) -> Machine:
    """The device and its dtypes, which stay the same as long as a process lives."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True) if device == "auto" else None
    kind = "cpu" if accelerator is None else accelerator.type
    dtypes = ["fp32"]
    if kind == "cuda":
        name = torch.cuda.get_device_name()
        if torch.cuda.is_bf16_supported(including_emulation=False):
            dtypes.append("bf16")
        dtypes.append("fp16")
        if torch.cuda.get_device_capability() >= (8, 9):  # Ada, Hopper and newer
            dtypes.append("fp8")
    elif kind == "cpu":
        name = torch.backends.cpu.get_cpu_capability()
        dtypes.append("bf16")  # correct everywhere
        if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
            return Machine(kind, name, tuple(dtypes))
    else:
        name = kind
        dtypes += ["bf16", "fp16"] if kind == "xpu" else ["fp16"]
    return Machine(kind, name, tuple(dtypes), tuple(dtypes[1:]))
