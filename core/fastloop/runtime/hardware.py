"""The capabilities of this machine, for the requirements of plugins and for `fastloop doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Machine:
    """A device type and its dtypes.

    Attributes:
        device: ``cpu``, ``cuda``, ``mps``, ``xpu``, ...
        name: Name of the device.
        dtypes: The dtypes of matrix products: a subset of ``fp32``, ``bf16``, ``fp16``, ``fp8``. On CUDA, without emulated ones.
    """

    device: str
    name: str
    dtypes: tuple[str, ...]


@cache
def this_machine(device: str = "auto") -> Machine:
    """Query torch for the device and its dtypes. ``device="cpu"`` ignores accelerators."""
    import torch

    kind = "cpu"
    if device == "auto" and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    dtypes = ["fp32"]
    if kind == "cuda":
        name = torch.cuda.get_device_name()
        capability = torch.cuda.get_device_capability()
        if torch.cuda.is_bf16_supported(including_emulation=False):
            dtypes.append("bf16")
        dtypes.append("fp16")
        if capability >= (8, 9):  # Ada and Hopper brought fp8 matrix units
            dtypes.append("fp8")
    elif kind == "cpu":
        name = torch.backends.cpu.get_cpu_capability()
        dtypes.append("bf16")  # correct everywhere; fast with AVX512-BF16 or AMX
    else:
        name = kind
        dtypes += ["bf16", "fp16"] if kind == "xpu" else ["fp16"]
    return Machine(kind, name, tuple(dtypes))
