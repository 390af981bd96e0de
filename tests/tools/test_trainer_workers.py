"""Workers that are spawned by a script which trains when it is imported.

Modules:
    core/fastloop/runtime/main_module.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from long_form import long_form_only

SCRIPT = """
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from fastloop import Trainer

rows = torch.randn(16, 4)
data = TensorDataset(rows, rows[:, :1])
loader = DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="METHOD")
Trainer(
    nn.Linear(4, 1), loader, loss=mse_loss, epochs=1, device="cpu", output="run", plugins=[{"progress": False}]
).fit()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=long_form_only)])
def test_the_message_names_the_guard_and_no_lock(method):
    """A real process: the workers import its main module."""
    Path("work.py").write_text(SCRIPT.replace("METHOD", method))
    done = subprocess.run([sys.executable, "work.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert 'if __name__ == "__main__":' in done.stderr.splitlines()[-1]
    assert ".lock" not in done.stderr
