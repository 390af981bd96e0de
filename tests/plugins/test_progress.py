"""The plugin ``progress``: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import torch

SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from fastloop.testing import tiny_data, tiny_model
from torch import nn
from fastloop import Plugin, Trainer, hookimpl

class Slow(Plugin):
    name = "slow"

    @hookimpl
    def before_step(self):
        time.sleep(0.05)

Trainer(tiny_model(), tiny_data(), tiny_data(32), plugins=[{{"progress": {{"every": 0.2, "refresh": 0.1}}}}, Slow()],
        loss=nn.functional.cross_entropy, epochs=2, batch_size=8).fit()
"""


def script() -> list[str]:
    return [sys.executable, "-c", SCRIPT.format(tests=str(Path(__file__).parents[1]))]


def test_on_a_terminal_one_live_line_tells_step_loss_speed_and_time_left():
    master, slave = pty.openpty()
    process = subprocess.Popen(script(), stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm", "COLUMNS": "160"})
    os.close(slave)
    output = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(master)
    assert process.wait(timeout=300) == 0
    text = output.decode()
    assert re.search(r"step \d+/18, epoch [12]/2, loss \d\.\d+, [\d.]+ samples/s, 0:0\d left", text)
    assert "\x1b[" in text, "the line is drawn over"
    assert "evaluating evaluate" in text


def test_elsewhere_plain_lines_come_at_intervals_without_control_characters():
    done = subprocess.run(script(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    shown = done.stdout.splitlines()
    assert 2 <= len(shown) <= 10, "about one each 0.2 s of a second's run, not one a step"
    assert all(re.fullmatch(r"step \d+/18, epoch [12]/2, loss \d\.\d+, [\d.]+ samples/s, 0:0\d left", line) for line in shown)
    assert "\x1b" not in done.stdout


def test_progress_changes_no_number(tiny_run):
    shown, hidden = tiny_run([{"progress": {"every": 1e-6}}]), tiny_run([{"progress": False}])
    assert shown.losses == hidden.losses
    assert all(torch.equal(shown.weights[name], hidden.weights[name]) for name in hidden.weights)
