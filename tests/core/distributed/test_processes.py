"""Several processes: without a plugin in the slot ``strategy``, a run of several processes ends with an error."""

from __future__ import annotations

import os
from pathlib import Path

import forked
import pytest

from fastloop.cli import launch


@pytest.mark.slow
def test_two_processes_without_a_strategy_are_refused():
    pytest.importorskip("sklearn")
    ranks = [launch.member(rank, 2, "127.0.0.1", str(launch.free_port())) for rank in (0, 1)]
    train = ("-m", "fastloop", "train", "digits_module", "train.device=cpu", "output=out")
    for command in [forked.Command(*train, env=os.environ | rank) for rank in ranks]:
        assert command.wait(300) == 2
        (error,) = command.stderr.splitlines()
        assert error.startswith("error: ")
        assert "started with 2 processes, but no plugin fills the slot 'strategy'" in error
    assert not Path("out").exists()
