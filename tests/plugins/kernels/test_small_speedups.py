"""channels-last, threads and matmul-precision."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from fastloop import Plugin, PluginError, Trainer, hookimpl
from fastloop.hooks import PluginSet
from fastloop.recipe import make_recipe
from fastloop.testing import tiny_data
from fastloop_plugins.kernels.channels_last import ChannelsLast
from fastloop_plugins.precision.matmul_precision import MatmulPrecision
from fastloop_plugins.strategies.cpu_affinity import CpuAffinity


def images() -> torch.utils.data.TensorDataset:
    rows = tiny_data()
    inputs, targets = rows.tensors
    return torch.utils.data.TensorDataset(inputs[:, None, None, :].expand(-1, 3, 8, -1).contiguous(), targets)


def convolutions() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


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

    assert trained(ChannelsLast(), Watch()) == pytest.approx(trained(), rel=1e-5)
    assert formats
    assert all(formats)


def test_channels_last_logs_model_without_convolutions(tiny_run, caplog):
    tiny_run([ChannelsLast()], epochs=1)
    assert "no weight of 4 or 5 dimensions" in caplog.text


def test_threads_are_set_for_the_run_and_put_back(tiny_run, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    seen = []

    class Watch(Plugin):
        name = "watch"

        @hookimpl
        def after_step(self):
            seen.append((torch.get_num_threads(), (torch.tensor(1e-38) * 1e-3).item()))

    before = torch.get_num_threads(), os.sched_getaffinity(0)
    result = tiny_run([CpuAffinity(count=2), Watch()], epochs=1)
    assert set(seen) == {(2, 0.0)}
    assert result.summary["threads"] == 2
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before
    assert (torch.tensor(1e-38) * 1e-3).item() > 0


def test_processes_of_a_machine_share_its_processors(tiny_run, monkeypatch):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor cannot be shared")
    seen = []

    class Watch(Plugin):
        name = "watch"

        @hookimpl
        def after_step(self):
            seen.append((frozenset(os.sched_getaffinity(0)), torch.get_num_threads()))

    every = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    tiny_run([CpuAffinity(), Watch()], epochs=1)
    assert set(seen) == {(frozenset(every[: len(every) // 2]), len(every) // 2)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, {"OMP_WAIT_POLICY": "passive"}), ({"wait": "active"}, {"OMP_WAIT_POLICY": "active"}), ({"wait": None}, {})],
)
def test_waiting_threads_sleep_unless_the_recipe_says_otherwise(options, expected):
    recipe = make_recipe({"plugins": [{"cpu-affinity": options}]})
    assert PluginSet([CpuAffinity(**options)]).environment(recipe) == expected


def test_waiting_threads_of_a_training_process_sleep(tmp_path):
    """libgomp shows its settings when it is loaded. It reads them only then, so the variable must be set before torch is imported."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: {files: {train: none.csv}, text: text, label: label}\nmodel: {name: nowhere}\nplugins: [cpu-affinity]\n")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | {"OMP_DISPLAY_ENV": "true"}
    command = [sys.executable, "-m", "fastloop", "train", str(recipe)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if "OPENMP DISPLAY ENVIRONMENT" not in done.stderr:
        pytest.skip("torch uses another OpenMP")
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr


def test_tf32_needs_cuda(tiny_run):
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    with pytest.raises(PluginError, match="'matmul-precision' needs a device of type cuda"):
        tiny_run([MatmulPrecision()])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 needs CUDA")
def test_tf32_is_near_fp32_and_put_back(tiny_run):
    plain, ours = tiny_run(device="auto"), tiny_run([MatmulPrecision()], device="auto")
    assert ours.losses == pytest.approx(plain.losses, rel=2e-2)
    assert torch.get_float32_matmul_precision() == "highest"
