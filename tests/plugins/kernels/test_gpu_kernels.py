"""liger and torchao-fp8: refused where they cannot be; the rest needs their hardware and their packages.

Modules:
    plugins/fastloop_plugins/kernels/liger.py
    plugins/fastloop_plugins/precision/torchao_fp8.py
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from text_helpers import TINY_GPT
from torch import nn

from fastloop import PluginError, Trainer
from fastloop.runtime.hardware import Machine
from fastloop.testing import Recorder, assert_problem, expect_problem
from fastloop_plugins.kernels.liger import Liger
from fastloop_plugins.precision.torchao_fp8 import TorchaoFp8

A100 = Machine("cuda", "A100", ("fp32", "bf16", "fp16"))
CUDA = torch.cuda.is_available()
with_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="the extra fp8 is not installed")


@pytest.mark.parametrize("plugin", ["liger", "torchao-fp8"])
def test_a_cpu_is_refused(tiny_run, plugin):
    with expect_problem(f"requirement-missing '{plugin}' cuda cpu", PluginError):
        tiny_run([plugin], device="cpu")


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="the extra liger is installed")
def test_missing_kernel_package_error_has_install_command():
    plugin = Liger()
    device, package = [need.missing(plugin, A100) for need in plugin.requirements]
    assert device is None
    assert "liger-kernel>=0.5" in package
    assert "pip install 'fastloop-train[liger]'" in package


def test_a_device_without_fp8_units_is_refused():
    plugin = TorchaoFp8()
    said = [need.missing(plugin, A100) for need in plugin.requirements]
    assert said[0] is None
    assert all(name in said[1] for name in ("fp8", "cuda", "fp32, bf16, fp16"))


def wide_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))


class Anywhere(TorchaoFp8):
    """torchao also computes fp8 on a CPU, slowly: enough to test the conversion and a training."""

    requirements = ()


@with_torchao
@pytest.mark.filterwarnings("ignore")  # torchao's own, at import
def test_layers_of_suitable_sizes_train_in_fp8_and_keep_the_names_of_their_weights(tiny_run, caplog):
    plain = tiny_run(model=wide_model())
    ours = tiny_run([Anywhere(min_features=16)], model=wide_model())
    kinds = [type(module).__name__ for module in ours.model if hasattr(module, "weight")]
    assert kinds == ["Linear", "Float8Linear", "Linear"]
    assert list(ours.weights) == list(plain.weights)
    assert ours.losses != plain.losses
    assert sum(ours.losses[-9:]) == pytest.approx(sum(plain.losses[-9:]), rel=0.2)
    assert_problem(caplog, "no-speedup torchao-fp8 compile")


@with_torchao
@pytest.mark.filterwarnings("ignore")
def test_fp8_logs_model_without_suitable_layers(tiny_run, caplog):
    assert not {type(module).__name__ for module in tiny_run([Anywhere()], model=wide_model(), epochs=1).model} & {
        "Float8Linear"
    }
    assert_problem(caplog, "no-effect torchao-fp8 16 1024")


@with_torchao
@pytest.mark.filterwarnings("ignore")
def test_layers_can_be_left_out_by_name(tiny_run):
    ours = tiny_run([Anywhere(min_features=16, skip=("2",))], model=wide_model(), epochs=1)
    assert type(ours.model[2]).__name__ == "Linear"


@pytest.mark.gpu
@pytest.mark.skipif(
    not CUDA or importlib.util.find_spec("torchao") is None, reason="needs CUDA with fp8 and the extra fp8"
)
@pytest.mark.filterwarnings("ignore")
def test_fp8_trains_on_its_device(tiny_run):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device has no fp8 units")
    plain = tiny_run(model=wide_model())
    ours = tiny_run([TorchaoFp8(min_features=16)], model=wide_model())
    assert sum(ours.losses[-9:]) == pytest.approx(sum(plain.losses[-9:]), rel=0.2)


SIZES = {
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 100,
    },
    "gpt2": {key: value for key, value in TINY_GPT.items() if key != "model_type"} | {"vocab_size": 100},
}


def train_decoder(kind: str, folder: Path, *plugins: str) -> list[float]:
    """Train a tiny decoder on token ids, int64 of shape (batch, 16); losses of its four steps."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    ids = (torch.arange(16) + torch.arange(32)[:, None]) % 10  # each token determines the next
    data = [{"input_ids": row, "labels": row} for row in ids]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES[kind]))
    recorder = Recorder()
    Trainer(model, data, plugins=[*plugins, recorder], batch_size=8, epochs=1, lr=1e-2, output=folder).fit()
    return recorder.losses


@pytest.mark.parametrize("kind", SIZES)
def test_the_decoders_that_liger_is_tried_on_train_without_it(tmp_path, kind):
    losses = train_decoder(kind, tmp_path / kind)
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.gpu
@pytest.mark.skipif(
    not CUDA or importlib.util.find_spec("liger_kernel") is None, reason="needs CUDA and the extra liger"
)
def test_liger_computes_what_transformers_does_and_leaves_other_models(tmp_path, caplog):
    plain = train_decoder("llama", tmp_path / "plain")
    assert train_decoder("llama", tmp_path / "liger", "liger") == pytest.approx(plain, rel=1e-3)
    train_decoder("gpt2", tmp_path / "gpt2", "liger")
    assert_problem(caplog, "no-effect liger: gpt2")
