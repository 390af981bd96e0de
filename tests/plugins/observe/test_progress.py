"""The plugin ``progress``: a live line on a terminal, plain lines elsewhere.

Modules:
    plugins/fastloop_plugins/observe/progress.py
"""

from __future__ import annotations

import os
import pty
import re
import threading
import time

import pytest
import torch
from torch import nn

from fastloop import Plugin, Trainer, hookimpl
from fastloop.testing import start, tiny_data, tiny_model

LINE = r"step \d+/18, epoch [12]/2, loss \d\.\d+, [\d.]+ samples/s, \d:\d\d left"


class Slow(Plugin):
    name = "slow"

    @hookimpl
    def before_step(self, run):
        time.sleep(0.05)
        (progress,) = (plugin for plugin in run.plugins if plugin.name == "progress")
        if progress.bar is not None:
            assert progress.bar.live.refresh_per_second == 10, "an update each 0.1 seconds, as the option says"


def train_slowly(terminal: str | None = None) -> float:
    """Train in a process of its own, with output to a file, or to the terminal with this path. Returns the seconds that
    it took."""
    if terminal is not None:
        for number in (1, 2):
            os.dup2(os.open(terminal, os.O_WRONLY | os.O_NOCTTY), number)
    plugins = [{"progress": {"every": 0.2, "refresh": 0.1}}, Slow()]
    trainer = Trainer(
        tiny_model(),
        tiny_data(),
        tiny_data(32),
        plugins=plugins,
        loss=nn.functional.cross_entropy,
        epochs=2,
        batch_size=8,
    )
    began = time.monotonic()
    trainer.fit()
    return time.monotonic() - began


def test_on_a_terminal_one_live_line_tells_step_loss_speed_and_time_left(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    master, slave = pty.openpty()
    output = []

    def read() -> None:
        while True:
            try:
                output.append(os.read(master, 65536))
            except OSError:  # Linux: the other end is closed
                break
            if not output[-1]:
                break

    reader = threading.Thread(target=read)
    reader.start()
    (ended,) = start(1, train_slowly, os.ttyname(slave))
    os.close(slave)
    reader.join()
    os.close(master)
    text = b"".join(output).decode()
    assert ended.code == 0, text
    assert re.search(LINE, text)
    assert "\x1b[" in text, "the line is drawn over"
    assert "evaluating validation" in text


@pytest.mark.slow
def test_elsewhere_plain_lines_come_at_intervals_without_control_characters():
    (ended,) = start(1, train_slowly)
    assert ended.code == 0, ended.output
    shown = ended.output.splitlines()
    assert 2 <= len(shown) <= 1 + ended.result / 0.2, "one each 0.2 s at most, not one a step"
    assert all(re.fullmatch(LINE, line) for line in shown), ended.output


def test_progress_changes_no_number(tiny_run):
    shown, hidden = tiny_run([{"progress": {"every": 1e-6}}]), tiny_run([{"progress": False}])
    assert shown.losses == hidden.losses
    assert all(torch.equal(shown.weights[name], hidden.weights[name]) for name in hidden.weights)
