"""What this machine can do: the facts that plugins' needs are checked against and that `fastloop doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Machine:
    """A device type and what it computes in.

    Attributes:
        device: ``cpu``, ``cuda``, ``mps``, ``xpu``, ...
        name: The device's own name.
        dtypes: Of ``fp32``, ``bf16``, ``fp16``, ``fp8``: those it multiplies matrices in, without emulation where that can be told.
    """

    device: str
    name: str
    dtypes: tuple[str, ...]


@cache
def this_machine(device: str = "auto") -> Machine:
    """The machine as torch sees it; ``device`` "cpu" leaves accelerators aside. Imports torch."""
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
