"""``fastloop doctor``: the capabilities of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from fastloop.plugins.installed import entry_points, installed_version, name_and_version
from fastloop.plugins.packages import DISTRIBUTION

if TYPE_CHECKING:
    from packaging.requirements import Requirement

BACKENDS = ("nccl", "gloo", "mpi")
"""Backends of torch.distributed that the command asks for."""


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

    machine = this_machine()
    device = f"{machine.device} ({machine.name})"
    if machine.device != "cpu":
        device += f" x {torch.accelerator.device_count()}"
    show("device", device)
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        for point in entry_points("torch.backends"):
            package = " ".join(name_and_version(point.dist)) if point.dist else point.value
            show(
                "not loaded",
                f"{point.name} of {package}: TORCH_DEVICE_BACKEND_AUTOLOAD=1 fastloop doctor runs its code",
            )
    show("dtypes", ", ".join(machine.dtypes))
    show("processors", f"{platform_support.cores()}, of which torch uses {torch.get_num_threads()}")
    compilers = [shutil.which(name) for name in ("g++", "clang++", "cl")]
    compiler = next(filter(None, compilers), None)
    show("compiler", compiler or "none found: torch.compile needs one on CPU")
    show("backends", ", ".join(torch._dynamo.list_backends()))
    available = [name for name in BACKENDS if getattr(torch.distributed, f"is_{name}_available")()]
    show("distributed", ", ".join(available) or "no")
    show("python", platform.python_version())
    requirements = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    for requirement in requirements:
        if requirement.marker is None:
            show(requirement.name, installed_version(requirement.name) or "missing")
    for extra in importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []:
        required = [name for name in _packages_of(extra, requirements) if name != DISTRIBUTION]
        missing = [name for name in required if installed_version(name) is None]
        state = "installed"
        if missing:
            state = f"not installed ({', '.join(missing)}): pip install '{DISTRIBUTION}[{extra}]'"
        show(f"[{extra}]", state)


def show(name: str, value: str) -> None:
    """Print a line."""
    typer.echo(f"{name:<23}{value}")


def _packages_of(extra: str, requirements: list[Requirement]) -> Iterator[str]:
    """The packages that an extra adds to a plain installation."""
    for requirement in requirements:
        marker = requirement.marker
        if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            yield requirement.name
