"""The capabilities of this machine.

Modules:
    core/fastloop/runtime/hardware.py
"""

from __future__ import annotations

from fastloop.distributed import ranks
from fastloop.runtime.hardware import this_machine


def test_the_number_of_processes_is_the_present_one(monkeypatch):
    """A process plans runs of other numbers of processes, and tests set the variables of a launcher."""
    with ranks.planned(2):
        assert this_machine("cpu").processes == 2
    assert this_machine("cpu").processes == 1
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert this_machine("cpu").processes == 3
