"""memory: the same numbers, and far fewer pages faulted in."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from fastloop_plugins.memory import Memory

STEPS = """
import json, sys
import torch
from torch import nn
from fastloop import Trainer
from fastloop_plugins.memory import Memory

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 3))
rows = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))
losses = []
plugins = [{"log": False}, {"progress": False}, *([Memory()] if sys.argv[1] == "with" else [])]
def loss(predictions, targets):
    losses.append(nn.functional.cross_entropy(predictions, targets))
    return losses[-1]
import resource
trainer = Trainer(model, torch.utils.data.TensorDataset(rows, rows[:, :3].argmax(1)), plugins=plugins, loss=loss, batch_size=512,
                  epochs=10, output=sys.argv[1], device="cpu")
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
summary = trainer.fit()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps({"losses": [value.item() for value in losses], "faults": faults, "memory": summary.get("memory")}))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is glibc's on Linux only")
def test_pages_are_kept_from_step_to_step_and_numbers_are_the_same():
    found = {}
    for name in ("with", "without"):
        done = subprocess.run([sys.executable, "-c", STEPS, name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout.splitlines()[-1])
        found.setdefault("said", done.stderr)
    assert found["with"]["losses"] == found["without"]["losses"]
    assert found["with"]["faults"] < 0.5 * found["without"]["faults"], found
    assert "stays as it is" not in found["said"]
    assert found["with"]["memory"]["page_faults_a_step"] > 0
    assert found["without"]["memory"] is None


def test_a_run_goes_on_with_it(tiny_run, tmp_path):
    whole = tiny_run([Memory()])
    tiny_run([Memory()], max_steps=9, save_every=9, output=tmp_path / "cut")
    assert tiny_run([Memory()], output=tmp_path / "cut", resume=True).losses == whole.losses[9:]


def test_another_allocator_is_said(tiny_run, caplog, monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    tiny_run([Memory()], epochs=1)
    assert "this system's allocator is not glibc's" in caplog.text
