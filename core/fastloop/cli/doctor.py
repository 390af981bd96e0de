"""``fastloop doctor``: the capabilities of this machine."""

from __future__ import annotations

import os
import shutil

import typer

from fastloop.plugins.installed import entry_points, name_and_version
from fastloop.plugins.packages import DISTRIBUTION


def doctor() -> None:
    """Print the capabilities of this machine.

    It shows devices, dtypes, compilers, versions of packages, and installed extras.
    """
    import importlib.metadata
    import platform

    import torch
    from packaging.requirements import Requirement

    from fastloop.runtime import platform_support
    from fastloop.runtime.hardware import this_machine

    def line(name: str, value: str) -> None:
        typer.echo(f"{name:<23}{value}")

    machine = this_machine()
    line(
        "device",
        f"{machine.device} ({machine.name})"
        + (f" x {torch.accelerator.device_count()}" if machine.device != "cpu" else ""),
    )
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        for point in entry_points("torch.backends"):
            package = " ".join(name_and_version(point.dist)) if point.dist else point.value
            line(
                "not loaded",
                f"{point.name} of {package}: TORCH_DEVICE_BACKEND_AUTOLOAD=1 fastloop doctor runs its code",
            )
    line("dtypes", ", ".join(machine.dtypes))
    line("processors", f"{platform_support.cores()}, of which torch uses {torch.get_num_threads()}")
    compilers = [shutil.which(name) for name in ("g++", "clang++", "cl")]
    compiler = next(filter(None, compilers), None)
    line("compiler", compiler or "none found: torch.compile needs one on CPU")
    line("backends", ", ".join(torch._dynamo.list_backends()))
    line(
        "distributed",
        ", ".join(name for name in ("nccl", "gloo", "mpi") if getattr(torch.distributed, f"is_{name}_available")())
        or "no",
    )
    line("python", platform.python_version())
    requirements = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    for requirement in requirements:
        if requirement.marker is None:
            line(requirement.name, _installed(requirement.name) or "missing")
    for extra in importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []:
        required = [
            item.name
            for item in requirements
            if item.marker and item.marker.evaluate({"extra": extra}) and not item.marker.evaluate({"extra": ""})
        ]
        missing = [name for name in required if name != DISTRIBUTION and _installed(name) is None]
        line(
            f"[{extra}]",
            f"not installed ({', '.join(missing)}): pip install '{DISTRIBUTION}[{extra}]'" if missing else "installed",
        )


def _installed(distribution: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
