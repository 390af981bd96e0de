"""channels-last, the products of fp32 matrices, and the load of other programs.

Modules:
    plugins/fastloop_plugins/_foreign_load.py
    plugins/fastloop_plugins/kernels/channels_last.py
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from fastloop import Plugin, PluginError, Trainer, hookimpl
from fastloop.testing import assert_problem, expect_problem, tiny_data
from fastloop_plugins import _foreign_load as foreign_load
from fastloop_plugins._foreign_load import ForeignLoad
from fastloop_plugins.kernels.channels_last import ChannelsLast
from fastloop_plugins.precision.amp import Amp


def images() -> torch.utils.data.TensorDataset:
    rows = tiny_data()
    inputs, targets = rows.tensors
    return torch.utils.data.TensorDataset(inputs[:, None, None, :].expand(-1, 3, 8, -1).contiguous(), targets)


def convolutions() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


def test_convolutions_run_channels_last_with_the_same_numbers():
    formats = []

    class Watch(Plugin):
        name = "watch"

        @hookimpl
        def before_fit(self, run):
            run.unwrap_model()[2].register_forward_hook(
                lambda module, inputs, output: formats.append(output.is_contiguous(memory_format=torch.channels_last))
            )

    def trained(*plugins):
        losses = []

        class Losses(Plugin):
            name = "losses"

            @hookimpl
            def after_step(self, loss):
                losses.append(loss.item())

        arguments = {"loss": nn.functional.cross_entropy, "epochs": 1, "batch_size": 8, "output": f"run{len(plugins)}"}
        Trainer(convolutions(), images(), plugins=[*plugins, Losses()], **arguments).fit()
        return losses

    assert trained(ChannelsLast(), Watch()) == pytest.approx(trained(), rel=1e-4)  # TF32 on CUDA
    assert formats
    assert all(formats)


def test_channels_last_logs_model_without_convolutions(tiny_run, caplog):
    tiny_run([ChannelsLast()], epochs=1)
    assert_problem(caplog, "no-effect channels-last 4 5")


def test_programs_of_others_are_load_and_the_runs_own_processes_are_not():
    busy = f"{shlex.quote(sys.executable)} -c 'while True: pass'"
    load = ForeignLoad()
    orphan = int(
        subprocess.run(
            ["sh", "-c", f"{busy} >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True, timeout=600
        ).stdout
    )
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        # ends by the test's timeout otherwise
        while load.cores() < 0.3 or foreign_load._own_seconds().get(child.pid, 0.0) < 0.1:
            time.sleep(0.05)
        assert orphan not in foreign_load._own_seconds()
    finally:
        os.kill(orphan, signal.SIGKILL)
        child.kill()
        child.wait()


def test_tf32_needs_cuda(tiny_run):
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    with expect_problem("requirement-missing 'amp'", PluginError):
        tiny_run([Amp(dtype="fp32", fp32_matmul="high")])


def test_amp_in_fp32_changes_nothing(tiny_run):
    assert tiny_run([Amp(dtype="fp32")]).losses == tiny_run().losses


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 needs CUDA")
def test_tf32_is_near_fp32_and_put_back(tiny_run):
    plain, ours = tiny_run(device="auto"), tiny_run([Amp(dtype="fp32", fp32_matmul="high")], device="auto")
    assert ours.losses == pytest.approx(plain.losses, rel=2e-2)
    assert torch.get_float32_matmul_precision() == "highest"
