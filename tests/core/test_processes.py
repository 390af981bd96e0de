"""Several processes: until a plugin fills the slot ``strategy``, a run that was started so says it and ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_two_processes_without_a_strategy_are_refused():
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "fastloop"]
    done = subprocess.run(
        [*command, "train", "digits_module", "train.device=cpu", "output=out"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said
    assert all("started with 2 processes, but no plugin fills the slot 'strategy'" in line for line in said)
    assert "exitcode  : 2" in done.stderr
    assert not Path("out").exists()
