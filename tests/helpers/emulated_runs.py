"""A plugin of pytest: runs that name no device train on the emulated one, as they would train on a GPU.

    PYTHONPATH=tests/helpers pytest -p emulated_runs -m "not slow" tests/plugins/training

It covers ``Trainer`` and ``tiny_run``. A test that passes without it and fails with it may mix tensors of the device
and of the host, which fails on a GPU, too. Other failures are those of the emulation:

* It has no autocast, and torch.compile refuses its dispatch mode.
* Checkpointed blocks draw other dropout.
* It moves the model in ``after_prepare``, after strategies, and Accelerate does not move the optimizer's state.
* The settings ``placing`` and ``pin_memory`` are its own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice

from fastloop import Trainer

EXPECTED_WARNINGS = ("'pin_memory' argument is set as true", "for .* copying from a non-meta parameter")


@pytest.fixture(autouse=True)
def _emulated_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put each run without a device on the emulated one."""
    fit: Any = Trainer.fit

    def fit_emulated(self: Any, *arguments: Any, **settings: Any) -> Any:
        if self.resolved.recipe.train.device != "auto":
            return fit(self, *arguments, **settings)
        device = EmulatedDevice()
        self.resolved = self.resolved.with_extra([device])
        with pytest.MonkeyPatch.context() as patch, device.emulate(patch):
            # torch swaps no weight of which a weak reference exists, such as Trainer's; they stay valid here
            patch.setattr(torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda tensor: []))
            return fit(self, *arguments, **settings)

    monkeypatch.setattr(Trainer, "fit", fit_emulated)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the warnings of torch about this device."""
    for item in items:
        for message in EXPECTED_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))
