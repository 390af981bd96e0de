"""Train on the emulated device, and name what waited for it in each step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from emulated_device import EmulatedDevice
from training_runs import execute

from fastloop import Plugin
from fastloop.lifecycle import build
from fastloop.plugins import resolve as registry
from fastloop.recipe import make_recipe
from fastloop.testing import TEXTS, write_texts

EXPECTED_WARNINGS = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found"),
    pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter"),
]
"""The ``pytestmark`` of a file that calls ``train_emulated``."""
CHECK = "fastloop_plugins/guards/_updates.py"
"""The first steps are read once each until all weights are known to change: step 1, and step 2 where warm-up starts
from a rate of 0."""
COPY = "fastloop/runtime/host_copies.py"
"""It waits for values that were copied to the host."""


def recipe(task: Mapping[str, Any] = TEXTS, plugins: tuple[Any, ...] = (), **train: Any) -> Any:
    """67 texts in batches of 8: nine steps an epoch."""
    write_texts(Path())
    settings = {"epochs": 1, "batch_size": 8, "lr": 1e-3, "device": "cpu"} | train
    if not any("progress" in plugin for plugin in plugins):
        plugins = (*plugins, {"progress": False})
    return make_recipe({**task, "train": settings, "plugins": list(plugins), "output": "run"})


def train_emulated(
    *arguments: Any, pin_memory: bool = True, objects: tuple[Plugin, ...] = (), **settings: Any
) -> tuple[EmulatedDevice, dict[str, Any]]:
    """Train on the emulated device: ``train_emulated(task, plugins, epochs=2)``.

    Args:
        arguments: Those of ``recipe``, and so are ``settings``.
        objects: More plugins.

    Returns:
        The plugin that recorded the waits, and the summary.
    """
    device = EmulatedDevice(pin_memory)
    with pytest.MonkeyPatch.context() as patch, device.emulate(patch):
        wanted = recipe(*arguments, **settings)
        return device, execute(build(registry.resolve(wanted, objects=[*objects, device])))


def files(waits: list[str]) -> list[str]:
    """The source file of each wait."""
    return [wait.partition(" in ")[2].partition(": ")[0] for wait in waits]


def waiting(device: EmulatedDevice) -> dict[int, list[str]]:
    """Number of each step that waits -> the source file of each wait."""
    return {number: files(waits) for number, waits in enumerate(device.steps, 1) if waits}
