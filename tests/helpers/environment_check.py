"""The environment variables that a test leaves changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

NOT_OF_A_TEST = {
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # accelerate, while a thread of a command looks for a GPU
}
"""Environment variables that pytest and threads change at any time, and restore themselves."""
OF_A_RUN = ("ACCELERATE_", "FASTLOOP_", "FSDP_", "LOCAL_", "MASTER_", "RANK", "SLURM_", "TORCHELASTIC_", "WORLD_SIZE")
"""Beginnings of the names with which launchers and fastloop describe a run. A library that sets another variable once
for the whole process, such as its cache folder, is no error of a test."""


@contextmanager
def unchanged_environment() -> Iterator[None]:
    """Restore the environment variables at the end of this block.

    Raises:
        AssertionError: A variable that describes a run was changed: its test did not clean up.
    """
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = []
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name) or name in NOT_OF_A_TEST:
            continue
        if name.startswith(OF_A_RUN):
            changed.append(name)
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert changed == [], f"environment variables that the test leaves changed: {changed}"
